"""Reductions to kernels of ours: sums of columns, then rows, of one walk over a graph.

Protocol: column_sum/ comes first, since norm/ would find the same sums as rows whose elements lie apart. A
graph with a REDUCE and nothing computed beside it has neither, and is not walked.
"""
from __future__ import annotations

from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.patterns.column_sum import match as column_sum
from tinygrad_nv.patterns.norm import match as norm


def rewrite(sink: UOp) -> UOp:
    """The graph with calls for its sums of columns and its rows."""
    if not config.get("NV_NORM"): return sink
    nodes = tuple(sink.toposort(enter_calls=False))
    made = column_sum.rewrite(sink, nodes)
    return norm.rewrite(made, nodes if made is sink else tuple(made.toposort(enter_calls=False)))
