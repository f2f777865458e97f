"""Functions on tensors that are watched: what is computed from them can be told from everything else.

Protocol. `enter(x)` is a Tensor of x's value behind an identity node of its own. Two inputs are two nodes,
even if they are one Tensor, and what a function closes over is none. `tracing(inputs)` holds while the
function is called: what depends on the inputs is not realized, which would lose its graph, and reading its
values raises `TransformError`. `left(results, inputs)` takes the identity nodes away, so that results are the
graphs that the function alone makes: no schedule is another one because a transform was there.

Transforms nest: an input of the inner one is a value of the outer one.
"""
from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from tinygrad import Device, Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.shapes.valueless import without_values

_numbers = itertools.count()
_live: list[set[UOp]] = []


def concrete(x: Tensor) -> Tensor:
    """A Tensor of a dtype and a device: a Python number as a Tensor has neither."""
    strong = dtypes.default_float if x.is_floating_point() else dtypes.default_int
    if x.dtype in dtypes.weaks: x = x.cast(strong)
    return Tensor(x.uop.clone(device=Device.DEFAULT)) if x.device is None else x


def enter(x: Tensor) -> Tensor:
    """The Tensor as an input of a trace."""
    node = concrete(x).uop
    return Tensor(UOp.maketuple(node.param_like(0)).call(node, name=f"input {next(_numbers)}").gettuple(0))


@contextlib.contextmanager
def tracing(inputs: Sequence[Tensor], what: str) -> Iterator[None]:
    """A function of the inputs is called inside; `what` is the transform, for an error."""
    def refusal() -> TransformError:
        return TransformError(f"a value is read in a function under {what}",
                              "a graph that depends on shapes alone", "take what reads it (item, tolist, "
                              "numpy, int) out of the function, or use where()")
    own = {each.uop for each in inputs}
    _live.append(own)
    try:
        with without_values(lambda x: depends(x.uop, own), refusal): yield
    finally: _live.remove(own)


def depends(node: UOp, inputs: set[UOp]) -> bool:
    """Whether a node is computed from any of the inputs."""
    return node in inputs or not inputs.isdisjoint(node.toposort(enter_calls=False))


def active() -> bool:
    """Whether a transform's function is being called: it may close over what depends on an input, too."""
    return bool(_live)


def leave(results: Sequence[UOp], inputs: Sequence[Tensor]) -> list[UOp]:
    """The results with the inputs' own values in the place of their nodes."""
    return replace_nodes(results, {each.uop: each.uop.src[0].src[1] for each in inputs})


def replace_nodes(nodes: Sequence[UOp], values: dict[UOp, UOp]) -> list[UOp]:
    """Nodes with values in the place of others."""
    if not nodes: return []
    return list(UOp.sink(*nodes).substitute(values, walk=True).src)
