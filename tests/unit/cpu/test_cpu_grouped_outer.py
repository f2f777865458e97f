"""Sums of outer products of the rows of groups on the CPU: every instruction set, groups, places; and what is
not read."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.cpu.cpu_gemv_case import LEVELS, at_end
from tests.support.cpu.cpu_outer_case import UNIT, C, answer, given
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.grouped_gemm import outer
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
# of 63 rows in 5 groups; what is left over has no group
ROUTINGS = ([0, 0, 63, 0, 0], 0), ([1, 0, 9, 40, 8], 2), ([17, 16, 15, 14, 1], 0), ([0] * 5, 4)


def made(spec: GroupedOuterSpec, level: isa.ISA, parts: int = 3) -> LoadedKernel:
    schedule = replace(outer.default(spec, CPU(level, 2)), parts=parts)
    assert outer.problems(spec, schedule) == []
    return load(outer.build(spec, schedule))


def run(kernel: LoadedKernel, spec: GroupedOuterSpec, there: dict[str, torch.Tensor],
        order: list[int] | None = None) -> torch.Tensor:
    out = torch.full((spec.groups, spec.n, spec.k), torch.nan).to(TORCH[spec.dtype])
    memory = [at_end(x.contiguous().view(torch.uint8).numpy().reshape(-1)) for x in (out, *there.values())]
    work = np.full(kernel.kernel.scratch[0].count * 4, 0xFF, np.uint8)
    kernel(memory[0], work, *memory[1:], order=order)
    return torch.from_numpy(memory[0].copy()).view(out.dtype).view(out.shape).double()


@pytest.mark.parametrize(("level", "dtype"), [
    pytest.param(level, dtype, marks=[pytest.mark.slow] * ((level, dtype) != (LEVELS[-1], BF16)))
    for level in LEVELS for dtype in (F32, BF16, F16) if dtype == BF16 or level != isa.AVX512_BF16], ids=str)
def test_numbers_and_whole_ones(level: isa.ISA, dtype: DType):
    """Columns and K no multiples of anything; both gathered, and one."""
    spec = GroupedOuterSpec(5, 63, 74, 61, dtype, 63, 21, 1, 3)
    kernel = made(spec, level)
    for counts, before in ROUTINGS:
        there = given(spec, counts, before, True)
        wanted = answer(spec, there, torch.float64).to(TORCH[dtype]).double()
        assert torch.equal(run(kernel, spec, there), wanted)
        there = given(spec, counts, before, False)
        exact, plain = (answer(spec, there, kind) for kind in (torch.float64, torch.float32))
        bound = C * (plain - exact).abs().max() + 2 * UNIT[dtype] * exact.abs()
        assert ((run(kernel, spec, there) - exact).abs() <= bound).all()


def test_rows_in_order_and_the_same_bits_in_any_parts():
    spec = GroupedOuterSpec(5, 63, 200, 130)
    there = given(spec, [5, 30, 0, 20, 8], 0, False)
    found = [run(made(spec, LEVELS[-1], parts), spec, there, order) for parts, order in
             ((1, None), (4, [2, 0, 3, 1]))]
    assert torch.equal(*found)
    assert (found[0] - answer(spec, there, torch.float64)).abs().max() < 1e-4
    problem, = outer.problems(spec, outer.CPUGroupedOuter(isa.AVX2, 1, 24))
    assert "divisor of 64" in problem


@pytest.mark.parametrize("level", [isa.AVX512, isa.AVX512_BF16, isa.AMX], ids=str)
def test_all_compile(level: isa.ISA): made(GroupedOuterSpec(5, 63, 74, 61, BF16, 63, 21, 1, 3), level)
