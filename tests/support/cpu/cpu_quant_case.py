"""Quantised matrices for tests of cpu/quant_gemm: their buffers as arrays, their elements by NumPy, and the
kernels run on arrays.

Protocol: `stored(type, n, k)` are random buffers. With `whole`, scales are powers of two and minima integers,
so that elements of integer codes are integers and sums of them with integers exact. `elements` computes what
quant/types.py says, in float32, and knows nothing of the package's decoders but the bits of a packed byte.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.cpu.cpu_gemv_case import BEST, LEVELS, at_end
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant import types
from tinygrad_nv.quant.packing import unpack
from tinygrad_nv.quant.types import QType, Scale, buffers, per_group_scale
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

__all__ = ["BEST", "LEVELS", "TYPES"]

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, dtypes.fp8e4m3: torch.float8_e4m3fn,
         dtypes.fp8e5m2: torch.float8_e5m2, dtypes.int8: torch.int8, dtypes.uint8: torch.uint8,
         dtypes.int32: torch.int32}
Arrays = dict[str, np.ndarray]

TYPES: dict[str, QType] = {
    **{name: getattr(types, name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
                                               "Q5_K", "Q6_K", "MXFP4", "NVFP4")},
    "nf4": types.NF4 @ per_group_scale(64),
    "nf4 nested": QType(types.NF4, per_group_scale(64), outer=types.per_group_scale(256)),
    "awq": QType(types.UINT4, per_group_scale(128, F16), zeros=True),
    "gptq 2 bits": QType(types.UINT2, per_group_scale(32, F16), zeros=True, permuted=True),
    "gptq 3 bits": QType(types.UINT3, per_group_scale(32, F16), zeros=True),
    "int8 channel": types.INT8 @ types.per_channel_scale(0, BF16),
    "int8 columns": types.INT8 @ types.per_channel_scale(1),
    "uint8 tensor": QType(types.UINT8, types.per_tensor_scale(), zeros=True),
    "e4m3 blocks": types.E4M3 @ types.per_block_scale(128, 128),
    "e5m2 channel": types.E5M2 @ types.per_channel_scale(),
    "nvfp4 divided": replace(types.NVFP4, divided=True),
    "mxfp6": types.E2M3 @ types.NVFP4.scale,
    "int8 g24": types.INT8 @ per_group_scale(24),
}


def bits_of(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """The bytes of numbers of a dtype."""
    made = torch.from_numpy(np.ascontiguousarray(numbers)).to(TORCH[dtype])
    return made.reshape(-1).view(torch.uint8).numpy()


def numbers_of(raw: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes as numbers, in float32."""
    return torch.from_numpy(raw.copy()).view(TORCH[dtype]).float().numpy().reshape(shape)


def stored(type: QType, n: int, k: int, seed: int = 0, whole: bool = False) -> Arrays:
    """Random buffers, each its bytes."""
    rng, made = np.random.default_rng(seed), {}
    for name, (shape, dtype) in buffers(type, n, k).items():
        if name == "order": numbers = rng.permutation(k).astype(np.int32)
        elif name in ("codes", "high"): numbers = rng.integers(0, 256, shape)
        elif name == "zeros": numbers = rng.integers(0, 1 << type.bits, shape)
        elif dtype == dtypes.uint8: numbers = rng.integers(126, 129, shape)
        elif dtype == dtypes.int8: numbers = rng.integers(-2, 3, shape)
        elif whole or dtype == dtypes.fp8e4m3: numbers = 2.0 ** rng.integers(-1, 2, shape)
        else: numbers = rng.random(shape) + .5
        if name == "codes" and dtypes.is_float(dtype): numbers = rng.integers(-8, 9, shape)
        if name == "codes" and dtype == dtypes.int8: numbers = rng.integers(-128, 128, shape)
        if name in ("scales", "mins") and dtype == dtypes.uint8 and not type.scale.e8m0: numbers = numbers % 4
        made[name] = bits_of(np.asarray(numbers, np.float32 if dtypes.is_float(dtype) else np.int32), dtype)
    return made


def elements(type: QType, n: int, k: int, given: Arrays) -> np.ndarray:
    """The matrix in float32, columns in the order of inputs."""
    have = buffers(type, n, k)

    def spread(name: str, scale: Scale) -> np.ndarray:
        blocks = numbers_of(given[name], have[name].dtype, have[name].shape)
        if scale.e8m0: blocks = np.exp2(blocks - 127)
        blocks = np.repeat(np.repeat(blocks, scale.rows or n, 0), scale.columns or k, 1)
        return blocks[:n, :k].astype(np.float32)

    def factor(name: str, outer: str) -> np.ndarray:
        made = spread(name, type.scale)
        if type.outer is None: return made
        return made / spread(outer, type.outer) if type.divided else spread(outer, type.outer) * made
    codes = given["codes"].reshape(n, -1)
    if type.bits == 8: values = numbers_of(given["codes"], type.element.dtype, (n, k))
    else:
        whole = unpack(codes, type.low_bits).astype(np.int32)
        if "high" in given:
            high = unpack(given["high"].reshape(n, -1), type.bits - type.low_bits)
            whole += high.astype(np.int32) << type.low_bits
        values = np.float32(type.element.values)[whole] if type.element.values else whole.astype(np.float32)
    values = values - np.float32(type.shift)
    if type.zeros: values = values - spread("zeros", type.scale)
    made = values * factor("scales", "outer")
    if type.mins: made = made - factor("mins", "outer_mins")
    if not type.permuted: return made
    back = np.empty_like(made)
    back[:, given["order"].view(np.int32)] = made
    return back


def tiles(type: QType, n: int, k: int, given: Arrays) -> Arrays:
    """The buffers in tiles, element by element as quant/types.py says."""
    wanted, have = buffers(replace(type, layout="tiles"), n, k), buffers(type, n, k)
    made: Arrays = {}
    for name, (shape, _) in wanted.items():
        if name == "order":
            made[name] = given[name]
            continue
        if name not in ("codes", "high"):
            numbers = given[name].reshape(*have[name].shape, -1)
            to = np.zeros((*shape, numbers.shape[-1]), np.uint8)
            for row in range(n): to[row // 16, :, row % 16] = numbers[row]
        else:
            bits = type.low_bits if name == "codes" else type.bits - type.low_bits
            each, to = 8 // bits, np.zeros(shape, np.uint8)
            for row, codes in enumerate(unpack(given[name].reshape(n, -1), bits)):
                for column, code in enumerate(codes):
                    at = row // 16, column // (4 * each), row % 16, column % 4
                    to[at] |= code << np.uint8(column % (4 * each) // 4 * bits)
        made[name] = to.reshape(-1)
    return made


def in_bytes(x: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """Rows as int8 and scales of 32 columns say them."""
    x = x if order is None else x[:, order]
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    d = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(blocks * (np.float32(1) / np.where(d == 0, np.float32(1), d)))
    made = (q * d).reshape(x.shape)
    if order is None: return made
    back = np.empty_like(made)
    back[:, order] = made
    return back


def matmul(type: QType, m: int, n: int, k: int, dtype: DType = F32, out: DType | None = None, gap: int = 0,
           symbolic: bool = False, int8: bool = False) -> QuantGemmSpec:
    """A matmul; `gap`: elements between rows of a."""
    result = Result(out or dtype, n, 1)
    gemm = GemmSpec(m, n, k, Operand(dtype, k + gap, 1), Operand(dtype, k, 1), result, (),
                    Sum(dtypes.int32 if dtype == dtypes.int8 else F32).cast(result.dtype), symbolic=symbolic)
    return QuantGemmSpec(gemm, type, int8)


def default(spec: QuantGemmSpec, level: isa.ISA = BEST) -> tuple[CPU, object]:
    target = CPU(level, 2)
    schedule = TABLE.choose(spec, target)
    assert schedule is not None, TABLE.why_not(spec, target)
    return target, schedule


def built(spec: QuantGemmSpec, level: isa.ISA = BEST, **changes: int) -> LoadedKernel:
    target, schedule = default(spec, level)
    return load(TABLE.build(spec, replace(schedule, **changes), target))


def run(kernel: LoadedKernel, spec: QuantGemmSpec, x: np.ndarray, given: Arrays,
        order: Sequence[int] | None = None) -> np.ndarray:
    """The result in float32, of x [m, k]: every storage ends where memory does."""
    gemm, m = spec.gemm, len(x)
    rows = np.full((m, gemm.a.mn), np.nan, np.float32)
    rows[:, :gemm.k] = x
    a = bits_of(rows.reshape(-1)[:(m - 1) * gemm.a.mn + gemm.k], gemm.a.dtype)
    out = at_end(np.zeros(m * gemm.n * gemm.out.dtype.itemsize, np.uint8))
    work = [np.full(kernel.kernel.workspace_bytes, 255, np.uint8)] if kernel.kernel.workspace_bytes else []
    inputs = [at_end(each) for each in (a, *given.values())]
    kernel(out, *work, *inputs, *([m] if gemm.symbolic else []), order=order)
    return numbers_of(out, gemm.out.dtype, (m, gemm.n))
