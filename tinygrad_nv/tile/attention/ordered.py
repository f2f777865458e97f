"""The class of an attention's schedules on GPUs: its template and the keys of a block (order.py).

Protocol: softmax is rescaled from block to block of keys, so that a row's bits depend on `block_n` and on the
instruction. Both are those of an attention of many rows; the rows of a block, warps and stages are free.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.order import OVER_ROWS, Ordered
from tinygrad_nv.tile.template import GPU, AnyTemplate

MANY = 1024     # rows, for which candidates come in the order of what they are made for


@lru_cache(4096)
def choose_ordered(templates: Sequence[AnyTemplate], spec: AttentionSpec | BackwardSpec,
                   gpu: GPU) -> Ordered | None:
    """The schedule of the class; None where no template takes an attention."""
    if isinstance(spec, BackwardSpec):
        found = _first(templates, spec, spec, gpu)
        return None if found is None else Ordered(found[1], OVER_ROWS)
    many = spec if spec.documents else replace(spec, s_q=max(spec.s_q, MANY))
    if (made := _first(templates, many, spec, gpu)) is None: return None
    template, wide = made
    fitting = [s for s in template.candidates(spec, gpu)
               if s.block_n == wide.block_n and not template.problems(spec, s, gpu)]
    words = f"{template.name}, keys in blocks of {wide.block_n} from the first"
    return Ordered(min(fitting, key=lambda s: _rows(s, spec), default=wide), words)


def _first(templates: Sequence[AnyTemplate], many: Any, spec: Any,
           gpu: GPU) -> tuple[AnyTemplate, Any] | None:
    """Returns the first of the candidates for `many` rows that is legal for a spec."""
    return next(((each, s) for each in templates if each.spec is type(spec)
                 for s in each.candidates(many, gpu) if not each.problems(spec, s, gpu)), None)


def _rows(s: Any, spec: AttentionSpec) -> int:
    """Rows that are computed for those that there are."""
    return -(-spec.s_q // s.block_m) * int(s.block_m)
