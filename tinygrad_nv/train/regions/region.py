"""`checkpoint`: a function whose values are computed again for the backward pass, in place of being kept.

Protocol: the forward pass has the function's own nodes, behind a function node of tinygrad that says what its
gradient is. For that the region is written down once more over placeholders, derived, and put over copies of
its inputs, and of the values that its policy keeps, that are made when the gradient of its result is there
(patterns/named.py). So the region is computed again then, and its first values are free as soon as the
forward pass has used them. What does not depend on the region's inputs (weights, tables, a mask of documents)
is no part of it: it is computed once, and gets its gradient as without a region.

What is outside may be made again, too: `again` has what takes its place after a gradient. With the policy
"none" nothing else is: values stay as they are.

With "offload" inputs go to the host (host.py) and come back while the region that reads the result, which is
derived before, is computed again and derived. Those of a region whose result no other reads, the last, stay.
On a CPU, which is the host, it is as "full".
"""
from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinygrad import Tensor
from tinygrad.dtype import dtypes
from tinygrad.helpers import TRAINING
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.named import behind
from tinygrad_nv.train.regions import host
from tinygrad_nv.train.regions.values import BUDGET, Policy, inside, keep, nbytes, outside, values

if TYPE_CHECKING:
    from tinygrad_nv.models.llama import Llama

_numbers = itertools.count(1 << 24)     # of placeholders: those of regions within each other differ
# an input to the gradient of the result of the region that reads it, which is there before the input's own
_before: weakref.WeakKeyDictionary[UOp, UOp] = weakref.WeakKeyDictionary()
_regions: weakref.WeakKeyDictionary[UOp, _Region] = weakref.WeakKeyDictionary()     # by their results
_tokens: weakref.WeakKeyDictionary[UOp, UOp] = weakref.WeakKeyDictionary()  # of inputs that are on the host


# of a gradient: values with others like them that are computed after it
Again = Callable[[Tensor], Iterable[tuple[Tensor, Tensor]]]


def checkpoint(fn: Callable[..., Tensor], policy: str = "full", *, budget: float | None = None,
               parameters: Iterable[Tensor] | None = None,
               again: Again | None = None) -> Callable[..., Tensor]:
    """`fn` as a region: called as `fn`, with the same result and gradients. Tensors of floats among its
    arguments are its inputs, which are kept until its backward pass. `policy` is one of `POLICIES` (`Policy`
    has their rules); a `budget` from 0 to 1 instead is the share of bytes that it keeps of those that are
    kept without regions. Tensors that `fn` closes over get their gradients, too: all, or `parameters` alone,
    which saves the time to derive the others. What is drawn at random must come from a counter in memory, as
    in train/adapter.py. `again` gives of the gradient pairs: what `fn` closes over, and the same, computed
    after it, which the backward pass reads in its place.

    Raises `ConfigError` for an unknown policy, `SpecError` if `fn` returns something else than a Tensor."""
    how = Policy(policy) if budget is None else Policy(BUDGET, budget)
    wanted = None if parameters is None else tuple(parameters)

    @functools.wraps(fn)
    def region(*args: Any, **kwargs: Any) -> Tensor:
        if how.keeps_all and again is None: return fn(*args, **kwargs)
        inputs = list[UOp]()
        def enter(given: Any) -> Any:
            if not isinstance(given, Tensor) or given.dtype not in dtypes.floats: return given
            stored = given.contiguous()
            if stored.uop not in inputs: inputs.append(stored.uop)
            return stored
        result = fn(*map(enter, args), **{name: enter(each) for name, each in kwargs.items()})
        if not isinstance(result, Tensor):
            raise SpecError(f"a region that returns a {type(result).__name__}", "one Tensor",
                            "make a region of the part with one result")
        if not inputs: return result
        return _Region.of(result.uop, inputs, wanted, how, again).tensor()
    return region


@dataclass(frozen=True)
class _Region:
    """`result` over `inputs` and what it reads from `outside`. `derived` are the gradients by `marks`, which
    stand for both, and `mark`, for the gradient of the result; `keep` what stands in them for values that are
    kept, with these."""
    result: UOp
    inputs: tuple[UOp, ...]
    outside: tuple[UOp, ...]
    marks: tuple[UOp, ...]
    mark: UOp
    derived: dict[UOp, UOp]
    kept: dict[UOp, UOp]
    policy: Policy
    again: Again | None

    @staticmethod
    def of(result: UOp, inputs: list[UOp], parameters: tuple[Tensor, ...] | None, policy: Policy,
           again: Again | None) -> _Region:
        own = inside(result, inputs)
        others = outside(own, inputs)
        if parameters is not None:
            wanted = {each.uop for each in parameters}
            others = [each for each in others if not wanted.isdisjoint(each.toposort(enter_calls=False))]
        # of what is outside, too: a gradient goes on from there, and would reach what that is made of twice
        marks = {each: each.param_like(next(_numbers)) for each in (*inputs, *others)}
        mark = result.param_like(next(_numbers))
        written = UOp.sink(*own).substitute(marks, walk=True).src
        found = compute_gradient(written[-1], mark, set(marks.values()))
        derived = {each: found[each] for each in marks.values() if _is_there(found.get(each))}
        places = dict(zip(written, own, strict=True))
        left = keep(policy, values(places, UOp.maketuple(*derived.values())), sum(map(nbytes, inputs)))
        after = _store(own, {places[value.node] for value in left})
        return _Region(after.get(result, result), tuple(inputs), tuple(others), tuple(marks.values()), mark,
                       derived, {value.node: after[places[value.node]] for value in left}, policy, again)

    def tensor(self) -> Tensor:
        """The result, whose gradient is this region's."""
        what = self.result.param_like(0)
        made = what.call(self.result, *self.inputs, *self.outside, grad_fxn=self.gradient, name="region")
        out = made.gettuple(0)
        _regions[out] = self
        return Tensor(out)

    def gradient(self, gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
        """Returns the gradients of the call's arguments, of the result's gradient: all but that of the result
        itself."""
        gradient = gradient.contiguous()
        ready = self._ready(gradient)
        puts = {node: self._keep(value, ready) for node, value in self.kept.items()} | {self.mark: gradient}
        read = call.gettuple(0).contiguous()    # as it is an input of others
        copies = [self._copy(each, ready, read) for each in self.inputs]
        outside = self.outside
        if self.again is not None:
            others = {old.uop: new.uop for old, new in self.again(Tensor(ready))}
            outside = UOp.sink(*outside).substitute(others, walk=True).src
        puts |= dict(zip(self.marks, (*copies, *outside), strict=True))
        made = UOp.maketuple(*self.derived.values()).substitute(puts, walk=True).src
        given = dict(zip(self.derived, made, strict=True))
        _before.update(dict.fromkeys(self.inputs, gradient))
        return (None, *map(given.get, self.marks))

    def _ready(self, gradient: UOp) -> UOp:
        """Returns a value that is there when the forward pass is done: the gradient, or where that is
        constant the result."""
        return gradient if self.result in gradient.toposort(enter_calls=False) else self.result.contiguous()

    def _keep(self, value: UOp, ready: UOp) -> UOp:
        return value if self.policy.keeps_all else behind(value, ready)

    def _copy(self, value: UOp, ready: UOp, read: UOp) -> UOp:
        """An input for the backward pass; `read` is this region's result as others read it."""
        if self.policy.keeps_all: return value
        if self.policy.name != "offload" or read not in _before or not host.moves(value.device):
            return behind(value, ready)
        # what a region holds that is not on the host itself, nothing else waits for
        held = () if read in _tokens else (value,)
        return host.await_prefetch(host.prefetch(self._token(value), value, _before[read], held), ready)

    def _token(self, value: UOp) -> UOp:
        """Returns the token of an input on the host, behind those of the region before."""
        if value not in _tokens:
            before = next((_regions[each.src[0]] for each in self.inputs if each.src and
                           each.src[0] in _regions), None)
            held = [] if before is None else [one for each in before.inputs
                                              for one in (each, before._token(each))]
            _tokens[value] = host.offload(value, held)
        return _tokens[value]


def _is_there(gradient: UOp | None) -> bool: return gradient is not None and gradient.op is not Ops.NOOP


def _store(nodes: Iterable[UOp], wanted: set[UOp]) -> dict[UOp, UOp]:
    """Nodes with what takes their places so that those wanted are in memory, which else the kernels that read
    them might compute."""
    made = dict[UOp, UOp]()
    for node in nodes:
        one = node.replace(src=tuple(made.get(each, each) for each in node.src))
        made[node] = one.contiguous() if node in wanted else one
    return made


def checkpoint_blocks(model: Llama, policy: Policy, parameters: Iterable[Tensor]) -> None:
    """Makes each layer of a model a region of its own, in training alone, or with the policy "none" no
    longer. What a step keeps is thus each layer's input, what the policy keeps, and for the time of its
    backward pass all of one layer. Gradients go to the layers' inputs and to `parameters`."""
    own = tuple(parameters)
    for block in model.blocks:
        block.region = None if policy.keeps_all else \
            _in_training(block.compute, checkpoint(block.compute, policy.name, budget=policy.budget,
                                                    parameters=own))


def _in_training(fn: Callable[..., Tensor], region: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The region in training, else the function."""
    def call(*args: Any) -> Tensor: return region(*args) if TRAINING else fn(*args)
    return call
