"""Matmuls of mixtures of experts on a CPU beside torch's, by tokens and shapes, in one run.

    python bench/cpu/moe.py [--tokens 1 256] [--repeat 9] [--only WORDS]

"up" gathers rows and has the activation, "down" weights and scatters them. torch's sides are a loop over
experts of linear, and `_grouped_mm`, which transformers calls, each with gathers, activation and scatter.
Experts of a token are other ones in each of `ROUTINGS` routings, which take turns, so that their matrices
come from memory. Bandwidth counts the matrices of experts that have rows. Ours is a TinyJit that is replayed.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tinygrad import Tensor, dtypes
from torch.nn.functional import linear, silu

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.kernel_times import Run, capture, time_rested
from bench.lib.measure import each, save, spread, table
from tinygrad_nv.cpu.target import host
from tinygrad_nv.functional import grouped_matmul

ROUTINGS, TOKENS = 4, (1, 256)
HEADER = ["", "side", "ms", "GB/s", "GFLOP/s", "spread"]


@dataclass(frozen=True)
class Layer:
    """Experts, how many of them a token has, width, width inside an expert."""
    name: str
    experts: int
    k: int
    width: int
    inner: int


LAYERS = (Layer("Qwen3-MoE", 64, 8, 2048, 768), Layer("Mixtral", 8, 2, 1024, 3584))


@dataclass(frozen=True)
class Case:
    """One of the two matmuls of a layer."""
    layer: Layer
    tokens: int
    up: bool

    def __str__(self) -> str: return f"{self.layer.name} {'up' if self.up else 'down'}, {self.tokens} tokens"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of an expert."""
        one = self.layer
        return (2 * one.inner, one.width) if self.up else (one.width, one.inner)


@dataclass(frozen=True)
class Routed:
    """Slots by expert, and where those of each begin."""
    order: torch.Tensor
    offsets: torch.Tensor


def routings(case: Case) -> list[Routed]:
    """Routings without an expert in common, as far as there are so many."""
    one, made = case.layer, []
    random = torch.Generator().manual_seed(0)
    first = torch.randperm(one.experts, generator=random)
    for number in range(ROUTINGS):
        turned = first.roll(-number * one.k)
        chosen = [turned, *(torch.randperm(one.experts, generator=random) for _ in range(case.tokens - 1))]
        experts = torch.cat([each[:one.k] for each in chosen])
        counts = torch.bincount(experts, minlength=one.experts)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        made.append(Routed(experts.argsort(stable=True).int(), offsets.int()))
    return made


def to_tinygrad(x: torch.Tensor) -> Tensor:
    """A tensor of tinygrad with the elements of torch's."""
    if x.dtype != torch.bfloat16: return Tensor(x.numpy(), device="CPU").realize()
    return Tensor(x.view(torch.uint16).numpy(), device="CPU").bitcast(dtypes.bfloat16).contiguous().realize()


def ours(case: Case, x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor,
         routed: list[Routed]) -> list[Run]:
    """Runs of the kernel, a routing each."""
    a, b, scales = map(to_tinygrad, (x, w, weights))
    more: dict[str, Any] = {"gather": case.layer.k, "activation": "silu"} if case.up else \
        {"scatter": True, "weights": scales}
    return [capture(partial(grouped_matmul, a, b, to_tinygrad(r.offsets), to_tinygrad(r.order), **more))
            for r in routed]


def after(case: Case, y: torch.Tensor, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Computes what torch does with the matmul's results."""
    if case.up:
        gate, up = y.chunk(2, -1)
        return silu(gate) * up
    made = torch.empty_like(y)
    made[order] = (y * weights[order].unsqueeze(-1)).to(y.dtype)
    return made


def loop_experts(case: Case, x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor, routed: Routed) -> Run:
    """torch, an expert after the other."""
    offsets, order = routed.offsets.tolist(), routed.order.long()

    def run() -> torch.Tensor:
        rows = x[order // case.layer.k] if case.up else x
        made = [linear(rows[a:b], w[e]) for e, (a, b) in enumerate(pairwise(offsets))
                if a < b]
        return after(case, torch.cat(made), weights, order)
    return run


def torch_grouped_mm(case: Case, x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor,
                     routed: Routed) -> Run:
    """torch's grouped matmul."""
    order = routed.order.long()

    def run() -> torch.Tensor:
        rows = x[order // case.layer.k] if case.up else x
        made = torch._grouped_mm(rows, w.transpose(1, 2), offs=routed.offsets[1:])
        return after(case, made, weights, order)
    return run


def sides(case: Case, routed: list[Routed]) -> dict[str, Run]:
    """All sides, each all routings one after the other, after their results were compared."""
    one, (n, k) = case.layer, case.shape
    random, slots = torch.Generator().manual_seed(1), case.tokens * one.k
    x = torch.randn(case.tokens if case.up else slots, k, generator=random).bfloat16()
    w = (torch.randn(one.experts, n, k, generator=random) / k ** 0.5).bfloat16()
    weights = torch.rand(slots, generator=random)
    made = {"ours": ours(case, x, w, weights, routed),
            "torch loop": [loop_experts(case, x, w, weights, r) for r in routed],
            "torch grouped_mm": [torch_grouped_mm(case, x, w, weights, r) for r in routed]}
    for mine, theirs in zip(made["ours"], made["torch loop"], strict=True):
        got, wanted = torch.from_numpy(mine().float().numpy()), theirs().float()
        # torch rounds y, gate, activation and results; ours the results
        assert (got - wanted).abs().max() <= 2.0**-6 * wanted.abs().max(), str(case)
    return {name: partial(in_turn, runs) for name, runs in made.items()}


def in_turn(runs: list[Run]) -> None:
    """All routings of a side."""
    for run in runs: run()


def measure(case: Case, repeat: int) -> dict[str, list[float]]:
    """Seconds of a routing, of each side by turns."""
    routed = routings(case)
    runs = sides(case, routed)
    turns = [{name: time_rested(run, 1) / ROUTINGS for name, run in runs.items()} for _ in range(repeat)]
    return {name: [turn[name] for turn in turns] for name in runs}


def rows_of(case: Case, seconds: dict[str, list[float]]) -> list[list[str]]:
    """Lines of the table."""
    n, k = case.shape
    active = sum(int((r.offsets.diff() > 0).sum()) for r in routings(case)) / ROUTINGS
    nbytes, flops = 2 * active * n * k, 2 * case.tokens * case.layer.k * n * k
    out = []
    for name, found in seconds.items():
        middle = median(found)
        out.append([str(case) if name == "ours" else "", name, f"{1e3 * middle:.2f}",
                    f"{nbytes / middle / 1e9:.1f}", f"{flops / middle / 1e9:.0f}",
                    spread([1e3 * one for one in found])])
    return out


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--repeat", type=int, default=9, help="turns of each side (default 9)")
    parser.add_argument("--only", default="", help="cases whose words hold this text")
    arguments = parser.parse_args()
    here = host()
    torch.set_num_threads(here.threads)
    every = [Case(layer, tokens, up) for layer in LAYERS for tokens in arguments.tokens
             for up in (True, False)]
    cases = [case for case in every if arguments.only in str(case)]
    found = {case: measure(case, arguments.repeat) for case in each(cases)}
    print(f"{here.isa}, {here.threads} threads, torch {torch.__version__}")
    print(table(HEADER, [row for case, seconds in found.items() for row in rows_of(case, seconds)]))
    if not arguments.only and arguments.tokens == list(TOKENS):
        save("cpu_moe", {"isa": str(here.isa), "threads": here.threads, "torch": torch.__version__,
                         "seconds": {str(case): seconds for case, seconds in found.items()}})


if __name__ == "__main__": main()
