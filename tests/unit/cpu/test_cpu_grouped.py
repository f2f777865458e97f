"""Grouped matmuls on the CPU: every instruction set, routings, places, activations; and what is not read."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_gemv_case import LEVELS
from tests.support.cpu.cpu_grouped_case import answer, given, run
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.grouped_gemm import layout
from tinygrad_nv.cpu.grouped_gemm.kernel import build
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.grouped_gemm.spec import (
    ACTIVATIONS,
    GroupedGemmSpec,
    MixedGroupedSpec,
    TransposedGroupedSpec,
)

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
AMX = isa.AMX if not isa.why_not("amx") else replace(isa.AMX, emulated=True)
ISAS = [*LEVELS, AMX]
KINDS = [(level, dtype) for level in ISAS for dtype in (F32, BF16, F16)
         if dtype == BF16 or level not in (isa.AVX512_BF16, AMX)]
# of 63 rows in 5 groups; what is left over has no group
ROUTINGS = {"one group": ([0, 0, 63, 0, 0], 0), "ragged": ([1, 0, 9, 40, 8], 2), "few": ([2, 3, 4, 1, 5], 3),
            "odd": ([17, 16, 15, 14, 1], 0), "none": ([0] * 5, 4), "a token": ([0, 0, 0, 0, 1], 62)}
C = 2.0     # times the error of float32 sums from first to last
ROUNDED = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}


def made(spec: GroupedGemmSpec, level: isa.ISA, parts: int = 3, block_m: int = 32) -> LoadedKernel:
    schedule = replace(layout.default(spec, CPU(level, 2)), parts=parts, block_m=block_m)
    assert layout.problems(spec, schedule) == []
    return load(build(spec, schedule))


def full(dtype: dtypes, **changes: object) -> GroupedGemmSpec:
    """All there can be; columns and K no multiples of anything."""
    spec = GroupedGemmSpec(5, 63, 74, 301, dtype, 23, gather=3, scatter=True, activation="silu",
                           weighted=True, biased=True)
    return replace(spec, **changes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
def test_whole_numbers_are_exact(level: isa.ISA, dtype: dtypes):
    for spec in (full(dtype, activation="", weighted=False, n=51),
                 GroupedGemmSpec(5, 63, 80, 320, dtype)):
        kernel = made(spec, level)
        for counts, before in ROUTINGS.values():
            there = given(spec, counts, before, integers=True)
            wanted = answer(spec, there)
            got = run(kernel, spec, there)
            near = wanted.to(torch.bfloat16 if dtype == BF16 else torch.float32 if dtype == F32
                             else torch.float16).double()
            inside = ~wanted.isnan()
            assert torch.equal(got[inside], near[inside])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("level", "dtype"), [
    pytest.param(*kind, marks=[pytest.mark.slow] * (kind not in ((LEVELS[-1], F16), (AMX, BF16))))
    for kind in KINDS], ids=str)
def test_transposed_matrices(level: isa.ISA, dtype: dtypes):
    """Whole numbers; nothing behind a matrix is read. Rows of no group are zeros."""
    for n, k in ((51, 301), (80, 320)):
        spec = TransposedGroupedSpec(5, 63, n, k, dtype, 23, gather=3, scatter=True, biased=True)
        kernel = made(spec, level)
        for counts, before in list(ROUTINGS.values())[:4]:
            there = given(spec, counts, before, integers=True)
            wanted = answer(spec, there).nan_to_num(0).to(TORCH[dtype]).double()
            there["w"] = there["w"].transpose(1, 2).contiguous()
            assert torch.equal(run(kernel, spec, there), wanted)


@pytest.mark.parametrize(("level", "half"), [
    pytest.param(level, half, marks=[pytest.mark.slow] * ((level, half) != (LEVELS[-1], F16)))
    for level in ISAS for half in (F16, BF16)], ids=str)
def test_float32_rows_and_matrices_of_16_bits(level: isa.ISA, half: dtypes):
    """Whole numbers; nothing behind a matrix is read."""
    for n, activation in ((51, ""), (74, "swiglu_clamped")):
        spec = MixedGroupedSpec(5, 63, n, 301, F32, 23, gather=3, activation=activation, weighted=True,
                                half=half)
        kernel = made(spec, level)
        for counts, before in list(ROUTINGS.values())[:4]:
            there = given(spec, counts, before, integers=True)
            wanted, there["w"] = answer(spec, there), there["w"].to(TORCH[half])
            inside = ~wanted.isnan()
            difference = (run(kernel, spec, there) - wanted)[inside].abs()
            assert difference.max() <= (2.0**-20 * wanted[inside].abs().max() if activation else 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("level", "dtype"), KINDS, ids=str)
def test_numbers(level: isa.ISA, dtype: dtypes):
    spec = full(dtype)
    kernel = made(spec, level)
    for counts, before in ROUTINGS.values(): right(spec, kernel, counts, before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activations(activation: str):
    spec = full(F32, activation=activation, scatter=False, weighted=False, k=32)
    for level in (isa.PORTABLE, LEVELS[-1]): right(spec, made(spec, level), [3, 0, 20, 30, 10], 0)


def right(spec: GroupedGemmSpec, kernel: LoadedKernel, counts: list[int], before: int) -> None:
    """Asserts that a result is near the exact one."""
    there = given(spec, counts, before)
    got, exact, plain = run(kernel, spec, there), answer(spec, there), answer(spec, there, torch.float32)
    inside = ~exact.isnan()
    assert bool(inside.any()) == any(counts)
    if not any(counts): return
    got, exact, plain = got[inside], exact[inside], plain[inside]
    bound = C * (plain - exact).abs().max() + 2 * ROUNDED[spec.dtype] * exact.abs()
    assert ((got - exact).abs() <= bound).all(), ((got - exact).abs() - bound).max()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [LEVELS[-1], AMX], ids=str)
def test_the_same_bits_in_any_parts(level: isa.ISA):
    spec = full(BF16, n=200)
    there = given(spec, [5, 30, 0, 20, 8])
    found = [run(made(spec, level, parts), spec, there, order) for parts, order in
             ((1, None), (4, [2, 0, 3, 1]), (7, range(7)))]
    for other in found[1:]: assert torch.equal(found[0], other)


@pytest.mark.slow
def test_blocks_of_rows_and_of_k():
    spec = GroupedGemmSpec(2, 100, 40, 1300, BF16)
    for level in (LEVELS[-1], AMX, isa.AVX2):
        for block_m in (16, 48, 256):
            kernel = made(spec, level, block_m=block_m)
            there = given(spec, [90, 10], integers=True)
            wanted = answer(spec, there).to(torch.bfloat16).double()
            assert torch.equal(run(kernel, spec, there), wanted)
    problem, = layout.problems(spec, layout.CPUGrouped(isa.AVX2, 1, 24))
    assert "multiple of 16" in problem


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16, isa.AMX], ids=str)
def test_all_compile(level: isa.ISA):
    made(full(BF16), level)
