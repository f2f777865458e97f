"""Edges of a graph of the driver: those that order anything, and those that are programmatic.

Protocol: nodes are numbers in order of addition, and each follows lower ones. `Reduction` takes them one by
one and says which of their edges no path of others implies: the transitive reduction (Aho, Garey, Ullman
1972), which an acyclic graph has exactly one of. `early` says whether a node's edge is programmatic, as
driver.py has it: it is a launch with `pdl` whose only edge comes from a launch.

Reduction stays right where edges are programmatic: a launch with `pdl` executes griddepcontrol.wait, so it
ends after the launch before it has ended, and what follows it follows that one too.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinygrad_nv.runtime.driver import Launch, Work


class Reduction:
    """A graph's nodes as they come; for each the nodes before it, one bit each."""

    def __init__(self) -> None:
        self.before: list[int] = []

    def add(self, after: Iterable[int]) -> tuple[int, ...]:
        """The next node, which follows those in `after`: which of them it follows directly, ascending."""
        given = sorted(set(after))
        implied = 0
        for number in given: implied |= self.before[number]
        self.before.append(implied | sum(1 << number for number in given))
        return tuple(number for number in given if not implied >> number & 1)


def reduced(after: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Of each node of a graph, the nodes that it follows directly."""
    reduction = Reduction()
    return [reduction.add(numbers) for numbers in after]


def early(work: Work, before: Sequence[Work]) -> bool:
    """Whether `work`, which directly follows the nodes that do `before`, may begin before they have ended."""
    return isinstance(work, Launch) and work.pdl and len(before) == 1 and isinstance(before[0], Launch)
