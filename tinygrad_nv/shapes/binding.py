"""Sizes of the names in annotations, found from real shapes, each with where it is from.

Protocol. `Bindings` is filled in the order of a function's parameters: `scalar(name, 4, "heads=4")` and
`tensor(place, type, shape, dtype)`. A name gets its size from the first that fixes it, and every later
dimension must agree. A dimension with two names that are not known ("B*H") waits: for a name that a later
argument fixes, then the other follows; until then it agrees with equal dimensions alone. `ShapeError` names
the argument and its dimension, both sizes, and where each is from.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.dims import Dim
from tinygrad_nv.shapes.types import TensorType, dtype_of, dtype_text


@dataclass(frozen=True)
class Place:
    """A dimension of a tensor: `what` is "argument x" or "the result"."""
    what: str
    type: TensorType
    index: int      # of type.dims
    shape: tuple[Any, ...]

    @property
    def axis(self) -> int:
        """In the shape."""
        return self.index + len(self.shape) - len(self.type.dims)

    def __str__(self) -> str:
        return f"{self.what}: dimension {self.axis} of {self.type}, of shape {self.shape}"


@dataclass
class Bindings:
    """Sizes by name, where they are from, and dimensions whose names are not known yet."""
    sizes: dict[str, int] = field(default_factory=dict)
    origins: dict[str, str | Place] = field(default_factory=dict)
    waiting: list[tuple[Dim, int, Place]] = field(default_factory=list)

    def copy(self) -> Bindings:
        """One that can be filled by itself."""
        return Bindings(dict(self.sizes), dict(self.origins), list(self.waiting))

    def scalar(self, name: str, size: int, origin: str) -> None:
        """A name whose size is an argument, or given beforehand. Raises `ShapeError`."""
        if self.sizes.setdefault(name, size) != size:
            raise ShapeError(f"{origin}, and {name} is {self.sizes[name]}",
                             f"{name}={self.sizes[name]}, from {self.origins[name]}")
        self.origins.setdefault(name, origin)
        self._resume()

    def tensor(self, what: str, type: TensorType, shape: Sequence[Any], dtype: Any = None) -> None:
        """A tensor's shape, and its dtype where the type has one. Raises `ShapeError`."""
        shape, n = tuple(shape), len(type.dims)
        if len(shape) != n and not (type.leading and len(shape) > n):
            raise ShapeError(f"{what} has {len(shape)} dimensions, {shape}",
                             f"{type}: {n}{' or more' if type.leading else ''}")
        wanted, own = type.element, dtype_of(dtype)
        if wanted is not None and own is not None and own != wanted:
            raise ShapeError(f"{what} is of {dtype_text(own)}", f"{dtype_text(wanted)}, as {type} says",
                             f"cast it: .cast({wanted})")
        for index, size in enumerate(shape[len(shape) - n:]):
            # a symbolic extent of tinygrad's has no number yet
            if isinstance(size, int): self._meet(type.dims[index], size, Place(what, type, index, shape))
        self._resume()

    def _meet(self, dim: Dim, size: int, place: Place) -> bool:
        """Whether a dimension is done: equal, or its last name found from it."""
        if (known := dim.value(self.sizes)) is not None:
            if known != size: raise self._differs(place, size, known)
            return True
        try: found = dim.solve(size, self.sizes)
        except ArithmeticError: raise self._impossible(place, size) from None
        except ZeroDivisionError: found = None
        if found is not None:
            self.sizes[found[0]], self.origins[found[0]] = found[1], place
            return True
        for other, known, origin in self.waiting:
            if other == dim and known != size: raise self._differs(place, size, known, str(origin))
        if all(other != dim for other, _, _ in self.waiting): self.waiting.append((dim, size, place))
        return False

    def _resume(self) -> None:
        """Tries what waits again, as long as names are found."""
        before = -1
        while self.waiting and before != len(self.sizes):
            before = len(self.sizes)
            waiting, self.waiting = self.waiting, []
            for dim, size, place in waiting: self._meet(dim, size, place)

    def _differs(self, place: Place, size: int, known: int, origin: str = "") -> ShapeError:
        dim = place.type.dims[place.index]
        text = place.type.text(place.index)
        if dim == Dim.symbol(text): expected = f"{text}={known}, from {self.origins.get(text) or origin}"
        elif dim.symbols: expected = f"{text}={known}{self._why(place, origin)}"
        else: expected = f"{known}"
        return ShapeError(f"{place.what}: dimension {place.axis} of {place.type} is {size}, not {known}; "
                          f"its shape is {place.shape}", expected)

    def _impossible(self, place: Place, size: int) -> ShapeError:
        dim, text = place.type.dims[place.index], place.type.text(place.index)
        unknown = next(name for name in dim.symbols if name not in self.sizes)
        return ShapeError(f"{place.what}: dimension {place.axis} of {place.type} is {size}; its shape is "
                          f"{place.shape}", f"a whole number {unknown} with {text} = {size}"
                          f"{self._why(place, '')}")

    def _why(self, place: Place, origin: str) -> str:
        """Returns where the sizes of a dimension's names are from."""
        names = [name for name in place.type.dims[place.index].symbols if name in self.origins]
        if not names: return f", from {origin}" if origin else ""
        return ": " + "; ".join(f"{name}={self.sizes[name]} from {self.origins[name]}" for name in names)
