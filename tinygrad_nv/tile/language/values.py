"""Tiles as a user's function sees them: values of the Tile IR with Python's operators.

Protocol: a `Tile` has `.shape` and `.dtype`; of shape () it is a scalar. Operands of an operation are
broadcast as NumPy does; of two dtypes the result has the one that tinygrad promotes both to, and a Python
number takes that of the tile beside it (a float beside integers: float32). Comparisons give bool. `//` and
`%` of integers are Python's, towards minus infinity. A tile has no truth: a branch needs `if` over a scalar,
which language/source.py turns into one, or `tile.where`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn, Union

from tinygrad.dtype import DType, dtypes, least_upper_dtype

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.bounds import at_least
from tinygrad_nv.tile.language.ir import TileType, Value
from tinygrad_nv.tile.language.names import instead
from tinygrad_nv.tile.language.trace import (
    COMPUTED,
    check_dtype,
    check_shape,
    current,
    fail,
    fitting,
    no_attribute,
)
from tinygrad_nv.tile.operations import LANGUAGE_OPERATIONS

Operand = Union["Tile", int, float, bool]

ATTRIBUTES = ("shape", "dtype", "ndim", "T", "reshape", "broadcast_to", "transpose", "to")


class Tile:
    """A value of the program that is being written."""
    __array_ufunc__ = None       # NumPy leaves operators to us
    __hash__ = object.__hash__

    def __init__(self, value: Value) -> None: self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each axis."""
        return self.value.shape

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    def __repr__(self) -> str: return f"Tile({describe(self)})"

    # **** arithmetic ****

    def __add__(self, other: Operand) -> Tile: return binary("add", self, other)
    def __radd__(self, other: Operand) -> Tile: return binary("add", other, self)
    def __sub__(self, other: Operand) -> Tile: return binary("sub", self, other)
    def __rsub__(self, other: Operand) -> Tile: return binary("sub", other, self)
    def __mul__(self, other: Operand) -> Tile: return binary("mul", self, other)
    def __rmul__(self, other: Operand) -> Tile: return binary("mul", other, self)
    def __truediv__(self, other: Operand) -> Tile: return divide(self, other)
    def __rtruediv__(self, other: Operand) -> Tile: return divide(other, self)
    def __floordiv__(self, other: Operand) -> Tile: return floor_divide(self, other)
    def __rfloordiv__(self, other: Operand) -> Tile: return floor_divide(other, self)
    def __mod__(self, other: Operand) -> Tile: return modulo(self, other)
    def __rmod__(self, other: Operand) -> Tile: return modulo(other, self)
    def __lshift__(self, other: Operand) -> Tile: return binary("shift_left", self, other)
    def __rlshift__(self, other: Operand) -> Tile: return binary("shift_left", other, self)
    def __rshift__(self, other: Operand) -> Tile: return binary("shift_right", self, other)
    def __rrshift__(self, other: Operand) -> Tile: return binary("shift_right", other, self)
    def __and__(self, other: Operand) -> Tile: return binary("and", self, other)
    def __rand__(self, other: Operand) -> Tile: return binary("and", other, self)
    def __or__(self, other: Operand) -> Tile: return binary("or", self, other)
    def __ror__(self, other: Operand) -> Tile: return binary("or", other, self)
    def __xor__(self, other: Operand) -> Tile: return binary("xor", self, other)
    def __rxor__(self, other: Operand) -> Tile: return binary("xor", other, self)
    def __divmod__(self, other: Operand) -> tuple[Tile, Tile]: return self // other, self % other
    def __pos__(self) -> Tile: return self
    def __abs__(self) -> Tile: return unary("abs", self, floats=False)
    def __round__(self) -> Tile: return unary("round", self)

    def __neg__(self) -> Tile:
        return binary("sub", 0, self) if not dtypes.is_float(self.dtype) else binary("mul", self, -1.0)

    def __invert__(self) -> Tile:
        bits = (1 << self.dtype.itemsize * 8) - 1 if dtypes.is_unsigned(self.dtype) else -1
        return binary("xor", self, True if self.dtype == dtypes.bool else bits)

    def __rpow__(self, base: Operand) -> Tile:
        if not isinstance(base, (int, float)) or not base > 0:
            fail(f"{describe(base)} to the power of a tile", "a positive number",
                 "use tile.exp2(tile.log2(x) * y)")
        return unary("exp2", self * math.log2(base))

    def __pow__(self, exponent: int) -> Tile:
        if type(exponent) is not int or not 0 <= exponent <= 64:
            fail(f"a tile to the power of {exponent!r}", "an integer from 0 to 64",
                 "use tile.exp2(tile.log2(x) * y) for other exponents")
        made, power = None, self
        while exponent:
            if exponent & 1: made = power if made is None else made * power
            exponent >>= 1
            if exponent: power = power * power
        return full(self.shape, 1, self.dtype) if made is None else made

    # **** comparisons ****

    def __lt__(self, other: Operand) -> Tile: return binary("less", self, other)
    def __gt__(self, other: Operand) -> Tile: return binary("less", other, self)
    def __ne__(self, other: object) -> Tile: return binary("not_equal", self, other)  # type: ignore[override, arg-type]
    def __eq__(self, other: object) -> Tile: return ~(self != other)  # type: ignore[override]
    def __le__(self, other: Operand) -> Tile: return _at_most(self, other)
    def __ge__(self, other: Operand) -> Tile: return _at_most(other, self)

    # **** what a tile is not ****

    def __bool__(self) -> bool:
        known = current().constant_of(self.value)
        if known is not None: return bool(known)
        what = "a tile" if self.shape else "a scalar that is known when the kernel runs"
        fail(f"{what} ({describe(self)}) where Python needs True or False",
             "`if` or `while` over a scalar, as a statement; `&`, `|`, `~` between conditions",
             "write tile.where(condition, x, y) to choose, tile.maximum and tile.minimum for max and min")

    def __index__(self) -> int: return self._number("an integer")
    def __int__(self) -> int: return self._number("an integer")
    def __float__(self) -> float: return float(self._number("a number"))

    def _number(self, what: str) -> int:
        known = current().constant_of(self.value)
        if known is None:
            fail(f"{describe(self)}, known only when the kernel runs, where Python needs {what}",
                 "a constant: a number, a keyword argument of the kernel, or a size of a tile",
                 "sizes and axes are fixed when a kernel is built; of values write tile.exp, tile.sqrt, …")
        return int(known) if float(known).is_integer() else known

    def __iter__(self) -> NoReturn:
        fail(f"a tile ({describe(self)}) taken apart element by element", "operations on the whole tile",
             "use tile.sum, tile.reduce, tile.scan or tile.gather")

    def __str__(self) -> str:
        fail(f"the value of {describe(self)} as text, before the kernel runs",
             "what is known: x.shape, x.dtype, repr(x)",
             "look at results, or at those of kernel.interpret(…)")

    def __format__(self, spec: str) -> str: return str(self)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        fail(f"an assignment to elements of a tile ({describe(self)})", "tiles that stay as they are",
             "write x = tile.where(condition, value, x)")

    def __delitem__(self, index: Any) -> NoReturn: self.__setitem__(index, None)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        fail(f"a tile ({describe(self)}) given to NumPy", "functions of `tile`",
             "write tile.exp, tile.sum, …")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"): raise AttributeError(name)
        raise no_attribute(f"a tile ({describe(self)})", ATTRIBUTES, instead(name, "x"), name)

    def __len__(self) -> int:
        if not self.shape: fail("the length of a scalar", "a tile of one or more axes")
        return self.shape[0]

    # **** movement ****

    def __getitem__(self, index: Any) -> Tile:
        """New axes and whole ones: x[:, None], x[None], x[..., None]."""
        each = list(index if isinstance(index, tuple) else (index,))
        dots = [i for i, one in enumerate(each) if one is ...]
        if len(dots) > 1: fail("two `...` in one index", "one")
        named = sum(one is not None and one is not ... for one in each)
        if not dots: each.append(...)
        at = dots[0] if dots else len(each) - 1
        each[at:at + 1] = [slice(None)] * (self.ndim - named)
        shape, axis = list[int](), 0
        for one in each:
            if one is None: shape.append(1)
            elif isinstance(one, slice) and one.start is one.stop is one.step is None and axis < self.ndim:
                shape.append(self.shape[axis])
                axis += 1
            else: self._no_index(one)
        return self.reshape(*shape)

    def _no_index(self, one: Any) -> NoReturn:
        fail(f"index {one!r} of a tile ({describe(self)})", "`:`, `...` and None, which make new axes",
             "load the part that is needed, or use tile.gather(x, index, axis)")

    def reshape(self, *shape: int | tuple[int, ...]) -> Tile:
        """The same elements in row-major order."""
        sizes = _sizes(shape)
        if math.prod(sizes) != math.prod(self.shape):
            fail(f"{describe(self)} reshaped to {sizes}", f"a shape of {math.prod(self.shape)} elements")
        return _emit_move("reshape", self, sizes)

    def broadcast_to(self, *shape: int | tuple[int, ...]) -> Tile:
        """Repeated along axes of extent 1 and along new leading ones."""
        sizes = _sizes(shape)
        padded = (1,) * (len(sizes) - self.ndim) + self.shape
        if len(padded) != len(sizes) or any(a not in (1, b) for a, b in zip(padded, sizes, strict=False)):
            fail(f"{describe(self)} broadcast to {sizes}", "the same extents, or 1 where they differ")
        return _emit_move("broadcast", self, sizes)

    def transpose(self, *axes: int) -> Tile:
        """Axes in another order; without arguments the last two change places."""
        if not axes and self.ndim < 2:
            fail(f"the transpose of {describe(self)}", "a tile of two axes or more")
        order = list(axes) if axes else [*range(self.ndim - 2), self.ndim - 1, self.ndim - 2]
        order = [axis + self.ndim if axis < 0 else axis for axis in order]
        if sorted(order) != list(range(self.ndim)):
            fail(f"axes {axes} of {describe(self)}", f"each of 0 to {self.ndim - 1} once")
        if order == list(range(self.ndim)): return self
        shape = tuple(self.shape[axis] for axis in order)
        return Tile(current().emit("transpose", [self.value], [TileType(self.dtype, shape)],
                                   {"permutation": tuple(order)})[0])

    @property
    def T(self) -> Tile:
        """The last two axes in the other order."""
        return self.transpose()

    def to(self, dtype: DType) -> Tile:
        """Converted: see tile.cast."""
        return cast(self, dtype)


def describe(x: Any) -> str:
    """A tile or a number for an error: "64x128 bf16"."""
    return str(x.value.type) if isinstance(x, Tile) else repr(x)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    return check_shape(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape)


def _emit_move(name: str, x: Tile, shape: tuple[int, ...]) -> Tile:
    if shape == x.shape: return x
    return Tile(current().emit(name, [x.value], [TileType(x.dtype, shape)])[0])


# **** operands ****

def scalar(x: Any, dtype: DType) -> Tile:
    """A number, or a scalar as it is."""
    if isinstance(x, Tile): return x
    if hasattr(x, "__tile__"): return x.__tile__()
    made = number(x)
    if not isinstance(made, (int, float, bool)):
        fail(f"{x!r} ({type(x).__name__}) in an operation on tiles", "a tile or a number",
             "give numbers to the kernel as keyword arguments")
    return Tile(current().constant(fitting(made, dtype), dtype))


def number(x: Any) -> Any:
    """A number of NumPy's, or a block's size, as Python's; other objects as they are."""
    if isinstance(x, (int, float, bool, Tile)): return x
    if hasattr(x, "shape") and hasattr(x, "dtype") and not hasattr(x, "__tile__"):
        if x.shape == () and type(x).__module__ == "numpy": return x.item()
        fail(f"a {type(x).__name__} of shape {tuple(x.shape)} in an operation on tiles", "a tile or a number",
             "call the kernel with it, as a Tensor")
    return x.__index__() if hasattr(x, "__index__") else x


def full(shape: Any, value: Operand, dtype: DType) -> Tile:
    """A tile of one value."""
    check_dtype(dtype)
    made = cast(scalar(value, dtype), dtype)
    return made if shape == () else made.broadcast_to(*check_shape(shape))


def together(*operands: Operand) -> list[Tile]:
    """Operands with one dtype and one shape."""
    operands = tuple(map(number, operands))
    tiles = [each for each in operands if isinstance(each, Tile)]
    dtype = promote(operands)
    made = [cast(each, dtype) if isinstance(each, Tile) else scalar(each, dtype) for each in operands]
    return broadcast(*made) if tiles else made


def promote(operands: Sequence[Operand]) -> DType:
    """The dtype that operands meet in."""
    tiles = [each.dtype for each in operands if isinstance(each, Tile)]
    numbers = [each for each in operands if not isinstance(each, Tile)]
    if not tiles: return dtypes.float32 if any(isinstance(each, float) for each in numbers) else dtypes.int32
    dtype = least_upper_dtype(*tiles) if len(set(tiles)) > 1 else tiles[0]
    if dtypes.is_float(dtype): return dtype
    if any(isinstance(each, float) for each in numbers): return dtypes.float32
    wide = dtype == dtypes.bool and any(type(each) is int for each in numbers)
    if dtype not in COMPUTED:
        fail(f"{' and '.join(map(short, tiles))} in one operation", "dtypes that promote to at most 32 bits",
             "cast one of them: tile.cast(x, int32)")
    return dtypes.int32 if wide else dtype


def broadcast(*tiles: Tile) -> list[Tile]:
    """Tiles of one shape, as NumPy broadcasts them."""
    ndim = max(each.ndim for each in tiles)
    padded = [(1,) * (ndim - each.ndim) + each.shape for each in tiles]
    shape = tuple(max(extents) for extents in zip(*padded, strict=True))
    for each, extents in zip(tiles, padded, strict=True):
        if any(extent not in (1, whole) for extent, whole in zip(extents, shape, strict=True)):
            fail(f"tiles of shapes {' and '.join(str(one.shape) for one in tiles)} in one operation",
                 "the same extents, or 1 where they differ",
                 f"give {each.shape} the axes that it lacks: x[:, None] or x[None, :]")
    return [each.broadcast_to(*shape) if each.shape != shape else each for each in tiles]


def apply(fn: str, *tiles: Tile) -> Tile:
    """An element operation of tiles of one shape, and of the dtype that it takes."""
    row, source = LANGUAGE_OPERATIONS[fn], tiles[-1].dtype
    if not (row.ptx(source) or row.c(source)) and fn != "where":
        cast_to = "int32" if dtypes.is_float(source) else "f32"
        fail(f"{fn} of {short(source)}", "a dtype that has it", f"cast the operand: tile.cast(x, {cast_to})")
    to = dtypes.bool if row.compares else source
    return Tile(current().emit("apply", [each.value for each in tiles], [TileType(to, tiles[-1].shape)],
                               {"fn": fn})[0])


def binary(fn: str, left: Operand, right: Operand) -> Tile:
    """An operation of two operands that meet."""
    return apply(fn, *together(left, right))


def _at_most(left: Operand, right: Operand) -> Tile:
    a, b = together(left, right)
    if not dtypes.is_float(a.dtype): return ~(b < a)
    return (a < b) | ~apply("not_equal", a, b)  # NaN is at most nothing


def unary(fn: str, x: Operand, floats: bool = True) -> Tile:
    """An operation of one operand; of integers and numbers in float32, where it is one of floats."""
    made = scalar(x, dtypes.float32)
    if floats and not dtypes.is_float(made.dtype): made = cast(made, dtypes.float32)
    return apply(fn, made)


def divide(left: Operand, right: Operand) -> Tile:
    """A quotient of floats; of integers in float32."""
    a, b = together(left, right)
    if not dtypes.is_float(a.dtype): a, b = cast(a, dtypes.float32), cast(b, dtypes.float32)
    return apply("div", a, b)


def floor_divide(left: Operand, right: Operand) -> Tile:
    """Divides like Python's //; of integers by 0 it is 0."""
    a, b = together(left, right)
    if dtypes.is_float(a.dtype): return apply("floor", apply("div", a, b))
    quotient = apply("quotient", a, b)
    if dtypes.is_unsigned(a.dtype) or _never_negative(a, b): return quotient
    rest = a - quotient * b
    below = (rest != 0) & ((rest < 0) != (b < 0))
    return quotient - cast(below if _is_positive(b) else below & (b != 0), a.dtype)


def modulo(left: Operand, right: Operand) -> Tile:
    """Computes the rest like Python's %; of integers by 0 it is 0."""
    a, b = together(left, right)
    if dtypes.is_float(a.dtype): return a - floor_divide(a, b) * b
    if dtypes.is_unsigned(a.dtype) or _never_negative(a, b): return apply("remainder", a, b)
    rest = a - floor_divide(a, b) * b
    return rest if _is_positive(b) else apply("where", b != 0, rest, rest - rest)


def _is_positive(tile: Tile) -> bool: return at_least(tile.value, current()) > 0


def _never_negative(*tiles: Tile) -> bool:
    return all(at_least(each.value, current()) >= 0 for each in tiles)


def cast(x: Operand, dtype: Any) -> Tile:
    """Converted to a dtype: floats to nearest even, to integers towards zero; integers wrap."""
    plain = check_dtype(dtype)
    made = Tile(current().constant(x, plain)) if type(x) is int else scalar(x, plain)
    if made.dtype == plain: return made
    known = current().constant_of(made.value)
    if known is not None and known == known and _plainly(known, made.dtype, plain):
        return Tile(current().constant(known, plain))
    return Tile(current().emit("cast", [made.value], [TileType(plain, made.shape)])[0])


def _plainly(known: float, source: DType, to: DType) -> bool:
    """Whether a number is converted without being rounded to fewer bits, or held within a range."""
    if dtypes.is_float(to): return to == dtypes.float32
    return abs(known) < 2**31 and (known >= 0 or to != dtypes.uint32 or not dtypes.is_float(source))


