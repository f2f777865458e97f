"""`checkpoint`: a function whose values are computed again for the backward pass, in place of being kept.

Protocol: the forward pass has the function's own nodes, behind a function node of tinygrad that says what its
gradient is. For that the region is written down once more over placeholders, derived, and put over copies of its
inputs, and of the values that its policy keeps, that are made when the gradient of its result is there
(behind.py). So the region is computed again then, and its first values are free as soon as the forward pass has
used them. What does not depend on the region's inputs (weights, tables, a mask of documents) is no part of it:
it is computed once, and gets its gradient as without a region.

With "offload" the copies are made from the host. That of a region is under way while the region after it, which
is derived before it, is computed again; on a CPU, which is the host, it is as "full".
"""
from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.train.regions.behind import HOST, back, behind, on_host
from tinygrad_nv.train.regions.policy import BUDGET, Policy
from tinygrad_nv.train.regions.values import Value, inside, kept, nbytes, outside, read

_numbers = itertools.count(1 << 24)     # of placeholders: those of regions within each other differ
# a region's result to the gradient that is there before its own: that of the region that reads it
_before: weakref.WeakKeyDictionary[UOp, UOp] = weakref.WeakKeyDictionary()


def checkpoint(fn: Callable[..., Tensor], policy: str = "full", *, budget: float | None = None,
               parameters: Iterable[Tensor] | None = None) -> Callable[..., Tensor]:
    """`fn` as a region: called as `fn`, with the same result and gradients. Tensors of floats among its
    arguments are its inputs, which are kept until its backward pass. `policy` is one of `POLICIES` (policy.py
    has their rules); a `budget` from 0 to 1 instead is the share of bytes that it keeps of those that are kept
    without regions. Tensors that `fn` closes over get their gradients, too: all, or `parameters` alone, which
    saves the time to derive the others. Values that are drawn at random must come from a counter in memory
    (train/adapter.py): tinygrad's own dropout is drawn once, and its mask is an input.

    Raises `ConfigError` for an unknown policy, `SpecError` if `fn` returns something else than a Tensor."""
    how = Policy(policy) if budget is None else Policy(BUDGET, budget)
    wanted = None if parameters is None else tuple(parameters)

    @functools.wraps(fn)
    def region(*args: Any, **kwargs: Any) -> Tensor:
        if how.keeps_all: return fn(*args, **kwargs)
        inputs = list[UOp]()
        def entered(given: Any) -> Any:
            if not isinstance(given, Tensor) or given.dtype not in dtypes.floats: return given
            stored = given.contiguous()
            if stored.uop not in inputs: inputs.append(stored.uop)
            return stored
        result = fn(*map(entered, args), **{name: entered(each) for name, each in kwargs.items()})
        if not isinstance(result, Tensor):
            raise SpecError(f"a region that returns a {type(result).__name__}", "one Tensor",
                            "make a region of the part with one result")
        if not inputs: return result
        return _Region.of(result.uop, inputs, wanted, how).tensor()
    return region


@dataclass(frozen=True)
class _Region:
    """`result` over `inputs` and what it reads from `outside`, by its nodes `own`."""
    result: UOp
    inputs: tuple[UOp, ...]
    outside: tuple[UOp, ...]
    own: dict[UOp, None]
    policy: Policy

    @staticmethod
    def of(result: UOp, inputs: list[UOp], parameters: tuple[Tensor, ...] | None, policy: Policy) -> _Region:
        own = inside(result, inputs)
        others = outside(own, inputs)
        if parameters is not None:
            wanted = {each.uop for each in parameters}
            others = [each for each in others if not wanted.isdisjoint(each.toposort(enter_calls=False))]
        return _Region(result, tuple(inputs), tuple(others), own, policy)

    def tensor(self) -> Tensor:
        """The result, whose gradient is this region's."""
        what = self.result.param_like(0)
        made = what.call(self.result, *self.inputs, *self.outside, grad_fxn=self.gradient, name="region")
        return Tensor(made.gettuple(0))

    @functools.cached_property
    def offloaded(self) -> bool:
        """Whether inputs are on the host in between."""
        return self.policy.name == "offload" and str(self.result.device).split(":", 1)[0] != HOST

    def gradient(self, gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
        """Of the result's gradient those of the call's arguments; the result's own goes through the others."""
        gradient = gradient.contiguous()
        mark = gradient.param_like(next(_numbers))
        marks = {each: each.param_like(next(_numbers)) for each in self.inputs}
        places, derived = self.derived(marks, mark)
        values = read(dict.fromkeys(places), UOp.maketuple(*derived.values()))
        found = kept(self.policy, values, sum(map(nbytes, self.inputs)))
        ready = self._ready(gradient)
        puts = {value.node: behind(places[value.node], ready) for value in found}
        puts |= {marks[each]: self._copied(each, ready) for each in self.inputs}
        made = UOp.maketuple(*derived.values()).substitute(puts | {mark: gradient}, walk=True).src
        given = dict(zip(derived, made, strict=True))
        _before.update({each: gradient for each in self.inputs})
        return (None, *(given.get(each) for each in (*map(marks.__getitem__, self.inputs), *self.outside)))

    def derived(self, marks: dict[UOp, UOp], gradient: UOp) -> tuple[dict[UOp, UOp], dict[UOp, UOp]]:
        """Of this region over marks in place of inputs: its nodes, each with that of the forward pass, and
        the gradients of marks and of what is outside."""
        own = list(self.own)
        written = UOp.sink(*own).substitute(marks, walk=True).src
        places = dict(zip(written, own, strict=True))
        targets = {*marks.values(), *self.outside}
        found = compute_gradient(written[-1], gradient, targets)
        return places, {each: found[each] for each in targets if each in found and found[each].op is not Ops.NOOP}

    def _ready(self, gradient: UOp) -> UOp:
        """What is there when the forward pass is done: the gradient, or if it depends on nothing the result."""
        return gradient if self.result in gradient.toposort(enter_calls=False) else self.result.contiguous()

    def _copied(self, value: UOp, ready: UOp) -> UOp:
        if not self.offloaded: return behind(value, ready)
        return back(on_host(value), value, _before.get(self.result, ready))
