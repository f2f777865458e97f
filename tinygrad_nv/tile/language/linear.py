"""Products of tiles.

Protocol: `dot(a, b, acc)` is acc + a @ b of tiles (m, k) and (k, n). Floats are summed in float32, bytes in
int32; a float32 operand is multiplied in float32, or in TF32 where `tf32` asks for it. The accumulator's
dtype is the result's.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.ir import TileType
from tinygrad_nv.tile.language.memory import TensorRef, load
from tinygrad_nv.tile.language.trace import current, fail
from tinygrad_nv.tile.language.values import Tile, cast, describe, full

INT8S = (dtypes.int8, dtypes.uint8)
FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2)


def dot(a: Any, b: Any, acc: Any = None, *, tf32: bool = False) -> Tile:
    """acc + a @ b: a (m, k), b (k, n), acc (m, n) of float32, or of int32 for int8 and uint8; zeros without
    one. Both operands have one dtype; int8 and uint8 may meet, and the two float8."""
    for name, one in (("first", a), ("second", b)):
        if not isinstance(one, Tile) or one.ndim != 2:
            fail(f"the {name} operand of tile.dot is {describe(one)}", "a tile of two axes",
                 "load it with blocks of rows and columns, or reshape it")
    if a.shape[1] != b.shape[0]:
        fail(f"tile.dot of {a.shape} and {b.shape}: {a.shape[1]} columns meet {b.shape[0]} rows",
             "as many columns of the first as rows of the second", "tile.transpose(b) turns one round")
    total, shape = _total(a.dtype, b.dtype), (a.shape[0], b.shape[1])
    made = full(shape, 0, total) if acc is None else acc
    if not isinstance(made, Tile) or made.shape != shape or made.dtype != total:
        fail(f"an accumulator {describe(made)}", f"{shape} of {short(total)}",
             f"tile.zeros({shape}, {short(total)})")
    return Tile(current().emit("dot", [a.value, b.value, made.value], [TileType(total, shape)],
                               {"tf32": bool(tf32)})[0])


setattr(Tile, "__matmul__", lambda a, b: dot(a, b))     # noqa: B010  a @ b; values.py is below this file


def _total(a: DType, b: DType) -> DType:
    if a in INT8S and b in INT8S: return dtypes.int32
    if a in FLOATS and b in FLOATS and (a == b or (a.itemsize == b.itemsize == 1)): return dtypes.float32
    fail(f"tile.dot of {short(a)} and {short(b)}", "two tiles of one dtype: a float, int8 or uint8",
         "cast one of them: tile.cast(x, bf16)")


@dataclass(frozen=True)
class QuantTile:
    """Codes (k, n) of int8 that stand for codes · scale; the scale is a number, () or (n) of float32."""
    codes: Tile
    scale: Any

    @property
    def T(self) -> QuantTile:
        """The codes turned round; the scale stays with its columns."""
        return QuantTile(self.codes.T, self.scale)


def load_qint8(tensor: TensorRef, *index: Any, scale: Any = 1.0) -> QuantTile:
    """A tile of int8 codes, and what they are to be multiplied by."""
    codes = load(tensor, *index)
    if codes.dtype != dtypes.int8: fail(f"tile.load_qint8 of {tensor} of {short(tensor.dtype)}", "int8")
    return QuantTile(codes, scale)


def dot_dequant_i8(x: Tile, q: Tile | QuantTile, scale: Any = None, acc: Any = None) -> Tile:
    """acc + x @ (q · scale): x (m, k) of floats, q (k, n) of int8 codes with a scale, or a `QuantTile`. The
    sum
    is of x and codes, in float32; the scale multiplies it."""
    codes = q.codes if isinstance(q, QuantTile) else q
    factor = q.scale if isinstance(q, QuantTile) and scale is None else 1.0 if scale is None else scale
    if not isinstance(codes, Tile) or codes.dtype != dtypes.int8:
        fail(f"tile.dot_dequant_i8 of {describe(codes)}", "a tile of int8, or tile.load_qint8(…)")
    if not isinstance(x, Tile) or not dtypes.is_float(x.dtype):
        fail(f"tile.dot_dequant_i8 of {describe(x)} and codes", "floats beside codes")
    made = dot(x, cast(codes, x.dtype))
    scaled = made * (factor[None, :] if isinstance(factor, Tile) and factor.ndim == 1 else factor)
    return scaled if acc is None else acc + scaled
