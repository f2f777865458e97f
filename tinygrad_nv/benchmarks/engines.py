"""Models in this process, vLLM's in one of its own: ours, and peers that get the same workload.

Protocol: an engine's `run(requests)` answers all of them, greedily and to their full lengths, and returns the
seconds it took. `require_installed` raises `NVError` for a peer that is not there; `peer(name, …)` opens one.
"""
from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tinygrad_nv.benchmarks import vllm_environment
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
    """vLLM's own `LLM`, in a process of the interpreter that has vLLM (vllm_worker.py), which is stopped by a
    signal while it is not asked: its scheduler and its threads poll."""

    def __init__(self, directory: Path, dtype: str) -> None:
        installed = importlib.util.find_spec(MODULES["vllm"]) is not None
        python, variables = (sys.executable, dict(os.environ)) if installed else \
            (str(vllm_environment.interpreter()), vllm_environment.environment())
        words = [python, str(Path(__file__).with_name("vllm_worker.py")), str(directory), dtype]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=variables, start_new_session=True)
        atexit.register(self.close)
        self._read()

    def run(self, workload: Sequence[BenchRequest]) -> float:
        """All at once; the seconds are those of `LLM.generate` in its process."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps([(list(one.prompt), one.output) for one in workload]), file=self.process.stdin,
                  flush=True)
        said = self._read()
        require_whole(said["lengths"], workload)
        return float(said["seconds"])

    def close(self) -> None:
        """Ends its processes."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        """Returns its next line, and stops it. Raises `NVError` where it ended."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise NVError(f"vLLM ended with exit code {self.process.wait()} (its words are above)",
                          "an answer",
                          "see whether `vllm bench latency` runs this model, or leave --against out")
        self._signal(signal.SIGSTOP)
        said: dict[str, Any] = json.loads(line)
        return said

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError): os.killpg(self.process.pid, number)


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


def require_installed(name: str, device: str) -> None:
    """Raises `NVError` for a peer that is not installed. Where `device` is a CPU, vLLM gets an environment of
    its own, which is made once."""
    if importlib.util.find_spec(MODULES[name]) is not None: return
    if name == "vllm" and device == "CPU": vllm_environment.interpreter()
    else:
        raise NVError(f"{name} is not installed, so there is nothing to compare with",
                      f"the Python package {MODULES[name]}",
                      f"pip install {PACKAGES[name]}, or leave --against out")


def peer(name: str, directory: Path, dtype: str, batch: int, context: int,
         gguf: Path | None) -> BenchEngine:
    """Returns a loaded peer, which `require_installed` has found. Raises `NVError`."""
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
