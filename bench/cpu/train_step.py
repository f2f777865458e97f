"""A training step beside torch's: time, and peak memory of the process.

    python bench/cpu/train_step.py [--rounds 7] [--case tales-float32 …]

Models are Llamas with random weights: the bundled one's shape (1.05M), one of 37M, and one with a vocabulary
of 131072 (its loss alone is what fills memory). torch is transformers' model with SDPA attention and its own
loss in float32, clip_grad_norm_, fused AdamW, and for bfloat16 weights of bfloat16. Ours is what
`tinygrad-nv train` runs, with float32 master weights. Each side is a process of its own that is loaded and
warm before the first round; they take turns, `--steps` steps a round. Peak memory is ru_maxrss above what the
process had before the model. Writes bench/results/train_step.json, in which cases that were not run stay.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, ask, end_with_parent, processor, save, spread, table

SHAPES: dict[str, dict[str, int]] = {
    "tales": {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "rows": 16, "width": 160},
    "37M": {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 8, "rows": 4, "width": 256},
    "vocabulary": {"vocab_size": 131072, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "num_key_value_heads": 2, "rows": 4, "width": 256}}
CASES = ("tales-float32", "tales-bfloat16", "37M-float32", "37M-bfloat16", "vocabulary-float32")
SIDES = ("tinygrad_nv", "torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=4, help="steps before the first round")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side: return side(arguments)
    rows = [compare(case, arguments) for case in arguments.case]
    header = ("case", "ours, ms", "torch, ms", "times as fast", "spread", "ours, MB", "torch, MB",
              "of its memory")

    def median(row: dict[str, Any], name: str) -> str:
        return f"{1e3 * statistics.median(row[name]['seconds']):.1f}"
    lines = []
    for row in rows:
        peaks = (f"{row[each]['peak_bytes'] / 1e6:.0f}" for each in SIDES)
        lines.append((row["case"], *(median(row, each) for each in SIDES), f"{row['ratio']:.2f}",
                      spread(row["ratios"]), *peaks, f"{row['memory_ratio']:.2f}"))
    print(table(header, lines))
    found = RESULTS / "train_step.json"
    kept = json.loads(found.read_text())["rows"] if found.is_file() else []
    rows += [row for row in kept if row["case"] not in arguments.case]
    save("train_step", {"machine": processor(), "rounds": arguments.rounds,
                        "rows": sorted(rows, key=lambda row: CASES.index(row["case"]))})


def compare(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides of a case in turn."""
    import transformers
    shape, _, _ = case.partition("-")
    fields = {name: value for name, value in SHAPES[shape].items() if name not in ("rows", "width")}
    found: dict[str, Any] = {name: {"seconds": []} for name in SIDES}
    with tempfile.TemporaryDirectory() as place:
        config = transformers.LlamaConfig(**fields, max_position_embeddings=512, tie_word_embeddings=True)
        transformers.LlamaForCausalLM(config).save_pretrained(place)
        sides = {name: subprocess.Popen([sys.executable, __file__, "--case", case, "--side", name, "--steps",
                                         str(arguments.steps), "--warm", str(arguments.warm), "--directory",
                                         place], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE) for name in SIDES}
        for each in sides.values(): ask(each)     # loaded, and warm
        for _ in range(arguments.rounds):
            for name, each in sides.items():
                answer = json.loads(ask(each))
                found[name]["seconds"].append(answer["seconds"])
                found[name]["peak_bytes"] = answer["peak_bytes"]
        for each in sides.values(): each.communicate("end\n")
    ratios = [b / a for a, b in zip(*(found[name]["seconds"] for name in SIDES), strict=True)]
    return {"case": case, **found, "ratios": ratios, "ratio": statistics.median(ratios),
            "memory_ratio": found["tinygrad_nv"]["peak_bytes"] / found["torch"]["peak_bytes"]}


def side(arguments: argparse.Namespace) -> None:
    """One side: answers each line of stdin with the seconds of a step, and its peak memory."""
    end_with_parent()
    case = arguments.case[0]
    shape, _, dtype = case.partition("-")
    size = SHAPES[shape]["rows"], SHAPES[shape]["width"]
    random, warm = np.random.default_rng(0), arguments.warm
    made = {"tinygrad_nv": ours, "torch": theirs}[arguments.side](arguments.directory, dtype, size)
    for _ in sys.stdin:
        if _.strip() == "end": return
        count = max(warm, arguments.steps)
        given = [random.integers(3, 2000, size).astype(np.int32) for _ in range(count)]
        begun = time.perf_counter()
        for ids in given: made.step(ids)
        seconds, warm = (time.perf_counter() - begun) / count, 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - made.before
        print(json.dumps({"seconds": seconds, "peak_bytes": peak}), flush=True)


class Made:
    """A step, and the memory that the process had before its model."""

    def __init__(self, step: Callable[[np.ndarray], object], before: int) -> None:
        self.step, self.before = step, before


def resident_bytes() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ours(directory: Path, dtype: str, size: tuple[int, int]) -> Made:
    from tinygrad import dtypes

    from tinygrad_nv.train import network
    from tinygrad_nv.train.data import Batch
    from tinygrad_nv.train.objectives import Supervised
    from tinygrad_nv.train.optimizers import StateOptions, adamw
    from tinygrad_nv.train.step import Step
    before = resident_bytes()
    model = network.open_network(directory, {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16}[dtype])
    network.extend(model, size[1])
    adam = adamw(network.parameters(model), 1e-4, options=StateOptions(max_grad_norm=1.0))
    step = Step(Supervised(model, *size), adam)
    positions, ones = np.tile(np.arange(size[1], dtype=np.int32), (size[0], 1)), np.ones(size, np.int32)
    return Made(lambda ids: step([Batch(ids, ids, positions, ones)], size[0] * (size[1] - 1)), before)


def theirs(directory: Path, dtype: str, size: tuple[int, int]) -> Made:
    import torch
    import transformers

    from tinygrad_nv.runtime.cpu.threads import threads
    torch.set_num_threads(threads())
    before = resident_bytes()
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype),
                                                          attn_implementation="sdpa").train()
    adam = torch.optim.AdamW(model.parameters(), 1e-4, fused=True, weight_decay=0.0)

    def step(ids: np.ndarray) -> None:
        tokens = torch.from_numpy(ids).long()
        adam.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        loss.item()
    return Made(step, before)


if __name__ == "__main__": main()
