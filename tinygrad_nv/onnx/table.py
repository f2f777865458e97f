"""The table of functions that compute ops.

Protocol. `@op("Name", …)` puts a function into the table; the newest one whose `since` the model's opset has
reached is chosen. It is called with the node's inputs in order (None for one that is left out) and its
attributes by name, and returns its output, or a tuple of them. What it is given:

  host=(1, 2)   these inputs as numpy arrays: their values decide shapes
  raw=True      values as they are: sequences, strings, narrow types, arrays known to the host
  call=True     a `Call` first: the node, and how to evaluate a graph among its attributes

Ops that the table lacks are tinygrad's, if it has them. Which of those are right was found by onnx's node
tests: an op that is wrong there has a function of ours.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinygrad_nv.onnx.elements import Value
from tinygrad_nv.onnx.model import Graph, Node

Function = Callable[..., Any]


class Call(Protocol):
    """A node that is being computed."""
    node: Node

    def evaluate(self, graph: Graph, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a graph among the attributes; names outside it are those of the node's scope."""

    def constant(self, *inputs: int) -> bool:
        """Whether inputs, those that there are, are constants of the model."""


@dataclass(frozen=True)
class Operator:
    """A function of the table, and what it is given."""
    function: Function
    since: int = 1
    host: tuple[int, ...] = ()
    raw: bool = False
    call: bool = False


_table: dict[tuple[str, str], list[Operator]] = {}


def op(*names: str, domain: str = "", since: int = 1, host: tuple[int, ...] = (), raw: bool = False,
       call: bool = False) -> Callable[[Function], Function]:
    """Registers a function under names of ops."""
    def register(function: Function) -> Function:
        for name in names:
            _table.setdefault((domain, name), []).append(Operator(function, since, host, raw, call))
        return function
    return register


def find(domain: str, name: str, version: int) -> Operator | None:
    """The function of an op at a version of its domain."""
    fitting = [each for each in _table.get((domain, name), ()) if each.since <= version]
    return max(fitting, key=lambda each: each.since, default=None) or _tinygrads(domain, name, version)


def _tinygrads(domain: str, name: str, version: int) -> Operator | None:
    """tinygrad's function of an op. Imported late: that opens the default device."""
    from tinygrad.nn import onnx
    found = onnx.onnx_ops.get(name)
    if isinstance(found, dict):
        versions = {key.version: each for key, each in found.items()
                    if key.domain.value == (domain or "ai.onnx") and key.version <= version}
        found = versions[max(versions)] if versions else None
    if found is None or domain not in ("", *(each.value for each in onnx.Domain)): return None
    lists = onnx.required_input_python_consts.get(name, ())
    return Operator(_with_lists(found, lists), host=lists)


def tinygrads(name: str) -> Function:
    """tinygrad's function of an op of ai.onnx at its newest version."""
    found = _tinygrads("", name, 1 << 30)
    assert found is not None
    return found.function


def _with_lists(function: Function, positions: tuple[int, ...]) -> Function:
    """tinygrad's functions take Python lists where this table gives arrays."""
    def call(*inputs: Any, **attributes: Any) -> Any:
        given = [each if i not in positions or each is None else
                 each.tobytes() if each.dtype == np.uint8 else each.tolist() for i, each in enumerate(inputs)]
        return function(*given, **attributes)
    return call
