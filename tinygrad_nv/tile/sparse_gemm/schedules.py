"""How a matmul with a 2:4 sparse matrix is computed on a GPU. `block_k` counts columns of the matrix."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.gemm.schedules import Mma, Wgmma


@dataclass(frozen=True)
class SparseWgmma(Wgmma):
    """wgmma.sp (wgmma/): `block_m` rows of the matrix by `block_n` rows of activations."""
    block_k: int = 128
    template: ClassVar[str] = "sparse_wgmma"


@dataclass(frozen=True)
class SparseMma(Mma):
    """mma.sp (mma/): `block_m` rows of the matrix by `block_n` rows of activations."""
    template: ClassVar[str] = "sparse_mma"
