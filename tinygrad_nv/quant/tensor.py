"""A quantised matrix in memory.

`QTensor.dequantize` is plain tinygrad: the reference of every kernel, and what runs where none does.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant.types import TILE, QType, Scale, buffers

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class QTensor:
    """A matrix of `shape` [N, K] and its buffers, by name (types.py). Raises `SpecError` where one is
    missing, or of another shape or dtype."""
    type: QType
    shape: tuple[int, int]
    buffers: Mapping[str, Tensor] = field(hash=False)

    def __post_init__(self) -> None:
        wanted = buffers(self.type, *self.shape)
        if wanted.keys() != self.buffers.keys():
            raise SpecError(f"buffers {', '.join(self.buffers)} of {self.type}", ", ".join(wanted))
        for name, (shape, dtype) in wanted.items():
            found = self.buffers[name]
            if (tuple(found.shape), found.dtype) != (shape, in_memory(dtype)):
                raise SpecError(f"{name} of {self.type} is {found.dtype.name} {list(map(int, found.shape))}",
                                f"{in_memory(dtype).name} {list(shape)}")

    @staticmethod
    def of(type: QType, shape: tuple[int, int], arrays: Mapping[str, np.ndarray],
           device: str | None = None) -> QTensor:
        """From NumPy's arrays, each of the buffer's bytes (bfloat16 and fp8 as unsigned integers)."""
        import numpy as np  # `import tinygrad_nv` loads this file, and no NumPy
        made = {}
        for name, (extents, dtype) in buffers(type, *shape).items():
            raw = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8)
            made[name] = Tensor(raw.tobytes(), device=device, dtype=dtypes.uint8).bitcast(in_memory(dtype)) \
                .reshape(extents).contiguous().realize()
        return QTensor(type, shape, made)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(each.nbytes()) for each in self.buffers.values())

    def tiled(self) -> QTensor:
        """The same matrix in tiles (types.py). Raises `SpecError` where there are none of its type."""
        type = replace(self.type, tiled=True)
        wanted, given = buffers(type, *self.shape), self.buffers
        if self.type.tiled: return self
        made = {name: in_tiles(type, name, given[name], self.shape[1]).contiguous().realize()
                for name in wanted}
        return QTensor(type, self.shape, made)

    def dequantize(self, dtype: DType = dtypes.float32) -> Tensor:
        """The matrix [N, K], with columns in the order of inputs."""
        return dequantized(self.type, self.shape, self.buffers, dtype)


def dequantized(type: QType, shape: tuple[int, int], given: Mapping[str, Tensor],
                dtype: DType = dtypes.float32) -> Tensor:
    """The same of buffers."""
    n, k = shape
    if type.tiled:
        given = {name: _out_of_tiles(type, name, one, n) for name, one in given.items()}
        type = replace(type, tiled=False)
    values = _values(type, given)
    if type.shift: values = values - type.shift
    if type.zeros: values = values - _spread(given["zeros"].float(), type.scale, n, k)
    made = values * _factors(type, given, "scales", "outer", n, k)
    if type.outer is not None and type.outer_last:
        made = made * _spread(_numbers(given["outer"], type.outer), type.outer, n, k)
    if type.mins: made = made - _factors(type, given, "mins", "outer_mins", n, k)
    if type.permuted:
        # column k has input order[k]: the inverse permutation, by a scatter of column numbers
        inverse = Tensor.zeros(k, dtype=dtypes.int32, device=made.device).contiguous()
        inverse = inverse.scatter(0, given["order"], Tensor.arange(k, dtype=dtypes.int32).to(made.device))
        made = made.contiguous()[:, inverse.contiguous()]  # neither is made again for every element
    return made.cast(dtype)


def codes_of(type: QType, given: Mapping[str, Tensor]) -> Tensor:
    """The codes [N, K], of 8 bits in the element's dtype, else in uint8."""
    low = _fields(given["codes"], type.low_bits)
    if "high" not in given: return low
    return low + _fields(given["high"], type.bits - type.low_bits) * (1 << type.low_bits)


def _values(type: QType, given: Mapping[str, Tensor]) -> Tensor:
    codes = codes_of(type, given)
    if not type.element.values: return _floats(codes, type.element.dtype)
    book = Tensor(list(type.element.values), dtype=dtypes.float32, device=codes.device)
    return book[codes.cast(dtypes.int32)]


def _fields(data: Tensor, bits: int) -> Tensor:
    """Fields of `bits` of bytes [N, B], the lowest first: [N, 8 B / bits]."""
    if bits == 8: return data
    each, mask = 8 // bits, (1 << bits) - 1
    return Tensor.stack(*[(data >> (i * bits)) & mask for i in range(each)], dim=-1).flatten(1)


def in_tiles(type: QType, name: str, data: Tensor, k: int) -> Tensor:
    """A buffer of a matrix of k columns in tiles."""
    if name == "order": return data
    n = int(data.shape[0])
    padded = data.pad(((0, -n % TILE), (0, 0)))
    tiles = (n + TILE - 1) // TILE
    if name not in ("codes", "high"): return padded.reshape(tiles, TILE, -1).permute(0, 2, 1)
    bits = _plane(type, name)
    each = 8 // bits
    fields = _fields(padded, bits).reshape(tiles, TILE, k // (4 * each), each, 4).permute(3, 0, 2, 1, 4)
    return _joined([fields[i] for i in range(each)], bits)


def _out_of_tiles(type: QType, name: str, data: Tensor, n: int) -> Tensor:
    """`in_tiles` undone."""
    if name == "order": return data
    tiles = int(data.shape[0])
    if name not in ("codes", "high"): return data.permute(0, 2, 1).reshape(tiles * TILE, -1)[:n]
    bits = _plane(type, name)
    each, mask = 8 // bits, (1 << bits) - 1
    fields = [data] if each == 1 else [(data >> (i * bits)) & mask for i in range(each)]
    rows = Tensor.stack(*fields, dim=-2).permute(0, 2, 1, 3, 4).reshape(tiles * TILE, -1)[:n]
    return _joined([rows[:, i::each] for i in range(each)], bits)


def _joined(fields: list[Tensor], bits: int) -> Tensor:
    """Fields of `bits` as bytes, the first is lowest."""
    made = fields[0]
    for i, more in enumerate(fields[1:], 1): made = made | (more << (i * bits))
    return made


def _plane(type: QType, name: str) -> int:
    return type.low_bits if name == "codes" else type.bits - type.low_bits


def _factors(type: QType, given: Mapping[str, Tensor], name: str, outer: str, n: int, k: int) -> Tensor:
    made = _spread(_numbers(given[name], type.scale), type.scale, n, k)
    if type.outer is None: return made
    if type.outer_last: return made
    larger = _spread(_numbers(given[outer], type.outer), type.outer, n, k)
    return made / larger if type.divided else larger * made


def _numbers(codes: Tensor, scale: Scale) -> Tensor:
    """float32 of scales. E8M0 is made of its bits: 0 is 2^-127, which is subnormal, 255 NaN."""
    if not scale.e8m0: return _floats(codes, scale.dtype)
    bits = codes.cast(dtypes.uint32)
    exact = (bits == 0).where(1 << 22, (bits == 255).where(0x7FC00000, bits << 23))
    return exact.cast(dtypes.uint32).bitcast(dtypes.float32)


def in_memory(dtype: DType) -> DType:
    """The dtype of a buffer's Tensor: fp8 is uint8 there. Where tinygrad emulates fp8 it rounds subnormals to
    0 in each kernel that takes them, those that copy and bitcast too."""
    return dtypes.uint8 if dtype in (dtypes.fp8e4m3, dtypes.fp8e5m2) else dtype


def _floats(data: Tensor, dtype: DType) -> Tensor:
    """float32 of numbers of a dtype, of fp8 through float16: E5M2 is its upper byte, and with E4M3's bits in
    place of its own a float16 is 2^-8 of the number."""
    if data.dtype != dtypes.uint8 or dtype not in (dtypes.fp8e4m3, dtypes.fp8e5m2): return data.float()
    bits = data.cast(dtypes.uint16)
    if dtype == dtypes.fp8e5m2: return (bits * 256).bitcast(dtypes.float16).float()
    made = ((bits & 128) * 256 + (bits & 127) * 128).bitcast(dtypes.float16).float() * 256
    return (bits & 127).eq(127).where(float("nan"), made)


def _spread(blocks: Tensor, scale: Scale, n: int, k: int) -> Tensor:
    """A number of each element, [N, K], from one of each block."""
    (across, down) = (int(extent) for extent in blocks.shape)
    rows, columns = scale.rows or n, scale.columns or k
    made = blocks.reshape(across, 1, down, 1).expand(across, rows, down, columns)
    return made.reshape(across * rows, down * columns)[:n, :k]
