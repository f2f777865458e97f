"""Rows in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.reference import Argument, Given, Place, evaluate, parameters


def arguments(spec: NormSpec) -> tuple[Argument, ...]:
    """out0, out1, … (one column, of one number a row), x0, x1, …"""
    outs = [Argument(f"out{i}", each[0].result.dtype, (_place(spec, each),), "out")
            for i, each in enumerate(_storages(spec))]
    return *outs, *parameters((*spec.batch, spec.m, spec.n), *spec.expressions)


def _storages(spec: NormSpec) -> list[list[Computed]]:
    """The results of each storage."""
    made: list[list[Computed]] = []
    for each in spec.results:
        if each.beside: made[-1].append(each)
        else: made.append([each])
    return made


def _place(spec: NormSpec, results: list[Computed]) -> Place:
    """Returns where results lie: of several beside each other, their number is a dimension before the
    elements."""
    first, *rest = (each.result for each in results)
    extents, strides = (*spec.batch, spec.m), (*first.batch, first.m)
    if rest: extents, strides = (*extents, len(results)), (*strides, rest[0].offset - first.offset)
    elements = spec.n // (results[0].group or 1) if first.n else 1
    return Place(first.offset, (*extents, elements), (*strides, first.n))


def reference(spec: NormSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """Each result, [*batch, m, n], or [*batch, m, 1] of one number a row; of those beside each other
    [*batch, m, results, n]."""
    extents, sums = (*spec.batch, spec.m, spec.n), list[Tensor]()
    for each in spec.statistics:
        term = evaluate(each.term, extents, sums, given, exact)
        groups = term.reshape(*extents[:-1], -1, each.group or spec.n)
        made = _reduce(each, groups).contiguous().expand(groups.shape)
        sums.append(made.reshape(extents))

    def value(each: Computed) -> Tensor:
        made = evaluate(each.value, extents, sums, given, exact)
        return made[..., ::each.group or 1] if each.result.n else made[..., :1]
    return tuple(value(each[0]) if len(each) == 1 else Tensor.stack(*map(value, each), dim=-2)
                 for each in _storages(spec))


def _reduce(statistic: Statistic, term: Tensor) -> Tensor:
    """A number of each row or group, [*batch, m, groups, 1]."""
    if statistic.op == "add": return term.sum(-1, keepdim=True)
    if dtypes.is_float(term.dtype): term = (term != term).where(-float("inf"), term)
    return term.max(-1, keepdim=True)
