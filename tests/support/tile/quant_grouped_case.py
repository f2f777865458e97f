"""Grouped matmuls with quantised matrices on the emulator for tests: stacks in fragments, laid by the package
from buffers in rows, and answers from elements that NumPy makes of those (cpu_quant_case.py).

Protocol: `given` makes the arguments for a number of rows of each group, and the matrices of floats. Scales
of groups without rows are NaN, where floats or E8M0 have it. `exact` and `near` hold a kernel against the
answer: with whole numbers to the bit; else as grouped_case.py, where elements may be rounded to x's dtype.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tests.support.cpu import cpu_grouped_case
from tests.support.cpu.cpu_grouped_case import Given, answer
from tests.support.cpu.cpu_quant_case import elements, stored
from tests.support.tile.gemm_case import TORCH
from tests.support.tile.grouped_case import UNIT, C, launched
from tinygrad_nv import hooks
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.quant import types
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import in_memory
from tinygrad_nv.quant.types import QType, stack_buffers
from tinygrad_nv.tile.grouped_gemm.spec import ACTIVATIONS, GroupedGemmSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F16, BF16 = dtypes.float16, dtypes.bfloat16
each_activation = pytest.mark.parametrize("activation", [pytest.param(
    each, marks=[] if each == "swiglu_clamped" else pytest.mark.slow) for each in ACTIVATIONS[1:]])
TYPES: dict[str, QType] = {
    "int4 g32": QType(types.UINT4, types.per_group_scale(32, BF16), shift=8),
    "awq": QType(types.UINT4, types.per_group_scale(128, F16), zeros=True),
    "awq g32": QType(types.UINT4, types.per_group_scale(32, F16), zeros=True),
    "int8 channel": types.INT8 @ types.per_channel_scale(0, BF16),
    "e4m3 g128": types.E4M3 @ types.per_group_scale(128), "MXFP4": types.MXFP4,
    "NF4": types.NF4 @ types.per_group_scale(64), "Q4_K": types.Q4_K}
ROUNDED = ("NF4",)      # whose elements are no multiples of a power of two


def spec_of(name: str, grouped: GroupedGemmSpec) -> QuantGroupedSpec:
    """Of a type in fragments."""
    return QuantGroupedSpec(grouped, replace(TYPES[name], layout="fragments"))


def given(spec: QuantGroupedSpec, counts: Sequence[int], before: int = 0, whole: bool = False,
          seed: int = 0) -> tuple[Given, Given]:
    """Arguments of the kernel, and those of `answer`."""
    one = spec.grouped
    stack, w = _stack(spec, whole)
    plain = cpu_grouped_case.given(one, counts, before, integers=whole, seed=seed)
    plain["w"] = w
    held = {name: each.clone() for name, each in stack.items()}
    scales = held["scales"].view(torch.uint8).view(one.groups, -1)
    has_nan = spec.type.scale.e8m0 or dtypes.is_float(spec.type.scale.dtype)
    for group, count in enumerate(counts):
        if not count and has_nan: scales[group] = 0xFF
    rest = {name: each for name, each in plain.items() if name not in ("x", "w")}
    return {"x": plain["x"], **held, **rest}, plain


@functools.cache
def _stack(spec: QuantGroupedSpec, whole: bool) -> tuple[Given, torch.Tensor]:
    """Buffers in fragments, and the matrices [groups, n, k]."""
    one, type, (count, n, k) = spec.grouped, replace(spec.type, layout="rows"), spec.stack
    each = [stored(type, n, k, seed=i, whole=whole) for i in range(count)]
    matrices = np.stack([elements(type, n, k, buffers) for buffers in each])
    with hooks.disabled():
        rows = {name: _tensor(np.concatenate([buffers[name] for buffers in each]), shape, dtype)
                for name, (shape, dtype) in stack_buffers(type, spec.stack).items()}
        laid = QStack(type, spec.stack, rows).with_layout("fragments").buffers
        made = {name: torch.from_numpy(x.bitcast(dtypes.uint8).flatten().numpy()) for name, x in laid.items()}
    return made, torch.from_numpy(matrices).view(one.groups, one.n, k)


def _tensor(data: np.ndarray, shape: tuple[int, ...], dtype: DType) -> Tensor:
    return Tensor(data.view(np.uint8), device="CPU").bitcast(in_memory(dtype)).reshape(shape).contiguous()


@functools.cache
def built(spec: QuantGroupedSpec, schedule: Any, gpu: GPU) -> TileKernel:
    """The kernel."""
    made = TABLE.build(spec, schedule, gpu)
    assert isinstance(made, TileKernel)
    return made


def reported(spec: QuantGroupedSpec, schedule: Any, gpu: GPU, counts: Sequence[int]) -> Report:
    """The report of a launch, which has no finding."""
    held = given(spec, counts)[0]
    return launched(built(spec, schedule, gpu), spec.grouped, held, gpu.arch)[1]


def exact(spec: QuantGroupedSpec, schedule: Any, gpu: GPU, counts: Sequence[int], before: int = 0,
          seed: int | str = 0) -> None:
    """Asserts that whole numbers come out to the bit, of rows that are a group's, and no other row."""
    held, plain = given(spec, counts, before, True, sum(counts) + before)
    wanted = answer(spec.grouped, plain).to(TORCH[spec.grouped.out]).double()
    got = launched(built(spec, schedule, gpu), spec.grouped, held, gpu.arch, seed)[0]
    assert torch.equal(got.isnan(), wanted.isnan()), "rows of no group were written, or rows of one were not"
    inside = ~wanted.isnan()
    assert torch.equal(got[inside], wanted[inside])


def near(spec: QuantGroupedSpec, schedule: Any, gpu: GPU, counts: Sequence[int], before: int = 0,
         seed: int | str = 0) -> None:
    """Asserts that random numbers come out near what float64 makes of them: twice as far as sums of float32
    of rounded elements are, and two roundings."""
    one = spec.grouped
    held, plain = given(spec, counts, before, seed=sum(counts))
    rounded = plain | {"w": plain["w"].to(TORCH[one.dtype]).float()}
    true, usual = answer(one, plain), answer(one, rounded, torch.float32)
    got = launched(built(spec, schedule, gpu), one, held, gpu.arch, seed)[0]
    inside = ~true.isnan()
    assert torch.equal(got.isnan(), ~inside)
    true, usual, got = true[inside], usual[inside], got[inside]
    bound = C * (usual - true).abs().max() + 2 * UNIT[one.out] * true.abs()
    worst = ((got - true).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound"
