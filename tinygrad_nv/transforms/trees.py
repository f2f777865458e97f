"""Trees of Tensors: values with Tensors in dicts, lists, tuples, named tuples and dataclasses.

Protocol. `flatten(value)` gives the Tensors in order, and a `Tree`, which is hashable where all else in the
value is; `tree.fill(leaves)` is a value of the same structure with other leaves. What is neither a Tensor
nor one of these is kept as it is, as part of the structure. Dicts of the same keys are the same tree in any
order.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tinygrad import Tensor

from tinygrad_nv.errors import TransformError


@dataclass(frozen=True)
class Tree:
    """The structure of a value. `kind` is its class, or None for what is kept, which is the first of `keys`
    then; else these are the keys of a dict, or names of fields."""
    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[Tree, ...] = ()

    @property
    def is_leaf(self) -> bool:
        """Whether a Tensor stands here."""
        return self.kind is Tensor

    @property
    def size(self) -> int:
        """Leaves."""
        return 1 if self.is_leaf else sum(child.size for child in self.children)

    def fill(self, leaves: Sequence[Any]) -> Any:
        """A value with these leaves."""
        if len(leaves) != self.size:
            raise TransformError(f"{len(leaves)} values for a tree of {self.size}", f"{self.size}")
        return self._fill(iter(leaves))

    def _fill(self, leaves: Iterator[Any]) -> Any:
        if self.is_leaf: return next(leaves)
        if self.kind is None: return self.keys[0]
        made, kind = [child._fill(leaves) for child in self.children], cast(Any, self.kind)
        if kind in _packed: return _packed[kind](made[0], self.keys[0])
        if issubclass(kind, dict): return kind(zip(self.keys, made, strict=True))
        if self.keys: return kind(**dict(zip(self.keys, made, strict=True)))
        return kind(made)

    def __str__(self) -> str:
        if self.is_leaf: return "Tensor"
        if self.kind is None: return repr(self.keys[0])
        inner = [f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True)] \
            if self.keys else list(map(str, self.children))
        ends: dict[type, tuple[str, str]] = {dict: ("{", "}"), list: ("[", "]"), tuple: ("(", ")")}
        left, right = ends.get(self.kind, (f"{self.kind.__name__}(", ")"))
        return f"{left}{', '.join(inner)}{right}"


LEAF = Tree(Tensor)
_unpacked: dict[type, Callable[[Any], tuple[Any, Any]]] = {}
_packed: dict[type, Callable[[Any, Any], Any]] = {}


def register_tree(kind: type, unpack: Callable[[Any], tuple[Any, Any]],
                  pack: Callable[[Any, Any], Any]) -> None:
    """Makes objects of a class trees: `unpack(value)` is (a tree of what is inside, all else, with a hash),
    and `pack(inside, else)` an object with it."""
    _unpacked[kind], _packed[kind] = unpack, pack


def flatten(value: Any) -> tuple[list[Tensor], Tree]:
    """The Tensors in a value, and its structure."""
    leaves = list[Tensor]()
    return leaves, _tree(value, leaves)


def _tree(value: Any, leaves: list[Tensor]) -> Tree:
    if isinstance(value, Tensor):
        leaves.append(value)
        return LEAF
    if (unpack := _unpacked.get(type(value))) is not None:
        inside, rest = unpack(value)
        return Tree(type(value), (rest,), (_tree(inside, leaves),))
    if isinstance(value, dict):
        keys = tuple(sorted(value, key=lambda key: (str(type(key)), str(key))))
        return Tree(type(value), keys, tuple(_tree(value[key], leaves) for key in keys))
    if isinstance(value, list | tuple):
        return Tree(type(value), getattr(value, "_fields", ()), tuple(_tree(each, leaves) for each in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        children = tuple(_tree(getattr(value, name), leaves) for name in names)
        if any(child.size for child in children): return Tree(type(value), names, children)
    return Tree(None, (value, type(value)))     # 1, True and 1.0 are equal, but not the same


def map_tree(fn: Callable[..., Any], value: Any, *others: Any) -> Any:
    """A value with `fn` of each Tensor, and of those at the same places of others."""
    leaves, tree = flatten(value)
    rest = [same(tree, other, "a value beside it") for other in others]
    return tree.fill([fn(*each) for each in zip(leaves, *rest, strict=True)])


def same(tree: Tree, value: Any, what: str) -> list[Tensor]:
    """The Tensors of a value that has a structure. Raises `TransformError`."""
    leaves, own = flatten(value)
    if own != tree: raise TransformError(f"{what} is {own}", f"{tree}")
    return leaves
