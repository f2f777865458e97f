"""Gradients through captured calls.

Protocol. The result of a captured call is memory: what it was computed of is not in tinygrad's graph. `Call`
keeps the inputs of a call that has Tensors among them, and `register` says which UOp is its result. Before a
gradient of what depends on such a result is taken (`Tensor.gradient`, `Tensor.backward`), the result becomes
the lazy graph that a runner without captures returns, and has its memory again afterwards. Calls that read
each other's results, a state that is fed back, are kept up to `MOST_CALLS`; a gradient beyond them raises
`OnnxError`.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.device import Device
from tinygrad.tensor import _apply_map_to_tensors
from tinygrad.uop.ops import UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.graphs.kept_buffers import live_tensors
from tinygrad_nv.onnx.elements import Value, from_numpy

MOST_CALLS = 32     # of which one reads the other's result: what is kept of the inputs of a stream is bounded
_results: weakref.WeakKeyDictionary[UOp, tuple[Call, str]] = weakref.WeakKeyDictionary()


class Call:
    """The inputs of a call, and what it computes of them without a capture."""
    __slots__ = ("calls", "given", "lower")

    def __init__(self, lower: Callable[[Mapping[str, Value]], Mapping[str, Value]],
                 given: dict[str, Any], calls: int) -> None:
        self.lower, self.given, self.calls = lower, given, calls

    @staticmethod
    def of(lower: Callable[[Mapping[str, Value]], Mapping[str, Value]], inputs: Mapping[str, Any],
           names: Sequence[str]) -> Call | None:
        """The call, None where no input has a gradient. `names` are those of inputs that vary."""
        before = {name: getattr(x, "computed_by", None) for name in names
                  if isinstance(x := inputs[name], Tensor)}
        if not any(call is not None or (not hasattr(inputs[name], "computed_by")
                                        and inputs[name].is_floating_point())
                   for name, call in before.items()): return None
        calls = 1 + max((call.calls for call in before.values() if call is not None), default=0)
        if calls > MOST_CALLS: calls = 0
        return Call(lower, {name: _keep(inputs[name], calls > 0 or before.get(name) is None)
                            for name in names}, calls)

    def results(self) -> Mapping[str, Value]:
        """The lazy results."""
        if any(x is None for x in self.given.values()):
            raise OnnxError(f"a gradient through more than {MOST_CALLS} captured calls that read each "
                            "other's results", "fewer", "OnnxRunner(model, captures=0)")
        return self.lower({name: x.to(Device.DEFAULT) if isinstance(x, Tensor) else from_numpy(x, folds=False)
                           for name, x in self.given.items()})


def _keep(x: Any, whole: bool) -> Any:
    """An input as it is now; None for the result of a call that is not kept."""
    if not whole: return None
    if not isinstance(x, Tensor): return np.array(x)
    return x if hasattr(x, "computed_by") else Tensor(x.uop)


def register(result: UOp, call: Call, name: str) -> None:
    """Notes that a UOp is the result `name` of a call."""
    _results[result] = call, name


def _derive(theirs: Callable[..., Any], self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor's own, with lazy graphs in place of results meanwhile."""
    if not _results or not _find_results(self): return theirs(self, *args, **kwargs)
    before = [(each, each.uop) for _, each in live_tensors()]
    made, changed = dict[Call, Mapping[str, Value]](), list[tuple[Tensor, UOp, UOp]]()
    try:
        while found := _find_results(self):
            made |= {call: call.results() for _, call, _ in found if call not in made}
            _apply_map_to_tensors({u: _graph(made[call][name], u) for u, call, name in found},
                                  "captured calls")
        changed += [(each, uop, each.uop) for each, uop in before if each.uop is not uop]
        return theirs(self, *args, **kwargs)
    finally:
        for each, uop, lazy in changed:
            if each.uop is lazy: each.uop = uop


def _find_results(root: Tensor) -> list[tuple[UOp, Call, str]]:
    """The results of captured calls in a graph."""
    return [(u, *_results[u]) for u in root.uop.toposort() if u in _results]


def _graph(made: Value, result: UOp) -> UOp:
    assert isinstance(made, Tensor)
    return made.uop.reshape(result.shape)


for _name in ("gradient", "backward"): hooks.add_method(_name, _derive, always=True)
