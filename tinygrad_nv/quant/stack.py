"""Quantised matrices of one type and shape in one piece, as mixtures of experts have them.

A stack of `count` matrices of N rows and K columns has their buffers (types.py), those of a matrix behind
those of the one before: the first extent is `count` times a matrix's. So in layouts of tiles each matrix
begins with a tile of its own. Scales may be of blocks of rows: those of a matrix begin with its first row,
and its last block may be cut off. `order` is int32 [count, K]: columns of each
matrix may lie in an order of their own.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.quant import layouts
from tinygrad_nv.quant.tensor import dequantize, in_memory, make_multipliers
from tinygrad_nv.quant.types import TILE, Layout, QType, stack_buffers

Shape = tuple[int, int, int]      # matrices, their rows and columns


@dataclass(frozen=True)
class QStack:
    """Matrices of `shape` [count, N, K] and their buffers. Raises `SpecError` where one is missing, or of
    another shape or dtype."""
    type: QType
    shape: Shape
    buffers: Mapping[str, Tensor] = field(hash=False)

    def __post_init__(self) -> None:
        wanted = stack_buffers(self.type, self.shape)
        if wanted.keys() != self.buffers.keys():
            raise SpecError(f"buffers {', '.join(self.buffers)} of {self.type}", ", ".join(wanted))
        for name, (shape, dtype) in wanted.items():
            found = self.buffers[name]
            if (tuple(found.shape), found.dtype) != (shape, in_memory(dtype)):
                raise SpecError(f"{name} of {self.type} is {found.dtype.name} {list(map(int, found.shape))}",
                                f"{in_memory(dtype).name} {list(shape)}")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(int(each.nbytes()) for each in self.buffers.values())

    def with_multipliers(self) -> QStack:
        """The matrices with outer scales that multiply scales, as `QTensor.make_multipliers`."""
        return QStack(self.type.with_multipliers(), self.shape, make_multipliers(self.type, self.buffers))

    def with_layout(self, layout: Layout) -> QStack:
        """The same matrices in a layout, of such in rows."""
        if self.type.layout == layout: return self
        type = replace(self.type, layout=layout)
        made = {name: one if name == "order" else _lay_out(type, name, one, self.shape)
                for name, one in self.buffers.items()}
        return QStack(type, self.shape, {name: one.contiguous().realize() for name, one in made.items()})

    def dequantize(self, dtype: DType = dtypes.float32) -> Tensor:
        """The matrices [count, N, K], with columns in the order of inputs."""
        return dequantize_stack(self.type, self.shape, self.buffers, dtype)


def _lay_out(type: QType, name: str, data: Tensor, shape: Shape) -> Tensor:
    count, n, k = shape
    kind = data.dtype
    if kind in (dtypes.bfloat16, dtypes.float16): data = data.bitcast(dtypes.uint16)    # no number changes
    if n % TILE:    # each matrix is padded to whole tiles
        rows = data.reshape(count, n, -1).pad(((0, 0), (0, -n % TILE), (0, 0)))
        data = rows.reshape(count * (n + -n % TILE), -1)
    return layouts.lay_out(type, name, data, k).bitcast(kind)


def _of_rows(type: QType, name: str, blocks: Tensor, count: int, n: int) -> Tensor:
    """Scales, points or minima of each row of a stack, of those of blocks."""
    scale = type.outer if name.startswith("outer") else type.scale
    assert scale is not None
    if scale.rows == 1: return blocks
    columns = int(blocks.shape[-1])
    each = blocks.reshape(count, -1, 1, columns).expand(count, -1, scale.rows or n, columns)
    return each.reshape(count, -1, columns)[:, :n].reshape(count * n, columns)


def dequantize_stack(type: QType, shape: Shape, given: Mapping[str, Tensor],
                      dtype: DType = dtypes.float32) -> Tensor:
    """Returns the elements of the stack that these buffers hold."""
    count, n, k = shape
    rows = n if type.layout == "rows" else n + -n % TILE
    plain = {name: one if name in ("codes", "high") else _of_rows(type, name, one, count, n)
             for name, one in given.items() if name != "order"}
    made = dequantize(replace(type.of_rows(), permuted=False), (count * rows, k), plain)
    made = made.reshape(count, rows, k)[:, :n]
    if not type.permuted: return made.cast(dtype)
    numbers = Tensor.arange(k, dtype=dtypes.int32).to(made.device).expand(count, k)
    inverse = Tensor.zeros(count, k, dtype=dtypes.int32, device=made.device).contiguous()
    inverse = inverse.scatter(1, given["order"], numbers).contiguous()
    matrix, row = (Tensor.arange(each, dtype=dtypes.int32).to(made.device) for each in (count, n))
    made = made.contiguous()[matrix.reshape(-1, 1, 1), row.reshape(1, -1, 1), inverse.unsqueeze(1)]
    return made.cast(dtype)
