"""LLaMA decode through torch.compile: this backend beside inductor and eager torch, on the CPU.

    python bench/interop/torch_compile.py [--hidden 1024] [--layers 4] [--heads 16] [--cache 512] [--steps 40]

Each is the same model of transformers, random weights, float32, batch 1, with a static cache of keys and
values, in steps of one token. Steps are timed in turn, one of each after the other, so that what else the
machine does meets all of them. Prints medians and quartiles; ratios are of medians. Inductor needs a C++
compiler (g++); without one it is left out, and the output says so.
"""
from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


# threads: 0 leaves torch's own number
DEFAULTS = {"hidden": 1024, "layers": 4, "heads": 16, "cache": 512, "steps": 40, "threads": 0}


def model(hidden: int, layers: int, heads: int, cache: int) -> Any:
    """A LLaMA with random weights: 4 query heads a key head, and an inner size of 8/3 of the hidden one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=8000, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
        max_position_embeddings=cache)).eval()


class Decoder:
    """A model under one backend, with a cache of its own, and the seconds of its steps."""

    def __init__(self, name: str, made: Any, cache: int) -> None:
        import torch
        from transformers import StaticCache
        torch._dynamo.reset()
        self.name, self.seconds = name, list[float]()
        self.model = made if name == "eager" else torch.compile(made, backend=name)
        self.cache = StaticCache(config=made.config, max_cache_len=cache)
        self.token = torch.zeros(1, 1, dtype=torch.int64)
        self.model(torch.arange(8)[None], past_key_values=self.cache)
        self.logits = self.step()
        for _ in range(2): self.step()
        self.seconds.clear()

    def step(self) -> Any:
        begun = time.perf_counter()
        logits = self.model(self.token, past_key_values=self.cache)[0]
        self.seconds.append(time.perf_counter() - begun)
        return logits


def measure(decoders: list[Decoder], steps: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Milliseconds a step: median and quartiles."""
    for _ in range(steps):
        for each in decoders: each.step()
    found = {}
    for each in decoders:
        low, middle, high = (1e3 * q for q in statistics.quantiles(each.seconds, n=4))
        found[each.name] = {"median_ms": middle, "low_ms": low, "high_ms": high}
        say(f"{each.name:12} {middle:8.2f} ms a token ({low:.2f} to {high:.2f})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in DEFAULTS.items(): parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch

    import tinygrad_nv.torch  # noqa: F401
    if given.threads: torch.set_num_threads(given.threads)
    names = ["tinygrad_nv", *(["inductor"] if shutil.which("g++") else []), "eager"]
    if "inductor" not in names: print("no g++: inductor is left out")
    made = model(given.hidden, given.layers, given.heads, given.cache)
    with torch.no_grad():
        decoders = [Decoder(name, made, given.cache) for name in names]
        exact = decoders[-1].logits
        for each in decoders[:-1]:
            difference = float((each.logits - exact).abs().max())
            print(f"{each.name}: largest difference from eager {difference:.1e}")
        found: dict[str, Any] = measure(decoders, given.steps, print)
    for name in names[1:]:
        print(f"tinygrad_nv is {found[name]['median_ms'] / found['tinygrad_nv']['median_ms']:.2f} x {name}")
    if given.out:
        known = {name: getattr(given, name) for name in DEFAULTS}
        given.out.write_text(json.dumps({**known, "results": found}, indent=1) + "\n")


if __name__ == "__main__": main()
