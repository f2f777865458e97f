"""Layouts: which axes of a mesh cut which dimensions of a tensor.

Protocol. A layout maps names to rules. A name is that of a dimension ("batch", "d_model") or of tensors: a
dotted prefix of a tensor's name ("params" is that of "params.layers.0.down"). A rule is one of

    "replicate"         every device has all of it
    "tp", ("dp", "tp")  an axis, or several as one, cuts it
    "shard"             the axis that usually does: the first one of `USUAL` that the mesh has

`placement(…)`: where the layout has a rule for the tensor's name, the longest prefix counts and cuts the
first dimension; else each dimension is cut by the rule for its own name, and one without a rule is whole.
An impossible cut raises `DistError` with the tensor, the dimension and the axis.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tinygrad.dtype import DType

from tinygrad_nv.errors import DistError

Rule = str | tuple[str, ...]
LayoutRules = Mapping[str, Rule]
Sizes = Mapping[str, int]
# by names of dimensions and of tensors
USUAL: dict[str, tuple[str, ...]] = {
    "batch": ("dp", "data"), "sequence": ("cp", "sp"), "d_model": ("tp", "model"), "d_ff": ("tp", "model"),
    "heads": ("tp", "model"), "vocab": ("tp", "model"), "experts": ("ep",), "layers": ("pp",),
    "params": ("fsdp", "dp")}


@dataclass(frozen=True)
class Placement:
    """Place of a tensor: `cuts` are the axes that cut each dimension, with `ways` parts of it."""
    name: str
    shape: tuple[int, ...]
    dtype: DType
    dims: tuple[str, ...]
    cuts: tuple[tuple[str, ...], ...]
    ways: tuple[int, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part of a device."""
        return tuple(extent // ways for extent, ways in zip(self.shape, self.ways, strict=True))

    @property
    def local_bytes(self) -> int:
        """Bytes of a device's part."""
        return prod(self.local_shape) * self.dtype.itemsize


def check_layout(layout: LayoutRules, sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """The axes of each name. Raises `DistError` for axes that the mesh has not."""
    return {name: _axes(name, rule, sizes) for name, rule in layout.items()}


def placement(name: str, shape: Sequence[int], dtype: DType, dims: Sequence[str],
              rules: Mapping[str, tuple[str, ...]], sizes: Sizes) -> Placement:
    """Returns where a tensor is, by rules of `check_layout`. Raises `DistError`."""
    what = f"{name or 'a tensor'} of shape {tuple(shape)}"
    if len(dims) != len(shape):
        raise DistError(f"{what} with the dimensions {', '.join(dims) or 'none'}",
                        f"a name for each of {len(shape)} dimensions")
    own = next((rules[prefix] for prefix in _prefixes(name) if prefix in rules), None)
    if own is not None: cuts = (own, *[()] * (len(shape) - 1)) if shape else ()
    else: cuts = tuple(rules.get(dim, ()) for dim in dims)
    taken = dict[str, str]()
    for dim, axes, extent in zip(dims, cuts, shape, strict=True):
        for axis in axes:
            if axis in taken:
                raise DistError(f"{what}: axis {axis} cuts both {taken[axis]} and {dim}",
                                "an axis that cuts one dimension of a tensor",
                                f"cut {dim} by another axis, or replicate it")
            taken[axis] = dim
        if extent % (ways := prod(sizes[axis] for axis in axes)):
            raise DistError(f"{what}: axis {' x '.join(axes)} of {ways} cuts {dim} of {extent}",
                            f"an extent that {ways} divides", f"pad {dim}, or replicate it")
    return Placement(name, tuple(shape), dtype, tuple(dims), cuts,
                     tuple(prod(sizes[axis] for axis in axes) for axes in cuts))


def _prefixes(name: str) -> list[str]:
    """The longest first."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(len(words), 0, -1)] if name else []


def _axes(name: str, rule: Rule, sizes: Sizes) -> tuple[str, ...]:
    has = f"a mesh of {', '.join(f'{axis}={size}' for axis, size in sizes.items())}"
    if rule == "replicate": return ()
    if rule == "shard":
        found = next((axis for axis in USUAL.get(name, ()) if axis in sizes), None)
        if found is None:
            raise DistError(f"layout of {name}: \"shard\", in {has}",
                            f"one of the axes {', '.join(USUAL[name])}" if name in USUAL else
                            f"one of the names {', '.join(USUAL)}",
                            f"name the axis that cuts {name}: {{\"{name}\": \"{next(iter(sizes))}\"}}")
        return (found,)
    axes = (rule,) if isinstance(rule, str) else tuple(rule)
    for axis in axes:
        if axis not in sizes:
            raise DistError(f"layout of {name}: axis {axis}, in {has}",
                            f"\"shard\", \"replicate\" or one of {', '.join(sizes)}")
    return axes
