"""`vmap`: a function of one example as a function of many, without a loop.

Protocol. The function is called once, on tensors of one example's shapes, and its graph gets a dimension more
(batching/): matmuls become batched matmuls, and kernels of named functions the same kernels of more examples.
Tensors that it closes over are the same for all examples. What it draws at random is, too.

`pmap` is for examples of a batch over the devices of a mesh. The function is one of one example, as for
`vmap`, which each device applies to its part of the batch. In a mesh of devices of one process an argument is
one Tensor over all of them, cut along its axis of examples, and results are too. In a mesh of ranks each rank
takes its part of arguments that all of them have whole, and results are gathered, so that all have them
whole: gradients go through that. Arguments without an axis are on every device.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives.functions import all_gather, part
from tinygrad_nv.dist.mesh.mesh import Mesh, current
from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.batching.functions import call_function
from tinygrad_nv.transforms.batching.graph import Batch
from tinygrad_nv.transforms.tracing import concrete, tracing
from tinygrad_nv.transforms.trees import Tree, flatten

_numbers = itertools.count(1 << 31)     # of placeholders for one example
Axis = Any      # an axis, None, or a tree of them


def vmap(fn: Callable[..., Any], in_axes: Axis = 0, out_axes: Axis = 0) -> Callable[..., Any]:
    """A function of arguments with one dimension more, whose result has one dimension more.

    `in_axes`: the axis of examples of all arguments, or a tuple of one for each: an int, None for an argument
    that is the same for all, or a tree of these in the argument's structure. Arguments by name have axis 0.
    `out_axes`: the same of the result; None for what does not depend on the example. Raises
    `TransformError`."""
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        leaves, tree = flatten(given)
        if isinstance(in_axes, tuple) and len(in_axes) != len(args):
            raise TransformError(f"in_axes of {len(in_axes)} axes for {len(args)} arguments",
                                 "one for each argument")
        own = in_axes if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        axes = axes_of(tree, (tuple(own), dict.fromkeys(kwargs, 0)), "in_axes")
        n = size_of(leaves, axes)
        values = [leaf if axis is None else concrete(leaf) for leaf, axis in zip(leaves, axes, strict=True)]
        inputs = dict[UOp, UOp]()
        singles = [leaf if axis is None else _single(leaf, axis, inputs)
                   for leaf, axis in zip(values, axes, strict=True)]
        a, k = tree.fill(singles)
        with tracing([Tensor(each) for each in inputs], "vmap"): out = fn(*a, **k)
        results, shape = flatten(out)
        made = Batch(inputs, n, call_function)
        new = made.run([each.uop for each in results])
        ends = axes_of(shape, out_axes, "out_axes")
        return shape.fill([_place(Tensor(made.lift(old.uop)) if axis is not None else old, one, axis)
                             for old, one, axis in zip(results, new, ends, strict=True)])
    return call


def _single(leaf: Tensor, axis: int, inputs: dict[UOp, UOp]) -> Tensor:
    """A tensor that stands for one example."""
    whole = move_axis(leaf, axis, 0).uop
    mark = UOp.param(next(_numbers), whole.dtype, tuple(whole.shape[1:]), whole.device)
    inputs[mark] = whole
    return Tensor(mark)


def axes_of(tree: Tree, given: Axis, what: str) -> list[int | None]:
    """The axis of each leaf. `given` is an axis, or a tree of axes that may end above the leaves."""
    if given is None or isinstance(given, int): return [given] * tree.size
    if tree.kind is not None and not tree.is_leaf:
        if isinstance(given, dict) and issubclass(tree.kind, dict) and set(given) == set(tree.keys):
            parts = [given[key] for key in tree.keys]
        elif isinstance(given, list | tuple) and not isinstance(given, dict): parts = list(given)
        else: parts = []
        if len(parts) == len(tree.children):
            return [axis for child, part in zip(tree.children, parts, strict=True)
                    for axis in axes_of(child, part, what)]
    raise TransformError(f"{what} {given!r} for {tree}", "an axis, None, or the same structure of these")


def size_of(leaves: Sequence[Tensor], axes: Sequence[int | None]) -> int:
    """The number of examples."""
    sizes = dict[int, tuple[int, ...]]()
    for leaf, axis in zip(leaves, axes, strict=True):
        if axis is None: continue
        if not -leaf.ndim <= axis < leaf.ndim:
            raise TransformError(f"axis {axis} of a Tensor of shape {leaf.shape}", "an axis that it has")
        sizes.setdefault(int(leaf.shape[axis]), leaf.shape)
    if not sizes: raise TransformError("arguments of which none has an axis of examples", "at least one")
    if len(sizes) > 1:
        shown = " and ".join(f"{size} (of a Tensor of shape {shape})" for size, shape in sizes.items())
        raise TransformError(f"axes of examples of different sizes: {shown}", "one number of examples")
    return next(iter(sizes))


def _place(whole: Tensor, new: UOp | None, axis: int | None) -> Tensor:
    """A result with the dimension of examples at its place."""
    if axis is None:
        if new is None: return whole
        raise TransformError("out_axes None for a result that depends on the example", "an axis for it")
    return move_axis(whole, 0, axis)


def move_axis(x: Tensor, start: int, end: int) -> Tensor:
    """x with one of its axes at another place."""
    order = [axis for axis in range(x.ndim) if axis != start % x.ndim]
    order.insert(end % x.ndim, start % x.ndim)
    return x if order == sorted(order) else x.permute(order)


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
