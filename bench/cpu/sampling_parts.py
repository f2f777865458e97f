"""Sampling where ranks have parts of the vocabulary, beside gathering all logits: milliseconds a step.

    tinygrad-nv launch -n 2 bench/cpu/sampling_parts.py

Both are replayed TinyJits of the same logits and requests, interleaved; "gathered" sends every rank all rows,
each of which samples from all of them. Tokens are compared first. Rank 0 prints medians and the ratio's
quartiles, and writes bench/results/sampling_parts.json.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NUM_CPU_THREADS", "1")

import numpy as np
from tinygrad import Device, Tensor, TinyJit, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv.dist.group import Group, close, init
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.worker.sampler import next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.models.parallel import ALIGNED, VocabularyPart

RESULTS = Path(__file__).parents[1] / "results" / "sampling_parts.json"
SIZE = 128256       # Llama 3
KINDS = {"greedy": SamplingParams(temperature=0), "drawn": SamplingParams(seed=1),
         "min-p, penalties": SamplingParams(seed=1, min_p=0.05, presence_penalty=1.0),
         "top-p": SamplingParams(seed=1, top_p=0.9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    world = init()
    rows = [row(world.group(), kind, count, arguments.rounds) for count in (1, 16) for kind in KINDS]
    if world.rank == 0: report(world.size, rows, arguments.out)
    close()


def row(group: Group, kind: str, count: int, rounds: int) -> dict[str, Any]:
    """Both contenders, of so many samples."""
    each, params = -(-SIZE // (ALIGNED * group.size)) * ALIGNED, KINDS[kind]
    part = VocabularyPart(group, SIZE, range(group.rank * each, (group.rank + 1) * each))
    x = np.full((count, group.size * each), -np.inf, np.float32)
    x[:, :SIZE] = np.random.default_rng(0).standard_normal((count, SIZE)) * 3
    own = Tensor(x[:, part.tokens.start:part.tokens.stop].copy()).realize()
    slots = Tensor(np.arange(count, dtype=np.int32)).realize()
    mine, all_tokens = SamplerState(count, SIZE, None, part.tokens), SamplerState(count, SIZE)
    for state in (mine, all_tokens):
        for slot in range(count): state.start_slot(slot, params, slot, range(40))

    @TinyJit
    def parts() -> Tensor:
        return next_tokens(own, params.filters, mine, slots, slots, None, part).realize()

    @TinyJit
    def gather_and_sample() -> Tensor:
        return next_tokens(part.gather(own), params.filters, all_tokens, slots, slots).realize()
    for _ in range(3): assert parts().tolist() == gather_and_sample().tolist()
    times: dict[str, list[float]] = {"parts": [], "gathered": []}
    for i in range(rounds):
        both = [("parts", parts), ("gathered", gather_and_sample)]
        for name, fn in both[::1 - 2 * (i % 2)]: times[name].append(time_call(group, fn))
    ratios = [theirs / ours for ours, theirs in zip(times["parts"], times["gathered"], strict=True)]
    return {"kind": kind, "samples": count, **{name: statistics.median(of) for name, of in times.items()},
            "quartiles": statistics.quantiles(ratios, n=4)}


def time_call(group: Group, fn: Callable[[], Tensor]) -> float:
    """Milliseconds, from when all ranks are there."""
    word, met = np.zeros(1, np.int32), np.zeros(1, np.int32)
    group.run("all_reduce", met, word, 1, dtypes.int32, "min")
    begun = time.perf_counter()
    fn()
    Device["CPU"].synchronize()
    return (time.perf_counter() - begun) * 1e3


def report(ranks: int, rows: list[dict[str, Any]], out: Path) -> None:
    """A table on stdout, and the results."""
    print(f"{'samples':>7}  {'':18}{'parts ms':>10}{'gathered ms':>13}  gathered / parts")
    for each in rows:
        low, middle, high = each["quartiles"]
        print(f"{each['samples']:7}  {each['kind']:18}{each['parts']:10.3f}{each['gathered']:13.3f}"
              f"  {middle:.2f} ({low:.2f} to {high:.2f})")
    out.write_text(json.dumps({"ranks": ranks, "vocabulary": SIZE, "load": os.getloadavg()[0],
                               "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__": main()
