"""What is in a graph, found in one walk: whether it needs preparing, and which rewrites. Part of hooks.py,
which states the protocol.

An eager operation is scheduled in about 1 ms; each walk of its graph costs 10 µs, each of tinygrad's
`graph_rewrite` 20 to 30 µs.
"""
from __future__ import annotations

from collections.abc import Iterable, Set

from tinygrad.uop.ops import Ops, UOp

# what resolving shards (tinygrad's multi_pm: also copies from and to several devices) and inlining change
PREPARED = frozenset({Ops.UNSHARD, Ops.MSTACK, Ops.MSELECT, Ops.ALLREDUCE, Ops.COPY, Ops.FUNCTION,
                      Ops.GETTUPLE, Ops.DETACH, Ops.CONTIGUOUS_BACKWARD})


def ops_of(sink: UOp) -> frozenset[Ops]:
    """The ops of a graph, less those in the bodies of calls and functions; UNSHARD, too, where a parameter
    is sharded."""
    found = set()
    for node in sink.toposort(enter_calls=False):
        found.add(node.op)
        if node.op is Ops.PARAM and node.arg.axis is not None: found.add(Ops.UNSHARD)
    return frozenset(found)


def has(ops: Set[Ops], needs: Iterable[Set[Ops]]) -> bool:
    """Whether one of the sets is among the ops; of no set, True."""
    return not needs or any(each <= ops for each in needs)
