"""Matmuls with matrices in fragments, for tests of the GPU templates: specs, and what lies in memory.

Protocol: `matmul(type, m, n, k, …)` is a spec, `storages(spec, seed, whole)` its arguments: codes are random
bytes, also where the matrix is padded. With `whole`, elements are integers and so are activations: sums are
exact in float32, in any order. `TYPES` is of one kind each: element, blocks, zero points, minima, planes.
"""
from __future__ import annotations

from dataclasses import replace

import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.reference_case import Given
from tests.support.tile.reference_case import storages as plain
from tinygrad_nv.quant import types
from tinygrad_nv.quant.types import QType, Scale, per_channel_scale, per_group_scale
from tinygrad_nv.tile.expression import Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec, Operand, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

CUT = 2.0**-16  # of the largest result: what tensor cores may cut off sums
BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
# codes from here on are left out: NaN, and what makes sums that float16 has not
LEAST = {dtypes.fp8e4m3: 0x7F, dtypes.fp8e5m2: 0x50}

WHOLE = types.Element("integers", 4, values=(3., -5., 0., 7., 12., -1., 1., 9., -12., 2., -7., 4., 15., -2.,
                                             5., -16.))
PLAIN: dict[str, QType] = {
    "int4 g128": QType(types.UINT4, per_group_scale(128, F16), shift=8),
    "int4 g32": QType(types.UINT4, per_group_scale(32, BF16), shift=8),
    "int4 channel": QType(types.UINT4, per_channel_scale(0, BF16), shift=8),
    "awq": QType(types.UINT4, per_group_scale(128, F16), zeros=True),
    "awq g32": QType(types.UINT4, per_group_scale(32, F16), zeros=True),
    "int8 channel": types.INT8 @ per_channel_scale(0, BF16),
    "int8 g64": types.INT8 @ per_group_scale(64, F32),
    "uint8 zeros": QType(types.UINT8, per_channel_scale(0, F32), zeros=True),
    "uint8 shift": QType(types.UINT8, per_group_scale(128, F16), shift=128),
    "e4m3 channel": types.E4M3 @ per_channel_scale(),
    "e4m3 g128": types.E4M3 @ per_group_scale(128),
    "e5m2": types.E5M2 @ per_channel_scale(),
    "MXFP6": types.E2M3 @ types.MXFP4.scale, "MXFP4": types.MXFP4,
    "NVFP4": replace(types.NVFP4, outer=Scale(1, 0)),
    "NF4": types.NF4 @ per_group_scale(64), "FP4": types.FP4 @ per_group_scale(32, F16),
    "codebook": WHOLE @ per_group_scale(64, BF16),
    "2 bits": QType(types.UINT2, per_group_scale(32, F16), zeros=True),
    "3 bits": QType(types.UINT3, per_group_scale(64, F16), zeros=True),
    **{name: getattr(types, name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                                               "Q5_K", "Q6_K")}}
TYPES = {name: replace(type, layout="fragments") for name, type in PLAIN.items()}


def matmul(type: QType, m: int, n: int, k: int, dtype: DType = BF16, out: DType | None = None, gap: int = 0,
           symbolic: bool = False, bias: bool = False, parts: int = 1,
           epilogue: Expression | None = None) -> QuantGemmSpec:
    """A matmul; `gap`: elements between rows of a."""
    result = Result(out or dtype, n, 1)
    ends = epilogue or (Sum() + Load(0, F32, 0, 1) if bias else Sum()).cast(result.dtype)
    gemm = GemmSpec(m, n, k, Operand(dtype, k + gap, 1), Operand(dtype, k, 1), result, (), ends, parts=parts,
                    part=n * k if parts > 1 else 0, symbolic=symbolic)
    return QuantGemmSpec(gemm, type)


def storages(spec: QuantGemmSpec, seed: int = 0, whole: bool = False) -> Given:
    """The arguments."""
    made, type = plain(spec, seed, whole), spec.type
    random = torch.Generator().manual_seed(seed + 1)

    def integers(least: int, most: int, of: torch.Tensor) -> torch.Tensor:
        return torch.randint(least, most + 1, of.shape, generator=random)
    for name, buffer in spec.buffers.items():
        one = made[name]
        if name in ("codes", "high"):
            codes = integers(0, 255, one)
            if (least := LEAST.get(type.element.dtype)) is not None: codes[codes % 128 >= least] = 1
            if whole and type.element.dtype in FP8: codes = small(codes, type)
            one.view(torch.uint8).copy_(codes.to(torch.uint8))
        elif name == "zeros": one.copy_(integers(0, (1 << type.bits) - 1, one))
        elif name in ("scales", "mins") and type.scale.e8m0: one.copy_(integers(127 + whole, 129, one))
        elif not dtypes.is_float(buffer.dtype): one.copy_(integers(0 if name == "mins" else 1, 3, one))
        elif whole or buffer.dtype in FP8: one.copy_((2.0 ** integers(1, 3, one)).to(one.dtype))
        else: one.copy_((torch.rand(one.shape, generator=random) + .5).to(one.dtype))
    return made


def small(codes: torch.Tensor, type: QType) -> torch.Tensor:
    """8-bit floats that are integers: 1, 2, 4 and 8, and their negatives."""
    bias, mantissa = (7, 3) if type.element.dtype == dtypes.fp8e4m3 else (15, 2)
    return (codes & 0x80) | (bias + codes % 4 << mantissa)
