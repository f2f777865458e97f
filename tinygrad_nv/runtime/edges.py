"""Edges of a graph of the driver: those that order work, and the programmatic ones.

Protocol: nodes are numbers in order of addition, and each follows lower ones. `Reduction` takes them one by
one and says which of their edges no path of others implies: the transitive reduction (Aho, Garey, Ullman
1972), which an acyclic graph has exactly one of. `early` says whether a node's edge is programmatic, as
driver.py has it: it is a launch with `pdl` whose only edge comes from a launch.

Reduction stays right where edges are programmatic: a launch with `pdl` executes griddepcontrol.wait, so it
ends after the launch before it has ended, and what follows it follows that one too.

`EdgeChain` decides between two things that exclude each other: a programmatic launch follows one node only,
and launches that do not follow each other run side by side. Launches with `pdl` are in groups, in the order
in which they come. One joins the group of the one before it if it follows none of the group and all CTAs of
the group fit on the GPU at once, one on each multiprocessor; it gains more by the company than it can save in
front. Otherwise, with the GPU full or its data not there before, it begins a group and follows the group
before it, if that is a single launch, so that streams of large kernels are chains of programmatic edges.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from tinygrad_nv.runtime.driver import Launch, Work
from tinygrad_nv.runtime.library_call import LibraryCall


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


def reduce_edges(after: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Returns for each node of a graph the nodes that it follows directly."""
    reduction = Reduction()
    return [reduction.add(numbers) for numbers in after]


def early(work: Work, before: Sequence[Work]) -> bool:
    """Whether `work`, which directly follows the nodes that do `before`, may begin before they have ended."""
    return isinstance(work, Launch) and work.pdl and len(before) == 1 and isinstance(before[0], Launch)


@dataclass
class EdgeCounts:
    """Counts of a graph's edges: `programmatic` ones of all, `chained` ones that no data asked for, and
    launches that run `beside` the one before them."""
    launches: int = 0
    edges: int = 0
    programmatic: int = 0
    chained: int = 0
    beside: int = 0


class EdgeChain:
    """The edges of a graph of work that comes in an order in which it could run, on `sm_count`
    multiprocessors."""

    def __init__(self, sm_count: int) -> None:
        self.sm_count = sm_count
        self.works: list[Work] = []
        self.reduction = Reduction()
        self.group: list[int] = []      # launches side by side, the last of them the last launch
        self.behind: list[int] = []     # the group before
        self.calls: list[int] = []      # the last collective: a call of a library, or a launch that is one
        self.counts = EdgeCounts()

    def add(self, work: Work, after: Iterable[int], fills: bool = False) -> tuple[int, ...]:
        """The next node, whose data needs the nodes in `after`: which nodes it is to follow. With `fills` its
        grid is not known yet, and taken for a large one."""
        wanted = set(after)
        if isinstance(work, LibraryCall) or (isinstance(work, Launch) and work.given is not None):
            wanted |= set(self.calls)
            self.calls = [len(self.works)]
        number, more = len(self.works), set[int]()
        if isinstance(work, Launch): more = self._place(work, number, wanted, fills)
        self.works.append(work)
        kept = self.reduction.add(wanted | more)
        self.counts.edges += len(kept)
        self.counts.chained += len(more & set(kept) - wanted)
        self.counts.programmatic += early(work, [self.works[before] for before in kept])
        return kept

    def _place(self, work: Launch, number: int, wanted: set[int], fills: bool) -> set[int]:
        """Puts a launch into a group; the nodes it follows because of it."""
        self.counts.launches += 1
        if work.pdl and self.group and not fills and self._joins(work, wanted): self.counts.beside += 1
        else: self.behind, self.group = self.group, []
        self.group.append(number)
        return set(self.behind) if work.pdl and len(self.behind) == 1 else set()

    def _joins(self, work: Launch, wanted: set[int]) -> bool:
        """Whether a launch can run beside the group."""
        members = sum(1 << number for number in self.group)
        if any(1 << before & members or self.reduction.before[before] & members for before in wanted):
            return False
        grids = [each.grid for each in (work, *(self.works[i] for i in self.group))
                 if isinstance(each, Launch)]
        return sum(map(prod, grids)) <= self.sm_count
