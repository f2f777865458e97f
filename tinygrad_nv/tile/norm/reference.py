"""Rows in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.norm.spec import NormSpec, Statistic
from tinygrad_nv.tile.reference import Argument, Given, Place, evaluated, parameters


def arguments(spec: NormSpec) -> tuple[Argument, ...]:
    """out0, out1, … (one column, of one number a row), x0, x1, …"""
    extents = (*spec.batch, spec.m, spec.n)
    places = [Place(one.offset, (*extents[:-1], spec.n // (each.group or 1) if one.n else 1),
                    (*one.batch, one.m, one.n))
              for each in spec.results for one in (each.result,)]
    outs = [Argument(f"out{i}", each.result.dtype, (place,), "out")
            for i, (each, place) in enumerate(zip(spec.results, places, strict=True))]
    return *outs, *parameters(extents, *spec.expressions)


def reference(spec: NormSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """Each result, [*batch, m, n], or [*batch, m, 1] of one number a row."""
    extents, sums = (*spec.batch, spec.m, spec.n), list[Tensor]()
    for each in spec.statistics:
        term = evaluated(each.term, extents, sums, given, exact)
        groups = term.reshape(*extents[:-1], -1, each.group or spec.n)
        made = _reduced(each, groups).contiguous().expand(groups.shape)
        sums.append(made.reshape(extents))
    values = [evaluated(each.value, extents, sums, given, exact) for each in spec.results]
    return tuple(value[..., ::each.group or 1] if each.result.n else value[..., :1]
                 for each, value in zip(spec.results, values, strict=True))


def _reduced(statistic: Statistic, term: Tensor) -> Tensor:
    """A number of each row or group, [*batch, m, groups, 1]."""
    if statistic.op == "add": return term.sum(-1, keepdim=True)
    if dtypes.is_float(term.dtype): term = (term != term).where(-float("inf"), term)
    return term.max(-1, keepdim=True)
