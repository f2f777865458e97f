"""What adapters add, on the CPU: every instruction set, dtypes, routings, ragged ranks, and what is not read.

Arguments that a kernel must not read are NaN: adapters without rows, A and B from a segment's rank on, h of
rows without an adapter. Storages end where memory ends.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.cpu.cpu_gemv_case import LEVELS, at_end
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.lora import expand, shrink
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.lora.spec import LoraExpandSpec, LoraShrinkSpec, LoraSpec

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
KINDS = [(F32, F32), (BF16, BF16), (F16, F16), (F32, BF16), (F32, F16)]
UNIT = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
C = 2.0     # times the error of float32 sums from first to last
# rows of each of 4 adapters, the last number without one; ranks of 3 segments
COUNTS = [(0, 5, 1, 36, 3), (9, 9, 9, 9, 9), (0, 0, 0, 0, 45), (45, 0, 0, 0, 0), (1, 2, 3, 4, 35)]
RANKS = [(11, 11, 11), (0, 3, 11), (4, 0, 1), (8, 5, 0)]
ADAPTERS, ROWS, RANK, SEGMENTS = 4, 45, 11, (150, 33, 40)

Given = dict[str, torch.Tensor]


def given(spec: LoraSpec, counts: tuple[int, ...], integers: bool, seed: int = 0) -> Given:
    """Arguments in a kernel's order."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        if integers: return torch.randint(-3, 4, shape, generator=random).double()
        return torch.randn(shape, generator=random, dtype=torch.float64)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    order, ranks = torch.randperm(ROWS, generator=random).int(), torch.tensor(RANKS, dtype=torch.int32)
    alone = order[int(offsets[-2]):].long()
    if isinstance(spec, LoraShrinkSpec):
        x, w = some(ROWS, spec.k), some(ADAPTERS, 3, RANK, spec.k)
        x[alone] = torch.nan
        for e in range(ADAPTERS):
            for part in range(3): w[e, part, RANKS[e][part]:] = torch.nan
    else:
        x, w = some(ROWS, 3, RANK), some(ADAPTERS, RANK, spec.columns)
        x[int(offsets[-2]):] = torch.nan
        for e in range(ADAPTERS):
            for part, (first, end) in enumerate(spec.spans):
                w[e, RANKS[e][part]:, first:end] = torch.nan
                x[int(offsets[e]):int(offsets[e + 1]), part, RANKS[e][part]:] = torch.nan
    for e, count in enumerate(counts[:-1]):
        if not count: w[e] = torch.nan
    return {"x": x.to(TORCH[spec.dtype]), "w": w.to(TORCH[spec.matrix]), "ranks": ranks, "offsets": offsets,
            "order": order}


def answer(spec: LoraSpec, made: Given, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The result, computed row by row; of float32 from first to last."""
    x, w, out = made["x"].to(dtype), made["w"].to(dtype), torch.zeros(ROWS, spec.columns, dtype=torch.float64)
    for e in range(ADAPTERS):
        for i in range(int(made["offsets"][e]), int(made["offsets"][e + 1])):
            at = int(made["order"][i])
            for part, rank in enumerate(RANKS[e]):
                if isinstance(spec, LoraShrinkSpec):
                    out[i, part * RANK:part * RANK + rank] = added(w[e, part, :rank] * x[at])
                else:
                    first, end = spec.spans[part]
                    out[at, first:end] = added((w[e, :rank, first:end] * x[i, part, :rank, None]).T)
    return out


def added(products: torch.Tensor) -> torch.Tensor:
    """Sums along the last axis."""
    if products.dtype == torch.float64: return products.sum(-1)
    made = torch.zeros(products.shape[0])
    for each in products.T: made += each
    return made.double()


def built(spec: LoraSpec, level: ISA, parts: int) -> CPUKernel:
    module = shrink if isinstance(spec, LoraShrinkSpec) else expand
    return module.build(spec, replace(module.default(spec, CPU(level, 2)), parts=parts))


def run(kernel: CPUKernel, spec: LoraSpec, made: Given) -> torch.Tensor:
    """The result in float64, of parts in reversed order."""
    out = torch.full((ROWS, spec.columns), torch.nan).to(TORCH[spec.dtype])
    memory = [at_end(x.contiguous().view(torch.uint8).numpy().reshape(-1)) for x in (out, *made.values())]
    load(kernel)(*memory, order=range(kernel.parts)[::-1])
    return torch.from_numpy(memory[0].copy()).view(out.dtype).view(out.shape).double()


def specs(dtype: DType, matrix: DType) -> list[LoraSpec]:
    return [LoraShrinkSpec(ADAPTERS, ROWS, RANK, dtype, matrix, 77, 3),
            LoraExpandSpec(ADAPTERS, ROWS, RANK, dtype, matrix, SEGMENTS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("level", "kind"), [(level, kind) for kind in KINDS for level in LEVELS[::-1]],
                         ids=str)
def test_numbers(level: ISA, kind: tuple[DType, DType]):
    """Whole numbers exactly; others as near as sums of float32; the same bits in any number of parts."""
    for spec in specs(*kind):
        kernel, other = built(spec, level, 3), built(spec, level, 1)
        for counts in COUNTS:
            there = given(spec, counts, integers=True)
            wanted = answer(spec, there).to(TORCH[spec.dtype]).double()
            assert torch.equal(run(kernel, spec, there), wanted)
        there = given(spec, COUNTS[0], integers=False)
        got, exact, single = run(kernel, spec, there), answer(spec, there), answer(spec, there, torch.float32)
        most = C * float((single - exact).abs().max()) + UNIT[spec.dtype] * exact.abs()
        assert bool(((got - exact).abs() <= most).all())
        assert torch.equal(got, run(other, spec, there))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS[::-1], ids=str)
def test_columns_of_several_chunks(level: ISA):
    """A segment of two chunks of sums and a piece of a third, whose end is within a vector."""
    spec = LoraExpandSpec(ADAPTERS, ROWS, RANK, F32, F32, (2 * expand.CHUNK + 77, 33, 40))
    for parts in (1, 3):
        for counts in COUNTS:
            there = given(spec, counts, integers=True)
            assert torch.equal(run(built(spec, level, parts), spec, there), answer(spec, there))


def test_parts_are_as_many_as_matrices_are_worth():
    target = CPU(LEVELS[-1], 2)
    few, many = LoraShrinkSpec(1, 1, 8, k=64), LoraShrinkSpec(8, 8, 8, k=4096)
    assert [shrink.default(each, target).parts for each in (few, many)] == [1, 2]
    assert np.isclose(many.active_bytes, 8 * 8 * 4096 * 4)
