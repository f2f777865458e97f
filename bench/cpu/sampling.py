"""The sampler on a CPU beside torch doing the same, by filters, vocabularies and rows, in one run.

    python bench/cpu/sampling.py [--size 32000 …] [--rows 16 …] [--repeat 9] [--only WORDS]

torch's side is what vLLM does without kernels of its own: a sort for top-p, exponential noise, argmax; its
noise is another, so tokens are not compared, but what either keeps is. Ours is a TinyJit that is replayed.
cpu/kernel_times.py says how turns are taken.
"""
from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.kernel_times import Run, capture, time_call, time_rested
from bench.lib.measure import each, save, spread, table
from tinygrad_nv.cpu.target import host
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.worker.sampler import apply_filters, next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.patterns.embedding import embedding

SIZES, ROWS = (2048, 32000, 128256), (1, 16, 64)
KINDS = {"greedy": SamplingParams(temperature=0), "draw": SamplingParams(temperature=0.8),
         "top_k 50": SamplingParams(temperature=0.8, top_k=50),
         "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
         "both": SamplingParams(temperature=0.8, top_k=50, top_p=0.9)}
SCALE = 2.5     # of logits, which are normal


@dataclass(frozen=True)
class Case:
    """Rows of logits, and how they are sampled."""
    kind: str
    size: int
    rows: int

    def __str__(self) -> str: return f"{self.kind}, {self.rows} x {self.size}"


def filter_logits(x: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """torch's logits after the filters."""
    x = x / params.temperature
    if params.top_p == 1:
        if not params.top_k: return x
        return x.masked_fill(x < x.topk(params.top_k, -1).values[:, -1:], -math.inf)
    values, order = x.sort(dim=-1)
    if params.top_k: values = values.masked_fill(values < values[:, -params.top_k, None], -math.inf)
    below = values.softmax(-1).cumsum(-1) <= 1 - params.top_p
    below[:, -1] = False
    return torch.empty_like(x).scatter_(1, order, values.masked_fill(below, -math.inf))


def sides(case: Case) -> tuple[Run, Run]:
    """Ours and torch's, ready to run, after what they keep was compared."""
    params, numbers = KINDS[case.kind], np.random.default_rng(case.size)
    x = (numbers.standard_normal((case.rows, case.size)) * SCALE).astype(np.float32)
    theirs, ours = torch.from_numpy(x), Tensor(x).realize()
    slots = SamplerState(case.rows, case.size)
    for row in range(case.rows): slots.start_slot(row, params, row, ())
    rows = Tensor(np.arange(case.rows, dtype=np.int32)).realize()
    chosen = capture(lambda: next_tokens(ours, params.filters, slots, rows, rows))
    if not params.temperature: return chosen, lambda: theirs.argmax(-1)
    mine = apply_filters(ours, params.filters, slots, rows, embedding(slots.numbers, rows)).numpy()
    # sums that are nearly top_p are rounded otherwise
    differ = int((np.isinf(mine) != np.isinf(filter_logits(theirs, params).numpy())).sum(-1).max())
    if differ > 2: raise SystemExit(f"{case}: {differ} tokens of a row are kept by one alone")

    def draw() -> torch.Tensor:
        left = filter_logits(theirs, params).softmax(-1)
        return left.div_(torch.empty_like(left).exponential_()).argmax(-1)
    return chosen, draw


def measure(case: Case, repeat: int) -> dict[str, Any]:
    """One case: both sides in turns."""
    runs: dict[str, list[float]] = {"ours": [], "torch": []}
    made = dict(zip(runs, sides(case), strict=True))
    times = {side: max(1, math.ceil(2e-3 / max(time_call(run), 1e-7))) for side, run in made.items()}
    for _ in range(repeat):
        for side, run in made.items(): runs[side].append(time_rested(run, times[side]))
    ratios = [b / a for a, b in zip(runs["ours"], runs["torch"], strict=True)]
    return {"kind": case.kind, "size": case.size, "rows": case.rows, "ratio": median(ratios),
            "ratios": ratios, "seconds": runs}


def row(done: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ours, theirs = (median(done["seconds"][side]) * 1e3 for side in ("ours", "torch"))
    return [done["kind"], str(done["size"]), str(done["rows"]), f"{ours:.3f}", f"{theirs:.3f}",
            f"{done['ratio']:.2f}", spread(done["ratios"])]


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", nargs="+", type=int, default=list(SIZES), help="tokens of a vocabulary")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--repeat", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--only", default="", help="cases whose words hold this text")
    arguments = parser.parse_args()
    here = host()
    torch.set_num_threads(here.threads)
    every = [Case(kind, size, rows) for kind in KINDS for size in arguments.size for rows in arguments.rows]
    results = [measure(case, arguments.repeat) for case in each(every) if arguments.only in str(case)]
    print(f"{here.isa}, {here.threads} threads, torch {torch.__version__}")
    print(table(["", "tokens", "rows", "ours ms", "torch ms", "ratio", "spread"],
                [row(done) for done in results]))
    if not arguments.only and (arguments.size, arguments.rows) == (list(SIZES), list(ROWS)):
        save("cpu_sampling", {"isa": str(here.isa), "threads": here.threads, "torch": torch.__version__,
                              "results": results})


if __name__ == "__main__": main()
