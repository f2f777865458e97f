"""Matmuls with 2:4 sparse matrices, for tests of the GPU templates: specs, and what lies in memory. Kept
columns are random; what is beyond the matrix has its metadata, too."""
from __future__ import annotations

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.reference_case import Given
from tests.support.tile.reference_case import storages as plain
from tinygrad_nv.quant.sparse import codes_of, pack_metadata, two_of_four
from tinygrad_nv.tile.expression import Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec

BF16, F16, F32, E4M3, INT8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8


def matmul(m: int, n: int, k: int, dtype: DType = BF16, out: DType | None = None, gap: int = 0,
           bias: bool = False, along_m: bool = False, epilogue: Expression | None = None) -> SparseGemmSpec:
    """A matmul; `gap`: elements between rows of a, `along_m`: whose rows lie side by side."""
    total = Sum(dtypes.int32 if dtype == INT8 else F32)
    result = Result(out or (F32 if dtype in (E4M3, INT8) else dtype), n, 1)
    ends = epilogue or (total.cast(F32) + Load(0, F32, 0, 1) if bias else total).cast(result.dtype)
    a = Operand(dtype, 1, m + gap) if along_m else Operand(dtype, k + gap, 1)
    return SparseGemmSpec(GemmSpec(m, n, k, a, Operand(dtype, k, 1), result, (), ends))


def storages(spec: SparseGemmSpec, seed: int = 0, whole: bool = False) -> Given:
    """The arguments."""
    made, (n, k) = plain(spec, seed, whole), spec.shape
    kept = two_of_four(np.random.default_rng(seed).random((n, k)))
    metadata = pack_metadata(codes_of(kept), spec.gemm.a.dtype.itemsize)
    made["metadata"].copy_(torch.from_numpy(metadata.reshape(-1)))
    return made
