"""Values to be stored between rows that would compute them again.

Protocol: `shared(ends, memory)` gives values of whole rows that are parts of several of the results `ends`. A
residual stream with a norm on its way, h + norm(f(h)), is part of every result after it: each would be made
of all inputs and statistics before it, more with every layer. A result of too many takes the last value it
has in common with an earlier one from memory. What one kernel has room for is computed twice, which is less
traffic than storing it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Set

from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns.contraction import is_storage
from tinygrad_nv.patterns.epilogue import ELEMENTWISE, STORED

MOST_READ = 3           # values as large as the result, that it is made of
MOST_STATISTICS = 4     # of one kernel


def find_shared(ends: Iterable[UOp], memory: Set[UOp]) -> list[UOp]:
    """The values. `ends` are in the order of the graph; `memory` is stored anyway."""
    found: dict[UOp, None] = {}
    seen = set[UOp]()

    def is_stored(node: UOp) -> bool: return node in memory or node in found or is_storage(node)

    for end in ends:
        region = _region(end, is_stored)
        if _is_too_much(end, region):
            found |= dict.fromkeys(_common(end, region, seen, is_stored))
            region = _region(end, is_stored)
        seen |= region
    return list(found)


def _region(end: UOp, is_stored: Callable[[UOp], bool]) -> set[UOp]:
    """Returns the nodes that a result is computed of, down to what is stored, and that."""
    waiting, region = [end], {end}
    for node in waiting:
        if node is not end and (is_stored(node) or not _is_computed(node)): continue
        new = [s for s in node.src if s.device is not None and s not in region]
        region.update(new)
        waiting += new
    return region


def _is_computed(node: UOp) -> bool:
    return node.op in ELEMENTWISE or node.op in GroupOp.Movement or node.op is Ops.REDUCE


def _is_too_much(end: UOp, region: Set[UOp]) -> bool:
    """Whether a result is made of more than one kernel of rows should read or add up."""
    if end.op not in ELEMENTWISE: return False
    if sum(node.op is Ops.REDUCE for node in region) > MOST_STATISTICS: return True
    read = [node for node in region if not _is_computed(node) and node.max_numel() >= end.max_numel()]
    return len(read) > MOST_READ and any(node.op is Ops.REDUCE for node in region)


def _common(end: UOp, region: Set[UOp], seen: Set[UOp], is_stored: Callable[[UOp], bool]) -> list[UOp]:
    """The last values of a region that an earlier result has as well, and that are worth storing."""
    waiting, known, made = [end], {end}, list[UOp]()
    for node in waiting:
        if node is not end:
            if is_stored(node) or not _is_computed(node): continue
            if node in seen and _is_worth_it(node, end, is_stored):
                made.append(node)
                continue
        new = [s for s in node.src if s in region and s not in known]
        known.update(new)
        waiting += new
    return made


def _is_worth_it(node: UOp, end: UOp, is_stored: Callable[[UOp], bool]) -> bool:
    """Whether a value has the end's size and is made of a statistic, or of several values of that size."""
    if node.op not in ELEMENTWISE or node.op is Ops.CAST or node.dtype not in STORED: return False
    if node.max_numel() != end.max_numel(): return False
    region = _region(node, is_stored)
    large = [each for each in region if not _is_computed(each) and each.max_numel() >= node.max_numel()]
    return len(large) > 1 or any(each.op is Ops.REDUCE for each in region)
