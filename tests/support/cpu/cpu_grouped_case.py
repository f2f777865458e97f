"""Grouped matmuls on the CPU for tests of cpu/grouped_gemm: routings, storages, answers in float64.

Protocol: `given` makes the arguments of a spec for a number of rows of each group; rows before the first and
after the last are of no group. Matrices of groups without rows, rows of x that no row of a group names, and
weights and biases that are not asked for are NaN. `run` returns the result in float64; storages end where
memory ends. `answer` computes in float64, or in float32 from first to last, what rows of groups have, and NaN
elsewhere.
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from tests.support.cpu.cpu_gemv_case import at_end
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.runtime.cpu.program import LoadedKernel
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, LIMIT, GroupedGemmSpec

Given = dict[str, torch.Tensor]


def given(spec: GroupedGemmSpec, counts: Sequence[int], before: int = 0, integers: bool = False,
          seed: int = 0) -> Given:
    """Arguments, the first `before` rows of no group."""
    random, kind = torch.Generator().manual_seed(seed), TORCH[spec.dtype]

    def some(*shape: int) -> torch.Tensor:
        if integers: return torch.randint(-3, 4, shape, generator=random).double()
        return torch.randn(shape, generator=random, dtype=torch.float64)
    offsets = torch.tensor([before, *counts]).cumsum(0)
    order, inside = torch.randperm(spec.rows, generator=random), slice(before, int(offsets[-1]))
    used = order[inside] if spec.has_order else torch.arange(spec.rows)[inside]
    named = used // spec.gather if spec.gather else torch.arange(spec.rows)[inside]
    made = {"x": some(spec.x_rows, spec.k), "w": some(spec.groups, spec.n, spec.k) / (1 if integers else 4)}
    for name, kept, rows in (("x", named, spec.x_rows), ("w", [e for e, c in enumerate(counts) if c],
                                                          spec.groups)):
        gone = torch.ones(rows, dtype=torch.bool)
        gone[kept] = False
        made[name][gone] = torch.nan
    made = {name: x.to(kind) for name, x in made.items()} | {"offsets": offsets.int()}
    if spec.has_order: made["order"] = order.int()
    if spec.weighted:
        made["weights"] = torch.full((spec.rows,), torch.nan)
        made["weights"][used.long()] = some(len(used)).float()
    if spec.biased: made["bias"] = some(spec.groups, spec.n).to(kind)
    return made


def run(kernel: LoadedKernel, spec: GroupedGemmSpec, given: Given,
        order: Sequence[int] | None = None) -> torch.Tensor:
    """The result [rows, columns]; NaN where nothing was written."""
    out = torch.full((spec.rows, spec.columns), torch.nan).to(TORCH[spec.dtype])
    memory = [at_end(x.contiguous().view(torch.uint8).numpy().reshape(-1)) for x in (out, *given.values())]
    work = np.full(kernel.kernel.scratch[0].count * 4, 0xFF, np.uint8)
    kernel(memory[0], work, *memory[1:], order=order)
    return torch.from_numpy(memory[0].copy()).view(out.dtype).view(out.shape).double()


def answer(spec: GroupedGemmSpec, given: Given, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What rows of groups have; NaN elsewhere."""
    made = torch.full((spec.rows, spec.columns), torch.nan, dtype=torch.float64)
    offsets = given["offsets"].tolist()
    for e, (first, last) in enumerate(pairwise(offsets)):
        for i in range(first, last):
            slot = int(given["order"][i]) if spec.has_order else i
            row = given["x"][slot // spec.gather if spec.gather else i].to(dtype)
            y = product(given["w"][e].to(dtype), row)
            if spec.biased: y = y + given["bias"][e].to(dtype)
            y = activated(spec, y)
            if spec.weighted: y = y * given["weights"][slot].to(dtype)
            made[slot if spec.scatter else i] = y.double()
    return made


def product(w: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """w @ row; in float32 from first to last, as the reference in tinygrad adds without optimisations."""
    if row.dtype == torch.float64: return w @ row
    y = torch.zeros(w.shape[0])
    for each in (w * row).T: y += each
    return y


def activated(spec: GroupedGemmSpec, y: torch.Tensor) -> torch.Tensor:
    if not spec.activation: return y
    gate, up = y.chunk(2)
    if spec.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)
    if spec.activation == "silu": return torch.nn.functional.silu(gate) * up
    approximate = "tanh" if spec.activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up
