"""Documents that lie one after the other in the rows and columns of an attention (spec.py).

Protocol. `in_documents(spec)` is the spec with `documents`, where its score is one that hides other
documents' tokens and depends on nothing else but the sum: conditions of loads of the parameters 0 and 1,

    where(first[m] < n + 1, where(n < end[m], score(sum), −inf), −inf)        in any order

s32, with stride 1 along rows, 0 along columns and query heads. All tokens of a document have its bounds, and
documents stand in order. A token r of none, as padding is, has first = end = r: neither array falls from a
token to the next, so that rows a … b see nothing before first[a], and nothing from end[b] on; and columns
a … b are seen by no rows outside of these.
"""
from __future__ import annotations

import math
from dataclasses import replace

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, loads, walk

FIRST, END = 0, 1   # the score's parameters
HIDDEN = Constant(-math.inf)


def in_documents(spec: AttentionSpec) -> AttentionSpec:
    """The spec with `documents`; the same one where that cannot be."""
    whole = spec.s_q == spec.s_kv and not spec.start and not spec.symbolic and not spec.is_ragged
    if not whole or spec.kept < KEEP_ALL or spec.scales is not None: return spec
    found = [load for load in loads(spec.score) if load.parameter in (FIRST, END)]
    lies = all((each.m, each.n, each.dtype) == (1, 0, dtypes.int32) and not (each.batch and each.batch[2])
               for each in found)
    alone = not any(isinstance(node, (Load, Position)) for node in walk(own_score(spec.score)))
    return replace(spec, documents=True) if len(found) == 2 and lies and alone else spec


def own_score(score: Expression) -> Expression:
    """The score without what hides other documents."""
    while isinstance(score, Apply) and score.op == "where" and score.args[2] == HIDDEN and _compares(score):
        score = score.args[1]
    return score


def _compares(score: Apply) -> bool:
    condition = score.args[0]
    read = [node for node in walk(condition) if isinstance(node, Load)]
    return isinstance(condition, Apply) and condition.op == "less" and len(read) == 1


def bounds(spec: AttentionSpec) -> tuple[Load, Load]:
    """Returns where tokens' documents begin and end."""
    found = {load.parameter: load for load in loads(spec.score)}
    return found[FIRST], found[END]
