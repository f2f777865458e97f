"""Reports on the backend's work on a model's graphs: `explain(compiled, *args)`.

Protocol. A graph says that it ran (`ran`); inside `explain` these are collected, in order.
"""
from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GraphReport:
    """A graph of one call. `programs`: subgraphs that are ours; `captures`: sets of shapes so far;
    `refused`: operators that torch computes, and why; `reasons`: why torch computes a whole program."""
    name: str
    operators: int
    programs: int
    captures: int
    refused: dict[str, str]
    reasons: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing of it is computed by torch."""
        return not self.refused and not self.reasons

    def __str__(self) -> str:
        ours = self.operators - len(self.refused)
        lines = [f"{self.name}: {ours} of {self.operators} operators in {self.programs} "
                 f"program{'s' * (self.programs != 1)}, {self.captures} captured"]
        lines += [f"  torch: {operator}: {why}" for operator, why in self.refused.items()]
        return "\n".join([*lines, *(f"  torch, all of a program: {reason}" for reason in self.reasons)])


@dataclass(frozen=True)
class Report:
    """The graphs that ran, in order."""
    graphs: tuple[GraphReport, ...]

    @property
    def whole(self) -> bool:
        """Whether there were graphs, and nothing of them is computed by torch."""
        return bool(self.graphs) and all(each.whole for each in self.graphs)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "no graph of this backend ran"


_collected: ContextVar[list[Any] | None] = ContextVar("tinygrad_nv_torch_graphs", default=None)


def ran(graph: Any) -> None:
    """Notes that a graph ran, where `explain` asks."""
    if (found := _collected.get()) is not None: found.append(graph)


def explain(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Calls a compiled module or function, and says which graphs ran: what of them is computed by kernels of
    ours, and what by torch, with the reason."""
    found: list[Any] = []
    token = _collected.set(found)
    try: compiled(*args, **kwargs)
    finally: _collected.reset(token)
    return Report(tuple(graph.report() for graph in found))
