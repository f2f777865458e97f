"""Tensors of a kernel, and what is loaded from them and stored to them.

Protocol. An index has one entry for each axis of the tensor:

    an integer or a scalar      one element of the axis, which the tile does not have
    a `Block`                   so many elements from `start` on
    `:`                         the whole axis
    a tile of integers          those elements: a gather, or a scatter

Tiles of integers are broadcast together and blocks keep their axes, as NumPy mixes arrays and slices. What
lies outside of the tensor reads as `other` and is not stored, wherever an index points. Leading axes that an
index does not name take their place from the program (`tile.context().batch`).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.elements import where
from tinygrad_nv.tile.language.ir import TensorParameter, TileType
from tinygrad_nv.tile.language.names import instead
from tinygrad_nv.tile.language.rounding import narrow
from tinygrad_nv.tile.language.trace import COMPUTED, check_dtype, current, fail, no_attribute
from tinygrad_nv.tile.language.values import (
    Operand,
    Tile,
    broadcast,
    cast,
    describe,
    full,
    scalar,
)

LARGEST = (1 << 31) - 1   # elements that a gather can address
_WORDS = (dtypes.int32, dtypes.uint32)
ATOMICS = {"add": (dtypes.float32, *_WORDS), "max": _WORDS, "min": _WORDS, "and": _WORDS, "or": _WORDS,
           "xor": _WORDS, "exchange": (dtypes.float32, *_WORDS)}


class Block:
    """`size` elements of an axis from `start` on: an index of a tensor. As a number it is its size. `stop`:
    where the axis ends, of a block of a loop whose last one may reach beyond."""

    def __init__(self, start: Operand, size: int, stop: Operand | None = None) -> None:
        self.first, self.size, self.stop = start, int(size), stop

    @property
    def start(self) -> Tile:
        """The first element's index, a scalar."""
        return scalar(self.first, dtypes.int32)

    @property
    def indices(self) -> Tile:
        """The indices of all elements: (size), int32."""
        return self.start + arange(self.size)

    def __index__(self) -> int: return self.size
    def __int__(self) -> int: return self.size
    def __float__(self) -> float: return float(self.size)
    def __repr__(self) -> str: return f"Block(size={self.size})"
    def __add__(self, offset: Operand) -> Block: return Block(self.start + offset, self.size)
    def __sub__(self, offset: Operand) -> Block: return Block(self.start - offset, self.size)

    def _fail(self, *_: Any) -> NoReturn:
        fail(f"arithmetic with a block of {self.size}", "a block as an index, or moved by + and -",
             "write block.indices for its elements' indices, int(block) for how many they are")

    __mul__ = __rmul__ = __floordiv__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = _fail


@dataclass(frozen=True, eq=False)
class TensorRef:
    """A tensor as a kernel sees it: x.shape, x.dtype, x[rows, cols], x[rows, cols] = value."""
    parameter: TensorParameter

    @property
    def name(self) -> str: return self.parameter.name

    @property
    def shape(self) -> tuple[int, ...]: return self.parameter.shape

    @property
    def dtype(self) -> DType: return self.parameter.dtype

    @property
    def ndim(self) -> int: return len(self.shape)

    @property
    def first(self) -> tuple[Tile, ...]:
        """Indices ahead of those that a kernel writes."""
        return ()

    @property
    def limits(self) -> tuple[Operand, ...]:
        """Extents of all axes, as only the running kernel may know them."""
        return self.parameter.shape

    def __len__(self) -> int: return self.shape[0]

    def __iter__(self) -> NoReturn:
        fail(f"tensor {self} taken apart row by row", "a loop over indices: for i in tile.range(n)",
             f"load a row in it: {self.name}[i, :]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"): raise AttributeError(name)
        raise no_attribute(f"tensor {self}", ("shape", "dtype", "ndim"), instead(name, self.name), name)

    def __getitem__(self, index: Any) -> Tile: return load(self, *_entries(index))
    def __setitem__(self, index: Any, value: Operand) -> None: store(self, value, *_entries(index))

    def __repr__(self) -> str: return f"{self.name}[{', '.join(map(str, self.shape))}]"

    def __tile__(self) -> Tile:
        """A tensor of one element is a scalar; others have to be loaded."""
        if self.ndim and self.shape != (1,) * self.ndim:
            fail(f"tensor {self} in an operation on tiles", "a tile of it",
                 f"load a part first: tile.load({self.name}, rows, cols)")
        return load(self, *[0] * self.ndim)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "lt", "gt", "le", "ge",
              "neg"):
    def _operator(self: TensorRef, *others: Operand, _fn: str = f"__{_name}__") -> Any:
        return getattr(self.__tile__(), _fn)(*others)
    setattr(TensorRef, f"__{_name}__", _operator)


@dataclass(frozen=True, eq=False, repr=False)
class ChosenRef(TensorRef):
    """A tensor of a list (choices.py), of `length` elements."""
    handle: Tile
    length: Tile

    @property
    def shape(self) -> tuple[Any, ...]: return (self.length,)

    @property
    def first(self) -> tuple[Tile, ...]: return (self.handle,)

    @property
    def limits(self) -> tuple[Operand, ...]: return (1, self.length)

    def __repr__(self) -> str: return f"one of {', '.join(self.parameter.among[:3])}, …"


def _entries(index: Any) -> Sequence[Any]: return index if isinstance(index, tuple) else (index,)


def arange(start: int, stop: int | None = None) -> Tile:
    """start, start + 1, … below stop, int32; 0 to `start` - 1 for one argument."""
    first, last = (0, start) if stop is None else (start, stop)
    first, last = int(first), int(last)
    if last <= first: fail(f"tile.arange({first}, {last})", "a stop above the start")
    made, = current().emit("iota", (), [TileType(dtypes.int32, (last - first,))])
    return Tile(made) + first if first else Tile(made)


# **** indices ****

def _index(tensor: Any, index: Sequence[Any], rows: Any, cols: Any) -> list[Any]:
    """An entry for each axis."""
    if not isinstance(tensor, TensorRef):
        what = describe(tensor) if isinstance(tensor, Tile) else type(tensor).__name__
        fail(f"an access to {what}", "a tensor that the kernel was called with")
    each = [*tensor.first, *index, *[one for one in (rows, cols) if one is not None]]
    rank = len(tensor.parameter.shape)
    if dots := [i for i, one in enumerate(each) if one is ...]:
        if len(dots) > 1: fail("two `...` in one index", "one")
        each[dots[0]:dots[0] + 1] = [slice(None)] * (rank - len(each) + 1)
    if len(each) > rank:
        fail(f"an index of {len(each)} entries for {tensor} of {tensor.ndim} axes", "one entry for each axis")
    lead = rank - len(each)
    made = [*(_leading(tensor, lead) if lead else []),
            *(_entry(tensor, lead + i, one) for i, one in enumerate(each))]
    if (context := current().context) is not None: context.index(tensor, made)
    return made


def _leading(tensor: TensorRef, count: int) -> list[Tile]:
    context = current().context
    if context is None:
        fail(f"an index of {tensor.ndim - count} entries for {tensor} of {tensor.ndim} axes",
             "one entry for each axis", "leading axes are the program's own only in kernels without a grid=")
    made: list[Tile] = context.leading(tensor.shape[:count], tensor)
    return made


def _entry(tensor: TensorRef, axis: int, one: Any) -> Any:
    extent = tensor.parameter.shape[axis]
    if isinstance(one, Block): return one
    if isinstance(one, slice): return _slice(tensor, axis, one)
    if isinstance(one, float): fail(f"index {one} of {tensor}", "integers")
    if isinstance(one, int) and one < 0:
        fail(f"index {one} along axis {axis} of {tensor}", f"0 to {extent - 1}",
             f"write {extent + one} to count from the end" if extent + one >= 0 else "")
    made = scalar(one, dtypes.int32)
    if not dtypes.is_int(made.dtype):
        fail(f"an index of {describe(made)}", "integers", "cast it: tile.cast(i, int32)")
    return cast(made, dtypes.int32)


def _slice(tensor: TensorRef, axis: int, one: slice) -> Block:
    extent = tensor.parameter.shape[axis]
    if one.start is None and one.stop is None and one.step is None: return Block(0, extent)
    start, stop = 0 if one.start is None else one.start, extent if one.stop is None else one.stop
    constant = one.step is None and isinstance(start, int) and isinstance(stop, int)
    if not constant or not 0 <= start < stop:
        parts = ("" if each is None else describe(each) for each in (one.start, one.stop, one.step))
        fail(f"slice {':'.join(parts).removesuffix(':')} of axis {axis} of {tensor}",
             "`:`, or constants with 0 <= start < stop, without a step",
             "use tile.block(start, size) for a computed start, start + step * tile.arange(n) for a step")
    return Block(start, stop - start)


@dataclass(frozen=True)
class _Place:
    """Place of a gather or scatter: element offsets, and whether each lies inside."""
    offsets: Tile
    inside: Tile


def _place(tensor: TensorRef, entries: Sequence[Any]) -> _Place:
    if (count := max(_numel(tensor), tensor.parameter.span)) > LARGEST:
        fail(f"a gather from {tensor} of {count} elements", f"at most {LARGEST}", "index it with blocks")
    tiles = [i for i, one in enumerate(entries) if isinstance(one, Tile) and one.ndim]
    rank = max((entries[i].ndim for i in tiles), default=0)
    first = tiles[0] if tiles else len(entries)
    before = sum(isinstance(one, Block) for one in entries[:first])
    blocks, made = sum(isinstance(one, Block) for one in entries), list[Tile]()
    seen = 0
    for one in entries:
        if isinstance(one, Block):
            axis = seen if seen < before else seen + rank
            made.append(one.indices.reshape(*[one.size if i == axis else 1 for i in range(blocks + rank)]))
            seen += 1
        elif one.ndim: made.append(one.reshape(*one.shape, *[1] * (blocks - before)))
        else: made.append(one)
    offset, inside = None, None
    for each, extent, stride in zip(made, tensor.limits, tensor.parameter.strides, strict=True):
        term = each if stride == 1 else each * stride     # whose elements are known to follow each other
        within = (each >= 0) & (each < extent)
        offset = term if offset is None else offset + term
        inside = within if inside is None else inside & within
    if offset is None or inside is None: return _Place(full((), 0, dtypes.int32), full((), True, dtypes.bool))
    return _Place(*broadcast(offset, inside))


def _numel(tensor: TensorRef) -> int:
    count = 1
    for extent in tensor.parameter.shape: count *= extent
    return count


def _is_gather(entries: Sequence[Any]) -> bool: return any(isinstance(one, Tile)
                                                           and one.ndim for one in entries)


def _block(tensor: TensorRef, entries: Sequence[Any]) -> tuple[list[Any], dict[str, Any], tuple[int, ...]]:
    starts = [(one.start if isinstance(one, Block) else one).value for one in entries]
    sizes = tuple(one.size if isinstance(one, Block) else 0 for one in entries)
    if any(isinstance(one, Block) and one.size < 1 for one in entries): fail("a block of no elements",
                                                                             "1 and more")
    return starts, {"tensor": tensor.name, "sizes": sizes}, tuple(filter(None, sizes))


# **** loads and stores ****

def load(tensor: TensorRef, *index: Any, rows: Any = None, cols: Any = None, mask: Operand | None = None,
         other: float = 0, vector: int | None = None, prefetch: int | None = None) -> Tile:
    """A tile of a tensor. `rows` and `cols` are the last two entries of the index. Where `mask` does not
    hold, and outside of the tensor, elements are `other`. `vector` and `prefetch` are accepted for a reader:
    the schedule says how a tile is loaded."""
    entries = _index(tensor, index, rows, cols)
    _check_number("other", other)
    if not _is_gather(entries):
        starts, attributes, shape = _block(tensor, entries)
        made = Tile(current().emit("load_block", starts, [TileType(_compute_dtype(tensor), shape)],
                                   {**attributes, "other": _plain(other, tensor.dtype)})[0])
        if mask is None: return made
        return where(mask, made, other)
    place = _place(tensor, entries)
    inside = place.inside if mask is None else place.inside & _condition(mask)
    offsets, inside = broadcast(place.offsets, inside)
    return Tile(current().emit("load", [offsets.value, inside.value, scalar(other, tensor.dtype).value],
                               [TileType(_compute_dtype(tensor), offsets.shape)], {"tensor": tensor.name})[0])


def store(tensor: TensorRef, value: Operand, *index: Any, rows: Any = None, cols: Any = None,
          mask: Operand | None = None) -> None:
    """Writes a tile, converted to the tensor's dtype, where `mask` holds and inside of the tensor. The tile
    is broadcast to the index's shape."""
    entries = _index(tensor, index, rows, cols)
    _writable(tensor)
    made = _narrow(tensor, scalar(value, tensor.dtype), entries)
    if not _is_gather(entries) and mask is None:
        starts, attributes, shape = _block(tensor, entries)
        current().emit("store_block", [*starts, _fit_shape(made, shape).value], (), attributes)
        return
    offsets, inside = _mask_offsets(tensor, entries, mask)
    current().emit("store", [offsets.value, _fit_shape(made, offsets.shape).value, inside.value], (),
                   {"tensor": tensor.name})


def _narrow(tensor: TensorRef, value: Tile, entries: Sequence[Any]) -> Tile:
    """In the tensor's dtype, as its policies round."""
    own = tensor.parameter
    if not own.saturate and own.stochastic is None: return cast(value, tensor.dtype)
    offsets = _place(tensor, entries).offsets if own.stochastic is not None else scalar(0, dtypes.int32)
    return narrow(value, own, offsets)


def atomic(fn: str, tensor: TensorRef, value: Operand, *index: Any, mask: Operand | None = None) -> Tile:
    """The elements before, each changed by fn in one step that no other program can come between."""
    entries = _index(tensor, index, None, None)
    _writable(tensor)
    if tensor.dtype not in ATOMICS[fn]:
        fail(f"atomic {fn} on {tensor} of {short(tensor.dtype)}",
             f"one of {', '.join(map(short, ATOMICS[fn]))}")
    offsets, inside = _mask_offsets(tensor, entries, mask)
    made = _fit_shape(cast(scalar(value, tensor.dtype), tensor.dtype), offsets.shape)
    return Tile(current().emit("atomic", [offsets.value, made.value, inside.value],
                               [TileType(tensor.dtype, offsets.shape)], {"tensor": tensor.name, "fn": fn})[0])


def atomic_add(tensor: TensorRef, value: Operand, *index: Any, mask: Operand | None = None) -> Tile:
    """Adds to elements of float32, int32 or uint32; the elements before. Sums of floats depend on the
    order."""
    return atomic("add", tensor, value, *index, mask=mask)


def atomic_max(tensor: TensorRef, value: Operand, *index: Any, mask: Operand | None = None) -> Tile:
    """Keeps the larger integer; the elements before."""
    return atomic("max", tensor, value, *index, mask=mask)


def atomic_min(tensor: TensorRef, value: Operand, *index: Any, mask: Operand | None = None) -> Tile:
    """Keeps the smaller integer; the elements before."""
    return atomic("min", tensor, value, *index, mask=mask)


def _mask_offsets(tensor: TensorRef, entries: Sequence[Any], mask: Operand | None) -> tuple[Tile, Tile]:
    place = _place(tensor, entries)
    inside = place.inside if mask is None else place.inside & _condition(mask)
    offsets, inside = broadcast(place.offsets, inside)
    return offsets, inside


def _condition(mask: Operand) -> Tile:
    made = scalar(mask, dtypes.bool)
    if made.dtype != dtypes.bool: fail(f"a mask of {describe(made)}", "bool", "compare it: x != 0")
    return made


def _fit_shape(value: Tile, shape: tuple[int, ...]) -> Tile:
    if value.shape == shape: return value
    padded = (1,) * (len(shape) - value.ndim) + value.shape
    if len(padded) != len(shape) or any(a not in (1, b) for a, b in zip(padded, shape, strict=True)):
        fail(f"a tile {describe(value)} stored to {shape}",
             "the shape of the index, or one that broadcasts to it")
    return value.broadcast_to(*shape)


def _compute_dtype(tensor: TensorRef) -> DType:
    if tensor.dtype not in COMPUTED:
        fail(f"{tensor} of {tensor.dtype.name}", "a tensor of " + ", ".join(map(short, COMPUTED)),
             f"cast it before the call: {tensor.name}.cast(…)")
    return check_dtype(tensor.dtype)


def _writable(tensor: TensorRef) -> None:
    if not tensor.parameter.output:
        fail(f"a store to {tensor}, which is an input", "an output of the kernel",
             f"annotate it so: {tensor.name}: OTile[...], or return the tile")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, Tile) or not isinstance(value, (int, float, bool)):
        fail(f"{name}={value!r}", "a number known when the kernel is built", "use tile.where(mask, x, other)")


def _plain(value: Any, dtype: DType) -> Any: return float(value) if dtypes.is_float(dtype) else int(value)


def atomic_exchange(tensor: TensorRef, value: Operand, *index: Any, mask: Operand | None = None) -> Tile:
    """Puts elements there; the elements before."""
    return atomic("exchange", tensor, value, *index, mask=mask)
