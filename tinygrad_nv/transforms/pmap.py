"""`pmap`: examples of a batch over the devices of a mesh.

Protocol. The function is one of one example, as for `vmap`, which each device applies to its part of the
batch. In a mesh of devices of one process an argument is one Tensor over all of them, cut along its axis of
examples, and results are too. In a mesh of ranks each rank takes its part of arguments that all of them have
whole, and results are gathered, so that all have them whole: gradients go through that. Arguments without an
axis are on every device.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor

from tinygrad_nv.dist.collectives.functions import all_gather, part
from tinygrad_nv.dist.mesh.mesh import Mesh, current
from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.trees import flatten
from tinygrad_nv.transforms.vmap import axes_of, size_of, vmap


def pmap(fn: Callable[..., Any], in_axes: int | Sequence[int | None] = 0, *,
         mesh: Mesh | None = None) -> Callable[..., Any]:
    """`fn` of each example of a batch, the batch cut over the devices of `mesh` (the current one by default).
    `in_axes` as of `vmap`; results have examples in front. The number of examples must be a multiple of that
    of devices. Raises `TransformError`, `DistError`."""
    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        over = current() if mesh is None else mesh
        leaves, tree = flatten(args)
        own = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        axes = axes_of(tree, own, "in_axes")
        if (n := size_of(leaves, axes)) % over.size:
            raise TransformError(f"pmap of {n} examples over {over.size} devices",
                                 f"a multiple of {over.size}", "pad the batch, or use fewer devices")
        given = tree.fill([_cut(each, axis, over) for each, axis in zip(leaves, axes, strict=True)])
        made, shape = flatten(vmap(fn, own)(*given))
        if over.world is None: return shape.fill(made)
        group = over.group(*over.axes)
        return shape.fill([all_gather(each, group, 0, f"pmap of {_name(fn)}") for each in made])
    return call


def _name(fn: Any) -> str: return str(getattr(fn, "__name__", fn))


def _cut(x: Tensor, axis: int | None, over: Mesh) -> Tensor:
    """An argument where it is needed: all of it, or this device's examples."""
    if over.world is None:
        if isinstance(x.device, tuple): return x
        return x.shard(over.devices, None if axis is None else axis % x.ndim)
    return x if axis is None else part(x, axis % x.ndim, over.group(*over.axes).rank, over.size)
