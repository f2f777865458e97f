"""How fast are models whose layers keep states beside transformers, and does time grow with the context?

    python bench/cpu/hybrids.py [MODEL …] [--rounds 5] [--threads N] [--lengths 1024 4096 16384 65536]

Random models of about 100 million parameters, in float32: prompts of 512 and 2048 tokens, and 32 tokens after
each. Both engines have as many threads; a round times one after the other, and the median of rounds counts.
Then, of a small model without attention, the seconds of a prompt token and of a decoded token by the length
of the prompt, and the bytes that a sequence holds.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tinygrad.dtype import dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.models.config import read_config

COMMON = {"vocab_size": 32_000, "tie_word_embeddings": True, "max_position_embeddings": 8192}
ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 4}
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", {**COMMON, **ATTENTION, "hidden_size": 768, "intermediate_size": 2048,
                      "block_auto_adjust_ff_dim": False, "num_hidden_layers": 14,
                      "layer_types": ["conv", "conv", "full_attention"] * 4 + ["conv", "conv"]}),
    "qwen3.5": ("Qwen3_5", {**COMMON, **DELTA, "hidden_size": 640, "intermediate_size": 1792, "head_dim": 128,
                            "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2,
                            "linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "mamba2": ("Mamba2", {**COMMON, "hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128,
                          "n_groups": 1, "num_hidden_layers": 24}),
    "granite-4": ("GraniteMoeHybrid",
                  {**COMMON, **ATTENTION, "hidden_size": 768, "intermediate_size": 512,
                   "shared_intermediate_size": 2048, "num_local_experts": 0, "num_hidden_layers": 12,
                   "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
                   "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 2})}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta rule": ("Qwen3_5", {**COMMON, **DELTA, "vocab_size": 2048, "hidden_size": 256,
                                     "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 4,
                                     "linear_num_key_heads": 2, "linear_num_value_heads": 2,
                                     "layer_types": ["linear_attention"] * 4,
                                     "max_position_embeddings": 1 << 17}),
    "mamba2": ("Mamba2", {"vocab_size": 2048, "hidden_size": 256, "num_heads": 8, "head_dim": 64,
                          "state_size": 128, "n_groups": 1, "num_hidden_layers": 4})}
PROMPTS, DECODED = (512, 2048), 32


def make_model(family: str, fields: dict[str, Any], directory: Path) -> Any:
    """Returns transformers' model, and writes it."""
    kind: Any = getattr(transformers, f"{family}TextConfig", None) \
        or getattr(transformers, f"{family}Config")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(kind(**fields)).eval().float()
    made.generation_config.eos_token_id = None
    made.save_pretrained(directory)
    return made


def open_llm(directory: Path, longest: int) -> LLM:
    """Returns an engine of one sequence that keeps no prefix."""
    return LLM(directory, device="CPU", dtype="float32", max_model_len=longest, max_num_seqs=1,
               max_num_batched_tokens=2048, enable_prefix_caching=False)


class Timed(NamedTuple):
    """Seconds of a prompt, and of a decoded token after it; the tokens."""
    prefill: float
    decode: float
    tokens: list[int]


def time_ours(llm: LLM, prompt: list[int]) -> Timed:
    """Times greedy tokens after a prompt."""
    made = llm.complete(prompt, SamplingParams(temperature=0, max_tokens=1 + DECODED, ignore_eos=True))
    return Timed(made.ttft_s, made.decode_s / DECODED, list(made.token_ids))


class Clock(transformers.StoppingCriteria):
    """The time of each token that transformers makes."""

    def __init__(self) -> None: self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def time_theirs(model: Any, prompt: list[int]) -> Timed:
    """Times transformers' greedy tokens after a prompt."""
    clock, begun = Clock(), time.perf_counter()
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=1 + DECODED, do_sample=False,
                             pad_token_id=0, stopping_criteria=[clock])
    return Timed(clock.times[0] - begun, (clock.times[-1] - clock.times[0]) / DECODED,
                 list(out[0, len(prompt):].tolist()))


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Times a model and transformers' in turns."""
    family, fields = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        theirs, random = make_model(family, fields, Path(folder)), np.random.default_rng(0)
        llm = open_llm(Path(folder), 4096)
        made: dict[str, Any] = {"parameters": sum(each.numel() for each in theirs.parameters())}
        for length in PROMPTS:
            prompt = random.integers(3, fields["vocab_size"], length).tolist()
            found: dict[str, list[Timed]] = {"tinygrad_nv": [], "transformers": []}
            for number in range(rounds + 1):    # the first compiles, and warms caches
                both = time_ours(llm, prompt), time_theirs(theirs, prompt)
                for some, each in zip(found.values(), both, strict=True):
                    if number: some.append(each)
            same = found["tinygrad_nv"][0].tokens == found["transformers"][0].tokens
            one: dict[str, Any] = {"same_tokens": same}
            for what in ("prefill", "decode"):
                seconds = {side: [float(getattr(each, what)) for each in some]
                           for side, some in found.items()}
                ratios = sorted(other / own for own, other in zip(*seconds.values(), strict=True))
                one[what] = {"seconds": seconds,
                             "ratio": statistics.median(ratios), "ratios": ratios}
            made[str(length)] = one
            print(f"{name:10} {length:5} tokens: prefill {one['prefill']['ratio']:.2f}, decode "
                  f"{one['decode']['ratio']:.2f} times transformers' speed, same tokens {one['same_tokens']}",
                  flush=True)
        llm.close()
    return made


def lengthen(name: str, lengths: list[int]) -> dict[str, Any]:
    """Seconds of a token by the length of the prompt, and bytes of a sequence's states."""
    family, fields = SMALL[name]
    with tempfile.TemporaryDirectory() as folder:
        make_model(family, fields, Path(folder))
        llm, random = open_llm(Path(folder), max(lengths) + 64), np.random.default_rng(0)
        made: dict[str, Any] = {"state_bytes": read_config(Path(folder)).state_bytes(dtypes.float32)}
        for length in lengths:
            prompt = random.integers(3, 2048, length).tolist()
            time_ours(llm, prompt)      # compiles
            first, token, _ = time_ours(llm, prompt)
            made[str(length)] = {"prefill_us": 1e6 * first / length, "decode_us": 1e6 * token}
            print(f"{name:16} {length:6} tokens: {1e6 * first / length:7.1f} us a prompt token, "
                  f"{1e6 * token:8.1f} us a decoded one", flush=True)
        llm.close()
    return made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384, 65536])
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:arguments.threads])
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {"threads": arguments.threads}
    for name in arguments.models: found[name] = compare(name, arguments.rounds)
    if arguments.lengths: found["lengths"] = {name: lengthen(name, arguments.lengths) for name in SMALL}
    save("hybrids", found)


if __name__ == "__main__": main()
