"""Annotations with dimensions: `Tensor["B", "S", "D", bf16]`, `KTile["M", "N", f32]`.

Protocol. In the brackets stand dimensions (texts that dims.py reads, whole numbers, and first of all `...` or
"..." for any number of leading dimensions that are not named), then a dtype or nothing. A dtype is
tinygrad's, or an object whose `dtype` is one, as `bf16 @ accum(f32)` is. What the brackets give is a
`TensorType`, or of tiles a `TileType`: frozen, equal where dimensions and dtype are, printed as it was
written.

    Tensor   a Tensor of tinygrad's (`register` gives that class its brackets, and `unregister` takes them)
    Tile     elements in registers, of a function over tiles
    KTile    what a tile kernel reads from memory
    QTile    the same, quantised
    OTile    what a tile kernel writes

For mypy, `plugins = ["tinygrad_nv.shapes.mypy_plugin"]` in its configuration. `Annotated[Tensor, Dims["B",
"S"]]` says the same to type checkers without a plugin.
"""
from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tinygrad.dtype import DType

from tinygrad_nv import hooks
from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.dims import WRITTEN, Dim, parse
from tinygrad_nv.tile.expression import short

LEADING = "..."


@dataclass(frozen=True)
class TensorType:
    """Tensors of a shape. `dims` are the dimensions that are named, behind any others if `leading`; `dtype`
    is what was given, or None; `written` are the words in the brackets before it."""
    kind: str
    dims: tuple[Dim, ...]
    dtype: Any = None
    leading: bool = False
    written: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def element(self) -> DType | None:
        """tinygrad's dtype, without policies."""
        return dtype_of(self.dtype)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names in its dimensions."""
        return tuple(dict.fromkeys(name for dim in self.dims for name in dim.symbols))

    def text(self, index: int) -> str:
        """Dimension `index` as written."""
        words = self.written[self.leading:]
        return words[index] if words else str(self.dims[index])

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        """The shape, without leading dimensions; None where a symbol is not known."""
        made = [dim.value(sizes) for dim in self.dims]
        return None if None in made else tuple(each for each in made if each is not None)

    def __or__(self, other: Any) -> Any: return typing.Union[self, other]  # noqa: UP007  (it is made here)

    def __ror__(self, other: Any) -> Any: return typing.Union[other, self]  # noqa: UP007

    def __str__(self) -> str:
        words = self.written or (*([LEADING] if self.leading else []), *map(str, self.dims))
        shown = [word if word == LEADING or word.isdigit() else f'"{word}"' for word in words]
        if self.dtype is not None: shown.append(dtype_text(self.dtype))
        return f"{self.kind}[{', '.join(shown)}]"

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class TileType(TensorType):
    """Tiles of a shape: in registers, or what a tile kernel reads or writes."""


def dtype_of(given: Any) -> DType | None:
    """The dtype that a DType is, or that an object with policies has."""
    own = given if isinstance(given, DType) else getattr(given, "dtype", None)
    return own if isinstance(own, DType) else None


def dtype_text(given: Any) -> str:
    """A dtype by its short name, with its policies as they print themselves."""
    return short(given) if isinstance(given, DType) else str(given)


def parse_type(kind: str, words: Any) -> TensorType:
    """Returns the type that is written in the brackets behind `kind`. Raises `ShapeError`."""
    given = list(words) if isinstance(words, tuple) else [words]
    dtype = None
    if given and not _is_dim(given[-1]) and dtype_of(dtype := given.pop()) is None:
        raise ShapeError(f"{kind}[…] with {dtype!r}", f"dimensions, then a dtype; a dimension is {WRITTEN}")
    for place, each in enumerate(given):
        if not _is_dim(each):
            raise ShapeError(f"{kind}[…] with {each!r} before other dimensions", "a dtype behind all of them")
        if place and each in (..., LEADING):
            raise ShapeError(f'{kind}[…] with "..." behind other dimensions', '"..." first')
        if isinstance(each, int) and each < 0:
            raise ShapeError(f"{kind}[…] with the dimension {each}", "a whole number, at least 0")
    leading = bool(given) and given[0] in (..., LEADING)
    written = tuple(LEADING if each is ... else str(each).strip() for each in given)
    dims = tuple(Dim.number(each) if isinstance(each, int) else parse(each) for each in given[leading:])
    cls = TensorType if kind == "Tensor" else TileType
    return cls(kind, dims, dtype, leading, written)


def _is_dim(given: Any) -> bool: return given is ... or type(given) in (str, int)


class Tile:
    """Elements in registers: `Tile["M", "N", f32]`."""
    def __class_getitem__(cls, words: Any) -> Any: return parse_type("Tile", words)


class KTile:
    """Tensor that a tile kernel reads: `KTile[\"B*H\", \"S\", \"D_h\", bf16]`."""
    def __class_getitem__(cls, words: Any) -> Any: return parse_type("KTile", words)


class QTile:
    """Tensor that a tile kernel reads and dequantises: `QTile[\"N\", \"K\", int8]`."""
    def __class_getitem__(cls, words: Any) -> Any: return parse_type("QTile", words)


class OTile:
    """Tensor that a tile kernel writes: `OTile[\"M\", \"N\", bf16]`."""
    def __class_getitem__(cls, words: Any) -> Any: return parse_type("OTile", words)


class Dims:
    """Dimensions for `Annotated[Tensor, Dims[\"B\", \"S\", \"D\", bf16]]`."""
    def __class_getitem__(cls, words: Any) -> Any: return parse_type("Tensor", words)


def _brackets(cls: type, words: Any) -> TensorType: return parse_type("Tensor", words)


def register() -> None:
    """Gives tinygrad's Tensor its brackets: also while tinygrad_nv is disabled, as annotations stay where
    they are."""
    hooks.add_attribute("__class_getitem__", classmethod(_brackets), always=True)


def unregister() -> None:
    """Takes them back."""
    hooks.remove_attribute("__class_getitem__")
