"""Whole matmuls of the templates, bit for bit what the model says of their instructions in their order."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, product, run, view
from tests.support.tile.scaled_gemm_case import given as scaled_given
from tests.support.tile.scaled_gemm_case import scaled
from tinygrad_nv.numerics.semantics import FORMATS, Unit, dot, promote_dot, tensor_core
from tinygrad_nv.numerics.semantics.formats import Codes
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32, E4M3, E5M2 = (dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3,
                              dtypes.fp8e5m2)
MMA, WGMMA = Mma().block(64, 64).k(32).warps(2, 2).stages(3), Wgmma().block(128, 64)


def codes_of(storage: torch.Tensor, dtype: DType, extents: tuple[int, int], stride: int) -> Codes:
    """A matrix's codes."""
    kind = torch.int16 if dtype.itemsize == 2 else torch.uint8
    lies = view(storage.view(kind), extents, (stride, 1), 0)
    return lies.contiguous().numpy().view(FORMATS[short(dtype)].kind)


def operands(spec: GemmSpec, given: dict[str, torch.Tensor]) -> tuple[Codes, Codes]:
    """Codes of A (M, K) and B (K, N)."""
    a = codes_of(given["a"], spec.a.dtype, (spec.m, spec.k), spec.a.mn)
    return a, codes_of(given["b"], spec.b.dtype, (spec.n, spec.k), spec.b.mn).T


def bits(values: torch.Tensor) -> Codes: return values.float().numpy().view(np.uint32)


@pytest.mark.parametrize(("schedule", "dtype", "arch", "instruction"), [
    (MMA, BF16, "sm_80", "mma"), (MMA, F16, "sm_90a", "mma"), (WGMMA, BF16, "sm_90a", "wgmma"),
    (WGMMA, F16, "sm_90a", "wgmma")])
def test_a_matmul_has_the_bits_of_its_instructions(schedule: GemmSchedule, dtype: DType, arch: str,
                                                   instruction: str):
    spec = product(70, 72, 208, dtype, F32)
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch)
    unit: Unit = tensor_core(arch, instruction, short(dtype))
    want = dot(unit, *operands(spec, given), np.zeros((70, 72), np.uint32))
    assert np.array_equal(bits(got), want)


@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_matmul_of_fp8_is_promoted_every_128(a: DType, b: DType):
    spec = product(70, 72, 512, a, F32)
    spec = replace(spec, b=replace(spec.b, dtype=b))
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, WGMMA.k(128), GPU("sm_90a")), spec, given, "sm_90a")
    unit = tensor_core("sm_90a", "wgmma", short(a), b=short(b))
    assert np.array_equal(bits(got), promote_dot(unit, *operands(spec, given)))


def test_a_matmul_with_scales_of_groups_is_promoted_with_them():
    """DeepGEMM's: each group's sum times its scales, by one FMA."""
    spec = scaled(70, 128, 384)
    given = scaled_given(spec, integers=False)
    got = run(TABLE.build(spec, ScaledWgmma(), GPU("sm_90a")), spec, given, "sm_90a")
    rows = view(given["a_scale"], (70, 3), (spec.a_scale.mn, spec.a_scale.k), 0).numpy()
    columns = view(given["b_scale"], (1, 3), (spec.b_scale.mn, spec.b_scale.k), 0).numpy()
    scales = (rows * columns).astype(np.float32).T[:, :, None].astype(np.float64)
    want = promote_dot(tensor_core("sm_90a", "wgmma", "e4m3"), *operands(spec, given), scales)
    assert np.array_equal(bits(got), want)
