"""Loads in vLLM what `tinygrad-nv train` saved: the same greedy tokens?

    python bench/interop/vllm_loads.py MODEL [--adapter DIR] [--python OTHER/bin/python] [--tokens 24]

Protocol: MODEL is a directory that was saved, or with `--adapter` the base of the adapter in DIR. This
interpreter generates with tinygrad_nv; `--python`, one that has vLLM (by default this one), with vLLM, on
whatever device it finds, both in float32. Prompts are PROMPTS. Exits with 1 where tokens differ.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


MARK = "TOKENS "
PROMPTS = ["Once upon a time", "One day a little girl", "The"]


def generate(given: argparse.Namespace) -> list[list[int]]:
    """Greedy tokens of each prompt, in this process. vLLM's names are ours."""
    side = import_module(given.side)
    options = {"enforce_eager": True, "max_model_len": 256} if given.side == "vllm" else {}
    if given.adapter: options |= {"enable_lora": True, "max_lora_rank": 64}
    llm = side.LLM(given.model, dtype="float32", **options)
    adapters = import_module("vllm.lora.request") if given.side == "vllm" else side
    request = adapters.LoRARequest("adapter", 1, given.adapter) if given.adapter else None
    params = side.SamplingParams(temperature=0, max_tokens=given.tokens)
    made = llm.generate(PROMPTS, params, lora_request=request)
    return [list(each.outputs[0].token_ids) for each in made]


def tokens(python: str, side: str) -> list[list[int]]:
    """The same, of another process."""
    # on a CPU vLLM would take half of the memory for its cache
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
    done = subprocess.run([python, __file__, *sys.argv[1:], "--side", side], text=True, check=True,
                          stdout=subprocess.PIPE, env=env)
    line = next(each for each in done.stdout.splitlines() if each.startswith(MARK))
    made: list[list[int]] = json.loads(line.removeprefix(MARK))
    return made


def main() -> None:
    """Prints prompt by prompt whether tokens are equal."""
    parser = argparse.ArgumentParser(description="Saved models and adapters in vLLM.")
    parser.add_argument("model")
    parser.add_argument("--adapter", default="")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--side", choices=("vllm", "tinygrad_nv"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        print(MARK + json.dumps(generate(given)))
        return
    ours, theirs = tokens(sys.executable, "tinygrad_nv"), tokens(given.python, "vllm")
    for prompt, a, b in zip(PROMPTS, ours, theirs, strict=True):
        print(f"{'equal' if a == b else 'DIFFERENT':10s} {prompt!r} {a}" + ("" if a == b else f" {b}"))
    sys.exit(ours != theirs)


if __name__ == "__main__": main()
