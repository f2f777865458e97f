"""`scan`: a loop that carries a state, over the first dimension of its inputs.

Protocol. `body(carry, x)` returns (carry, y); `scan` returns the last carry and all y in one Tensor each. One
step is captured as a TinyJit, whose only argument is the number of the step, and replayed: x is read from its
place, y is written to its place, the carry stays where it is. Nothing is copied through the host, and memory
does not grow with the number of steps. Under another transform, or while a TinyJit is being captured, steps
are written one after the other into the graph: so gradients of a scan are those of an unrolled loop.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, TinyJit
from tinygrad.engine.realize import capturing
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.tracing import active, concrete
from tinygrad_nv.transforms.trees import Tree, flatten

Body = Callable[[Any, Any], tuple[Any, Any]]
FEWEST = 3      # steps: fewer are written down sooner than one is captured


def scan(body: Body, init: Any, xs: Any = None, length: int | None = None, *, reverse: bool = False,
         unroll: bool = False) -> tuple[Any, Any]:
    """(last carry, ys): trees of Tensors; ys has y of step i at i, also with `reverse`, which goes from the
    last x to the first. `xs` is a tree of Tensors [length, …]; None: x is None, and `length` says how many
    steps. The carry keeps its structure, shapes and dtypes. `unroll`: as under a transform, in one graph.
    Runs at once, else. Raises `TransformError`."""
    inputs, tree = flatten(xs)
    carry, state = flatten(init)
    steps = _steps(inputs, length)
    carry, inputs = list(map(concrete, carry)), list(map(concrete, inputs))
    places = range(steps)[::-1] if reverse else range(steps)
    loop = _Loop(body, state, tree)
    if unroll or capturing or active() or steps < FEWEST:
        return _unroll(loop, carry, inputs, places)
    return _capture(loop, carry, inputs, places)


def _steps(inputs: list[Tensor], length: int | None) -> int:
    for each in inputs:
        if not each.shape: raise TransformError("scan over a Tensor of shape ()", "[length, …]")
    found = {int(each.shape[0]) for each in inputs} | (set() if length is None else {length})
    if not found: raise TransformError("scan without xs and without length", "one of them")
    if len(found) == 1 and min(found) > 0: return min(found)
    raise TransformError(f"scan of {' and '.join(map(str, sorted(found)))} steps",
                         "one number of steps, at least 1")


class _Loop:
    """The body on leaves: of a carry and an x those of the next carry and of y."""

    def __init__(self, body: Body, state: Tree, tree: Tree) -> None:
        self.body, self.state, self.tree = body, state, tree
        self.outputs: Tree | None = None

    def step(self, carry: list[Tensor], x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """One step. Raises `TransformError`."""
        made = self.body(self.state.fill(carry), self.tree.fill(x))
        if not isinstance(made, tuple) or len(made) != 2:
            raise TransformError(f"scan of a body that returns {flatten(made)[1]}",
                                 "a pair: the carry, and y")
        new, state = flatten(made[0])
        if state != self.state: raise TransformError(f"scan whose carry becomes {state}", f"{self.state}")
        new = list(map(concrete, new))
        for old, each in zip(carry, new, strict=True):
            if (old.shape, old.dtype) == (each.shape, each.dtype): continue
            raise TransformError(f"scan whose carry of {old.dtype} {old.shape} becomes {each.dtype} "
                                 f"{each.shape}", "the same shape and dtype", "cast what the body returns")
        ys, self.outputs = flatten(made[1])
        return new, list(map(concrete, ys))

    def results(self, carry: list[Tensor], ys: list[Tensor]) -> tuple[Any, Any]:
        """Returns the results of `scan`."""
        assert self.outputs is not None
        return self.state.fill(carry), self.outputs.fill(ys)


def _unroll(loop: _Loop, carry: list[Tensor], inputs: list[Tensor], places: range) -> tuple[Any, Any]:
    made: dict[int, list[Tensor]] = {}
    for place in places: carry, made[place] = loop.step(carry, [each[place] for each in inputs])
    columns = zip(*(made[place] for place in sorted(made)), strict=True)
    return loop.results(carry, [Tensor.stack(*column) for column in columns])


def _capture(loop: _Loop, carry: list[Tensor], inputs: list[Tensor], places: range) -> tuple[Any, Any]:
    state = [each.clone() for each in carry]
    if lazy := [*state, *(each for each in inputs if not each.uop.is_realized)]: Tensor.realize(*lazy)
    # what y is, from a step that is not run
    _, shapes = loop.step(state, [each[places[0]] for each in inputs])
    ys = [Tensor.zeros(len(places), *each.shape, dtype=each.dtype, device=each.device).clone()
          for each in shapes]
    if ys: Tensor.realize(*ys)

    def one(place: UOp) -> None:
        x = [each.shrink(((place, place + 1), *(None,) * (each.ndim - 1))).reshape(each.shape[1:])
             for each in inputs]
        new, out = loop.step(state, x)
        new = [each.contiguous() for each in new]   # every one of the old carry, before any is written over
        written = [old.shrink(((place, place + 1), *(None,) * (old.ndim - 1))).assign(each.unsqueeze(0))
                   for old, each in zip(ys, out, strict=True)]
        if new or out: Tensor.realize(*new, *out)
        if rest := [*written, *(old.assign(each) for old, each in zip(state, new, strict=True))]:
            Tensor.realize(*rest)
    step = TinyJit(one)
    variable = UOp.variable("scan_step", 0, len(places) - 1)
    for place in places: step(variable.bind(place))
    return loop.results(state, ys)
