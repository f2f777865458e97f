"""Grouped matmuls with quantised matrices on the CPU: instruction sets, types, routings; and what is not
read."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_gemv_case import LEVELS
from tests.support.cpu.cpu_grouped_case import Given, answer, given, run
from tests.support.cpu.cpu_quant_case import TYPES, elements, in_bytes, stored, tiles
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.quant_grouped import layout
from tinygrad_nv.cpu.quant_grouped.kernel import build
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant.types import QType
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec

F32, BF16 = dtypes.float32, dtypes.bfloat16
AMX = isa.AMX if not isa.why_not("amx") else replace(isa.AMX, emulated=True)
# of 63 rows in 5 groups: panels of many rows, dot products of few
ROUTINGS = {"ragged": ([1, 0, 9, 40, 8], 2), "one group": ([0, 0, 63, 0, 0], 0),
            "a token": ([0, 0, 0, 0, 1], 62)}
KINDS = ("Q4_0", "Q4_K", "awq", "gptq 2 bits", "int8 channel", "e4m3 blocks", "MXFP4")
C = 2.0     # times the error of float32 sums from first to last
ROUNDED = {F32: 2.0**-24, BF16: 2.0**-8}


def spec_of(name: str, dtype: dtypes = F32, int8: bool = False, **changes: object) -> QuantGroupedSpec:
    """All there can be; columns no multiple of a tile."""
    one = GroupedGemmSpec(5, 63, 84, 256, dtype, 23, gather=3, scatter=True, activation="silu", weighted=True,
                          biased=True)
    return QuantGroupedSpec(replace(one, **changes), replace(TYPES[name].of_rows(), layout="tiles"), int8)


def made(spec: QuantGroupedSpec, level: isa.ISA, parts: int = 2, block_m: int = 96) -> LoadedKernel:
    schedule = replace(layout.default(spec, CPU(level, 2)), parts=parts, block_m=block_m)
    assert layout.problems(spec, schedule) == []
    return load(build(spec, schedule))


def arguments(spec: QuantGroupedSpec, routing: str, whole: bool = False) -> tuple[Given, Given]:
    """Of the kernel; and with matrices of floats, of `answer`. Scales of groups without rows are NaN where
    floats have it."""
    one, (count, n, k) = spec.grouped, spec.stack
    counts, before = ROUTINGS[routing]
    plain = given(one, counts, before, integers=whole)
    type = replace(spec.type, layout="rows")
    each = [stored(type, n, k, seed=i, whole=whole) for i in range(count)]
    matrices = np.stack([elements(type, n, k, one) for one in each])
    plain["w"] = torch.from_numpy(matrices).view(one.groups, one.n, k)
    if spec.int8 and whole: plain["x"] = whole_bytes(plain["x"])
    laid = [tiles(type, n, k, one) for one in each]
    for i, buffers in enumerate(laid):
        if not counts[i // one.halves] and spec.type.scale.dtype != dtypes.uint8: buffers["scales"][:] = 0xFF
    stack = {"columns" if name == "order" else name:
             torch.from_numpy(np.concatenate([buffers[name] for buffers in laid])) for name in laid[0]}
    own = {"x": plain["x"], **stack, **{name: x for name, x in plain.items() if name not in ("x", "w")}}
    if spec.int8 and not whole: plain["x"] = torch.from_numpy(in_bytes(plain["x"].numpy()))
    return own, plain


def whole_bytes(x: torch.Tensor) -> torch.Tensor:
    """Integers of which each 32 have one scale, 1."""
    made = x.clone()
    made[:, ::32] = torch.where(x[:, ::32].isnan(), x[:, ::32], 127)
    return made


def right(spec: QuantGroupedSpec, kernel: LoadedKernel, routing: str) -> None:
    """Asserts that a result is near the exact one."""
    there, plain = arguments(spec, routing)
    got, exact = run(kernel, spec.grouped, there), answer(spec.grouped, plain)
    one = answer(spec.grouped, plain, torch.float32)
    inside = ~exact.isnan()
    assert bool(inside.any())
    got, exact, one = got[inside], exact[inside], one[inside]
    # a matrix's elements may be rounded once more, to x's dtype
    bound = C * (one - exact).abs().max() + 2 * ROUNDED[spec.grouped.dtype] * exact.abs().max()
    assert ((got - exact).abs() <= bound).all(), ((got - exact).abs() - bound).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["Q4_0", "awq", "int8 channel"])
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_whole_numbers_are_exact(level: isa.ISA, name: str, int8: bool):
    spec = spec_of(name, int8=int8, activation="", weighted=False)
    kernel = made(spec, level)
    for routing in ROUTINGS:
        there, plain = arguments(spec, routing, whole=True)
        got, wanted = run(kernel, spec.grouped, there), answer(spec.grouped, plain)
        inside = ~wanted.isnan()
        assert torch.equal(got[inside], wanted[inside])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_numbers(name: str):
    spec = spec_of(name)
    kernel = made(spec, LEVELS[-1])
    for routing in ROUTINGS: right(spec, kernel, routing)


@pytest.mark.slow
def test_the_last_scale_of_fewer_columns():
    """K of 192 and of 64, with scales of 128 columns."""
    for k in (192, 64):
        for name in ("e4m3 blocks", "awq"):
            spec = spec_of(name, k=k)
            right(spec, made(spec, LEVELS[-1]), "ragged")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "level"), [("Q6_K", LEVELS[-1]), ("Q4_K", isa.PORTABLE),
                                             ("Q8_0", LEVELS[-1])], ids=str)
def test_rows_of_bytes(name: str, level: isa.ISA):
    spec = spec_of(name, int8=True)
    kernel = made(spec, level, block_m=17)
    for routing in ROUTINGS: right(spec, kernel, routing)


@pytest.mark.slow
def test_rows_of_bytes_have_the_bits_of_one_alone():
    """Of panels, and of dot products where a block has one row."""
    spec = spec_of("Q4_K", int8=True, k=768)
    there = arguments(spec, "ragged")[0]
    many, alone = (run(made(spec, LEVELS[-1], block_m=rows), spec.grouped, there) for rows in (48, 1))
    assert torch.equal(many.nan_to_num(), alone.nan_to_num())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [LEVELS[-1], AMX], ids=str)
def test_rows_of_bfloat16(level: isa.ISA):
    spec = spec_of("awq", BF16)
    right(spec, made(spec, level), "ragged")


@pytest.mark.slow
def test_the_same_bits_in_any_parts():
    spec = spec_of("Q4_0", int8=True, n=200)
    there = arguments(spec, "ragged")[0]
    found = [run(made(spec, LEVELS[-1], parts), spec.grouped, there, order) for parts, order in
             ((1, None), (4, [2, 0, 3, 1]), (7, range(7)))]
    for other in found[1:]: assert torch.equal(found[0].nan_to_num(), other.nan_to_num())


def test_what_a_schedule_must_be():
    spec = spec_of("awq")
    problem, = layout.problems(spec, layout.CPUQuantGrouped(isa.AVX2, 1, 16))
    assert "block_m 16, a multiple of 6" in problem
    rows: QType = replace(spec.type, layout="rows")
    assert layout.problems(replace(spec, type=rows), layout.CPUQuantGrouped(isa.AVX2, 1, 96)) == \
        ["a matrix that is not in tiles"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16, isa.AMX], ids=str)
def test_all_compile(level: isa.ISA):
    for name, int8 in (("awq", False), ("Q4_K", True)): made(spec_of(name, BF16, int8), level)
