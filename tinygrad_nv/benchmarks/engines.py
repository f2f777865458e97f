"""Models in this process: ours, and peers that get the same workload.

Protocol: an engine's `run(requests)` answers all of them, greedily and to their full lengths, and returns the
seconds it took. `peer(name, …)` opens an installed peer, or raises `NVError` if it is not installed.
"""
from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tinygrad_nv.benchmarks.workload import BenchRequest
from tinygrad_nv.errors import ModelError, NVError

PEERS = ("vllm", "transformers", "llama.cpp")
MODULES = {"vllm": "vllm", "transformers": "transformers", "llama.cpp": "llama_cpp"}
PACKAGES = {"vllm": "vllm", "transformers": "transformers torch", "llama.cpp": "llama-cpp-python"}


class BenchEngine(Protocol):
    """An engine under test."""

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """Seconds for all requests."""


class TinygradNV:
    """An `LLM` of this package."""

    def __init__(self, llm: Any) -> None: self.llm = llm

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """All requests at once; the engine batches them."""
        from tinygrad_nv.engine.sampling import SamplingParams
        params = [SamplingParams(temperature=0.0, max_tokens=one.output, ignore_eos=True) for one in workload]
        started = time.perf_counter()
        done = self.llm.generate([list(one.prompt) for one in workload], params)
        seconds = time.perf_counter() - started
        require_whole([len(each.token_ids) for each in done], workload)
        return seconds


class Transformers:
    """transformers' `generate`, in batches of at most `batch`, padded on the left to the longest of each."""

    def __init__(self, directory: Path, dtype: str, batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        self.torch, self.batch = torch, batch
        kind = "auto" if dtype == "auto" else getattr(torch, dtype)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=kind).eval()
        if torch.cuda.is_available(): self.model = self.model.cuda()

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """Requests of a batch run as long as its longest."""
        started = time.perf_counter()
        for at in range(0, len(workload), self.batch): self._batch(workload[at:at + self.batch])
        return time.perf_counter() - started

    def _batch(self, workload: Sequence[BenchRequest]) -> None:
        longest, most = max(len(one.prompt) for one in workload), max(one.output for one in workload)
        ids = self.torch.tensor([[0] * (longest - len(one.prompt)) + list(one.prompt) for one in workload])
        mask = self.torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt)
                                  for one in workload])
        device = self.model.device
        with self.torch.no_grad():
            done = self.model.generate(ids.to(device), attention_mask=mask.to(device), max_new_tokens=most,
                                       min_new_tokens=most, do_sample=False, pad_token_id=0)
        require_whole([done.shape[1] - longest] * len(workload), [BenchRequest((), most)] * len(workload))


class VLLM:
    """vLLM's own `LLM`."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import vllm
        self.vllm, self.llm = vllm, vllm.LLM(model=str(directory), dtype=dtype, skip_tokenizer_init=True)

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """All at once."""
        params = [self.vllm.SamplingParams(temperature=0.0, max_tokens=one.output, ignore_eos=True,
                                           detokenize=False) for one in workload]
        started = time.perf_counter()
        done = self.llm.generate([{"prompt_token_ids": list(one.prompt)} for one in workload], params,
                                 use_tqdm=False)
        seconds = time.perf_counter() - started
        require_whole([len(each.outputs[0].token_ids) for each in done], workload)
        return seconds


class LlamaCpp:
    """llama.cpp, one prompt after the other."""

    def __init__(self, path: Path, context: int) -> None:
        import llama_cpp
        self.llama = llama_cpp.Llama(model_path=str(path), n_ctx=context, verbose=False)

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """Token by token: its `generate` has no option to ignore the end token."""
        started = time.perf_counter()
        for one in workload:
            self.llama.reset()
            following = self.llama.generate(list(one.prompt), temp=0.0)
            for _ in range(one.output): next(following)
        return time.perf_counter() - started


def require_installed(name: str) -> None:
    """Raises `NVError` for a peer that is not installed."""
    if importlib.util.find_spec(MODULES[name]) is None:
        raise NVError(f"{name} is not installed, so there is nothing to compare with",
                      f"the Python package {MODULES[name]}",
                      f"pip install {PACKAGES[name]}, or leave --against out")


def peer(name: str, directory: Path, dtype: str, batch: int, context: int,
         gguf: Path | None) -> BenchEngine:
    """A loaded peer. Raises `NVError`."""
    require_installed(name)
    if name == "vllm": return VLLM(directory, dtype)
    if name == "transformers": return Transformers(directory, dtype, batch)
    if gguf is None:
        raise ModelError("llama.cpp reads GGUF files, and no --gguf names one", "the same model as GGUF",
                         "convert it with llama.cpp's convert_hf_to_gguf.py, and name it with --gguf")
    return LlamaCpp(gguf, context)


def require_whole(lengths: Sequence[int], workload: Sequence[BenchRequest]) -> None:
    """Raises `NVError` for an answer that ended early: it would make an engine look fast."""
    for length, one in zip(lengths, workload, strict=True):
        if length != one.output:
            raise NVError(f"an answer has {length} tokens", f"{one.output}, all that were asked for",
                          "use shorter prompts or outputs: the context is full")
