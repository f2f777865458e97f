"""2:4 sparse matrices: of each four columns of a row two are stored, and where they were.

A matrix of N rows and K columns (a multiple of 4) has

    values      [N, K / 2] of its dtype: of each four columns the two that are kept, in their order
    metadata    uint32 [T, U, 32]: tiles T of 16 rows, units U of 64 columns, both rounded up, and lanes

Four bits say which two of four columns are kept: the lower two the first one's number, the upper two the
second's, which is larger. A lane's word has them of 32 columns, as mma.sp and wgmma.sp take them in their
metadata register (PTX manual, "Sparse matrix storage"), from the lowest bits on; lane = 4 g + q:

    16-bit elements     row 16 t + g in the lower half, row 16 t + g + 8 in the upper, columns 16 q … of the
                        unit. Lanes q = 0, 1 are a first instruction's (selector 0), q = 2, 3 a second's
    8-bit elements      row 16 t + g + 8 (q mod 2), columns 32 (q // 2) … of the unit: one instruction's

What is beyond the matrix has columns 0 and 1. Fp8 lies in uint8 Tensors (tensor.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant.tensor import in_memory, numbers_of
from tinygrad_nv.quant.types import TILE, Buffer

if TYPE_CHECKING:
    import numpy as np

UNIT = 64                       # columns of a unit
FIRST_TWO = 0b0100              # columns 0 and 1
DTYPES = (dtypes.bfloat16, dtypes.float16, dtypes.fp8e4m3, dtypes.int8)


def buffers(dtype: DType, n: int, k: int) -> dict[str, Buffer]:
    """Returns the buffers of a matrix, in the order of kernels' parameters. Raises `SpecError`."""
    if dtype not in DTYPES:
        raise SpecError(f"a 2:4 sparse matrix of {dtype.name}", ", ".join(each.name for each in DTYPES))
    if k % 4: raise SpecError(f"a 2:4 sparse matrix of {k} columns", "a multiple of 4", "pad the columns")
    return {"values": Buffer((n, k // 2), dtype),
            "metadata": Buffer((-(-n // TILE), -(-k // UNIT), 32), dtypes.uint32)}


@dataclass(frozen=True)
class SparseTensor:
    """A 2:4 sparse matrix of `shape` [N, K]: numbers of `dtype`, times `scales` where there are any, float32
    [N, 1]. Raises `SpecError` for a buffer that does not fit."""
    dtype: DType
    shape: tuple[int, int]
    values: Tensor = field(hash=False)
    metadata: Tensor = field(hash=False)
    scales: Tensor | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        wanted = {name: (shape, in_memory(dtype)) for name, (shape, dtype) in
                  buffers(self.dtype, *self.shape).items()}
        found = {"values": self.values, "metadata": self.metadata}
        if self.scales is not None:
            wanted["scales"], found["scales"] = ((self.shape[0], 1), dtypes.float32), self.scales
        for name, (shape, dtype) in wanted.items():
            if (tuple(found[name].shape), found[name].dtype) != (shape, dtype):
                raise SpecError(f"{name} of {found[name].dtype.name} {list(map(int, found[name].shape))}",
                                f"{dtype.name} {list(shape)}")

    @staticmethod
    def of(dtype: DType, shape: tuple[int, int], arrays: Mapping[str, np.ndarray],
           device: str | None = None) -> SparseTensor:
        """From NumPy's arrays, each of the buffer's bytes (bfloat16 and fp8 as unsigned integers)."""
        made: dict[str, Tensor] = {}
        kinds = buffers(dtype, *shape) | {"scales": Buffer((shape[0], 1), dtypes.float32)}
        for name, array in arrays.items():
            raw = Tensor(array.tobytes(), device=device, dtype=dtypes.uint8)
            made[name] = raw.bitcast(in_memory(kinds[name].dtype)).reshape(kinds[name].shape) \
                .contiguous().realize()
        return SparseTensor(dtype, shape, **made)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(each.nbytes()) for each in (self.values, self.metadata, self.scales)
                   if each is not None)

    def dense(self) -> Tensor:
        """The matrix [N, K] in float32, or int32 of int8 without scales."""
        made = spread(self.dtype, self.shape, self.values, self.metadata)
        return made if self.scales is None else made.float() * self.scales


def spread(dtype: DType, shape: tuple[int, int], values: Tensor, metadata: Tensor) -> Tensor:
    """The numbers [N, K] of both buffers, of int8 in int32, else in float32."""
    n, k = shape
    wide = values.cast(dtypes.int32) if dtype == dtypes.int8 else numbers_of(values, dtype)
    codes = _unpack(metadata, dtype.itemsize)[:n, :k // 4].unsqueeze(-1)
    column = Tensor.arange(4, dtype=dtypes.uint32).to(values.device)
    first, second = (wide.reshape(n, k // 4, 2)[:, :, i:i + 1] for i in range(2))
    made = (codes & 3).eq(column).where(first, (codes >> 2).eq(column).where(second, first * 0))
    return made.reshape(n, k)


def _unpack(metadata: Tensor, size: int) -> Tensor:
    """Four bits of each four columns, uint32 [16 T, 16 U]."""
    tiles, units = int(metadata.shape[0]), int(metadata.shape[1])
    power = Tensor.ones(1, dtype=dtypes.uint32).to(metadata.device)
    place = Tensor.arange(8, dtype=dtypes.uint32).to(metadata.device)
    for i in range(3):      # 16^place, as a shift by a Tensor is not to be had
        power = power * ((place // (1 << i)) % 2).eq(1).where(16 ** (1 << i), 1).cast(dtypes.uint32)
    codes = (metadata.unsqueeze(-1) // power) & 15
    if size == 2: split = codes.reshape(tiles, units, 8, 4, 2, 4).permute(0, 4, 2, 1, 3, 5)
    else: split = codes.reshape(tiles, units, 8, 2, 2, 8).permute(0, 4, 2, 1, 3, 5)
    return split.reshape(TILE * tiles, 16 * units)


# **** in NumPy ****

def codes_of(kept: np.ndarray) -> np.ndarray:
    """uint8 [N, K / 4] of a mask [N, K] of bool that has two of each four columns. Raises `ValueError` where
    it has not."""
    import numpy as np
    mask = kept.reshape(len(kept), -1, 4)
    if not (mask.sum(-1, dtype=np.uint8) == 2).all():
        raise ValueError("four columns of which not two are kept")
    first = mask.argmax(-1).astype(np.uint8)
    second = (3 - mask[:, :, ::-1].argmax(-1)).astype(np.uint8)
    return first | second << 2


def pack_metadata(codes: np.ndarray, itemsize: int) -> np.ndarray:
    """`metadata` of codes [N, K / 4], for elements of so many bytes."""
    import numpy as np
    n, groups = codes.shape
    tiles, units = -(-n // TILE), -(-groups // 16)
    whole = np.full((tiles * TILE, units * 16), FIRST_TWO, np.uint8)
    whole[:n, :groups] = codes
    halves = (4, 4) if itemsize == 2 else (2, 8)        # columns' places in lanes, and in a lane
    split = whole.reshape(tiles, 2, 8, units, *halves)
    order = (0, 3, 2, 4, 1, 5)
    nibbles = split.transpose(order).reshape(tiles, units, 32, 8).astype(np.uint32)
    return np.bitwise_or.reduce(nibbles << (4 * np.arange(8, dtype=np.uint32)), -1)


def compress(w: np.ndarray, kept: np.ndarray) -> dict[str, np.ndarray]:
    """`values` and `metadata` of a matrix [N, K] of any 8- or 16-bit elements, of which a mask keeps two of
    each four columns."""
    metadata = pack_metadata(codes_of(kept), w.itemsize)
    return {"values": w[kept].reshape(len(w), -1), "metadata": metadata}


def two_of_four(size: np.ndarray) -> np.ndarray:
    """The mask that keeps the two of each four columns that are largest; the first of equal ones."""
    import numpy as np
    n, k = size.shape
    fours = [size[:, i::4] for i in range(4)]
    kept = np.empty((n, k // 4, 4), bool)
    for i, one in enumerate(fours):
        before = sum((other >= one).astype(np.uint8) for other in fours[:i])
        kept[:, :, i] = before + sum((other > one).astype(np.uint8) for other in fours[i + 1:]) < 2
    return kept.reshape(n, k)
