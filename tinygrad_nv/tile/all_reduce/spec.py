"""The sum of a tensor over GPUs, in types.

Protocol: each of `world` GPUs has x [count], and all get

    out = round(x_0 + x_1 + … + x_(world − 1))

added up in this order, floats in float32 and rounded once: all GPUs get the same bits. Integers wrap. With
`columns` the result is rows of so many elements, and what follows an all-reduce in a transformer is done at
once, each step rounded to the dtype as it would be by itself:

    residual_out = round(out + residual)
    normalized   = round(round(residual_out · 1 / √(mean(residual_out²) + eps)) · weight)
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

FLOATS = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
INTEGERS = (dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64)
MOST_WORLD = 8      # GPUs of one NVSwitch
VECTOR_BYTES = 16


@dataclass(frozen=True)
class AllReduceSpec:
    """`columns` 0: the sums alone. Raises `SpecError` for what cannot be."""
    world: int
    count: int
    dtype: DType = dtypes.bfloat16
    columns: int = 0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not 2 <= self.world <= MOST_WORLD:
            raise SpecError(f"an all-reduce over {self.world} GPUs", f"2 to {MOST_WORLD}")
        if self.count < 1: raise SpecError(f"an all-reduce of {self.count} elements", "1 at least")
        if self.dtype not in (*FLOATS, *INTEGERS):
            raise SpecError(f"an all-reduce of {short(self.dtype)}",
                            ", ".join(map(short, (*FLOATS, *INTEGERS))))
        if not self.columns: return
        if self.dtype not in FLOATS:
            raise SpecError(f"RMSNorm of {short(self.dtype)}", ", ".join(map(short, FLOATS)))
        if self.count % self.columns:
            raise SpecError(f"{self.count} elements in rows of {self.columns}", "whole rows")

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return self.count * self.dtype.itemsize

    @property
    def of_vector(self) -> int:
        """Elements of 16 bytes."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def vectors(self) -> int:
        """Vectors of the message, the last one perhaps not full."""
        return -(-self.count // self.of_vector)

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments: the rank, which is the caller's."""
        return ()

    def __str__(self) -> str:
        after = f", residual and RMSNorm of {self.columns}" if self.columns else ""
        return f"{self.count} {short(self.dtype)} over {self.world} GPUs{after}"
