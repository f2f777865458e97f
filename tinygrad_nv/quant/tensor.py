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
from tinygrad_nv.quant.layouts import fields, lay_out, unlaid
from tinygrad_nv.quant.types import Layout, QType, Scale, buffers

if TYPE_CHECKING:
    import numpy as np


def _store(x: Tensor) -> Tensor:
    """A Tensor in memory of its own. tinygrad leaves a permutation of extents of 1 as it is, which then is no
    buffer by itself: captured steps could not name it."""
    made = x.contiguous().realize()
    return made if made.uop.has_buffer_identity() else made.clone().realize()


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

    @property
    def finite(self) -> bool:
        """Whether no code is infinity or NaN, which 8-bit floats have."""
        least = {dtypes.fp8e4m3: 0x7F, dtypes.fp8e5m2: 0x7C}.get(self.type.element.dtype)
        return least is None or int((self.buffers["codes"] & 0x7F).max().item()) < least

    def in_order(self) -> QTensor:
        """The matrix with columns as they lie, in the order of `order`."""
        made = {name: one for name, one in self.buffers.items() if name != "order"}
        return QTensor(replace(self.type, permuted=False), self.shape, made)

    def with_multipliers(self) -> QTensor:
        """The matrix with outer scales that multiply scales, as kernels of fragments have them: in place of
        those that divide scales their reciprocals, and of those that come last the same. Elements differ by
        a unit of float32's last place at most, which is lost where they are rounded to 16 bits."""
        if not (self.type.divided or self.type.outer_last): return self
        return QTensor(self.type.with_multipliers(), self.shape, make_multipliers(self.type, self.buffers))

    def of_rows(self) -> QTensor:
        """The same matrix with scales of single rows, as layouts but "rows" ask: a block's are repeated for
        each of its rows."""
        if (type := self.type.of_rows()) == self.type: return self
        n = self.shape[0]
        made = dict(self.buffers)
        for name in made.keys() - {"codes", "high", "order"}:
            scale = self.type.outer if name.startswith("outer") else self.type.scale
            assert scale is not None
            repeated = made[name].unsqueeze(1).expand(-1, scale.rows or n, -1).flatten(0, 1)[:n]
            made[name] = repeated.contiguous().realize()
        return QTensor(type, self.shape, made)

    def with_layout(self, layout: Layout) -> QTensor:
        """The same matrix in a layout (types.py), of a matrix in rows. Kernels of fragments want it `finite`.
        Raises `SpecError` where there is none of its type."""
        if self.type.layout == layout: return self
        type = replace(self.type, layout=layout)
        given = {name: one if name == "order" else lay_out(type, name, one, self.shape[1])
                 for name, one in self.buffers.items()}
        return QTensor(type, self.shape, {name: _store(one) for name, one in given.items()})

    def dequantize(self, dtype: DType = dtypes.float32) -> Tensor:
        """The matrix [N, K], with columns in the order of inputs."""
        return dequantize(self.type, self.shape, self.buffers, dtype)


def dequantize(type: QType, shape: tuple[int, int], given: Mapping[str, Tensor],
                dtype: DType = dtypes.float32) -> Tensor:
    """Returns the elements of the matrix that these buffers hold."""
    n, k = shape
    if type.layout != "rows":
        given = {name: one if name == "order" else unlaid(type, name, one, n, k)
                 for name, one in given.items()}
        type = replace(type, layout="rows")
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


def make_multipliers(type: QType, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Buffers of `type.make_multipliers()`: reciprocals of scales that divide."""
    if type.outer is None or not type.divided: return dict(given)
    return {**given, "outer": (1 / numbers_of(given["outer"], type.outer.dtype)).contiguous().realize()}


def codes_of(type: QType, given: Mapping[str, Tensor]) -> Tensor:
    """The codes [N, K], of 8 bits in the element's dtype, else in uint8."""
    low = fields(given["codes"], type.low_bits)
    if "high" not in given: return low
    return low + fields(given["high"], type.bits - type.low_bits) * (1 << type.low_bits)


def _values(type: QType, given: Mapping[str, Tensor]) -> Tensor:
    codes = codes_of(type, given)
    if not type.element.values: return numbers_of(codes, type.element.dtype)
    # chosen, not looked up: a table would be a buffer of Python's, which the body of a named function has not
    made = codes.cast(dtypes.float32) * 0
    for code, value in enumerate(type.element.values): made = codes.eq(code).where(value, made)
    return made


def _factors(type: QType, given: Mapping[str, Tensor], name: str, outer: str, n: int, k: int) -> Tensor:
    made = _spread(_numbers(given[name], type.scale), type.scale, n, k)
    if type.outer is None: return made
    if type.outer_last: return made
    larger = _spread(_numbers(given[outer], type.outer), type.outer, n, k)
    return made / larger if type.divided else larger * made


def _numbers(codes: Tensor, scale: Scale) -> Tensor:
    """float32 of scales. E8M0 is made of its bits: 0 is 2^-127, which is subnormal, 255 NaN."""
    if not scale.e8m0: return numbers_of(codes, scale.dtype)
    bits = codes.cast(dtypes.uint32)
    exact = (bits == 0).where(1 << 22, (bits == 255).where(0x7FC00000, bits << 23))
    return exact.cast(dtypes.uint32).bitcast(dtypes.float32)


def in_memory(dtype: DType) -> DType:
    """The dtype of a buffer's Tensor: fp8 is uint8 there. Where tinygrad emulates fp8 it rounds subnormals to
    0 in each kernel that takes them, those that copy and bitcast too."""
    return dtypes.uint8 if dtype in (dtypes.fp8e4m3, dtypes.fp8e5m2) else dtype


def numbers_of(data: Tensor, dtype: DType) -> Tensor:
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
