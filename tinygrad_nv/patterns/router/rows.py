"""The order of slots whose experts are given, as a function known by name.

Protocol. `group_rows(experts, count)` is what `route` says besides experts and weights, of experts that were
chosen elsewhere. `sort_in_rewrite` is the same in a rewrite. There is no gradient.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.router.reference import rows_of
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "router"


@dataclass(frozen=True)
class GroupRows:
    """Experts int32 (R), of `count`."""
    count: int


def group_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """order int32 (R) and offsets int32 (count + 1) of the experts (R) of slots: expert e has
    order[offsets[e]:offsets[e + 1]], slots in rising order; slots whose number is no expert's stand behind
    all others. Raises `SpecError`."""
    if experts.ndim != 1 or experts.dtype != dtypes.int32 or not isinstance(experts.shape[0], int):
        raise SpecError(f"experts of {short(experts.dtype)} {experts.shape}", "int32 (R,), R known")
    GroupRowsSpec(experts.shape[0], 1, count)
    order, offsets = call(GroupRows(count), _sort_rows, experts)
    return order, offsets


def _sort_rows(what: GroupRows, experts: Tensor) -> tuple[Tensor, ...]: return rows_of(experts, what.count)


def lower_rows(what: GroupRows, target: Target, experts: UOp) -> tuple[UOp, ...] | None:
    """Returns a sort by one kernel; None on targets without one. Raises `Unsupported` where there is none."""
    spec = GroupRowsSpec(int(experts.shape[0]), 1, what.count)
    return None if TABLE.family(target.kind, GroupRowsSpec) is None else _call_kernel(spec, target, experts,
                                                                                      None)


def check_sorted(spec: GroupRowsSpec, target: Target) -> None:
    """Raises `Unsupported` for what `sort_in_rewrite` has no way to sort."""
    if TABLE.family(target.kind, GroupRowsSpec) is not None: choose(spec, target)
    elif spec.symbolic: raise Unsupported("a symbolic number of tokens")


def sort_in_rewrite(spec: GroupRowsSpec, target: Target, experts: UOp, tokens: UOp | None) -> tuple[UOp, ...]:
    """Returns order and offsets in a rewrite, by a kernel where the target has one. `tokens` is their number
    where it is symbolic."""
    if TABLE.family(target.kind, GroupRowsSpec) is not None:
        return _call_kernel(spec, target, experts, tokens)
    return tuple(each.uop for each in rows_of(Tensor(experts).reshape(spec.slots), spec.experts))


def _call_kernel(spec: GroupRowsSpec, target: Target, experts: UOp, tokens: UOp | None) -> tuple[UOp, ...]:
    outputs = [program.Output((extent,), dtypes.int32) for extent in (spec.slots, spec.experts + 1)]
    counted: dict[str, Any] = {} if tokens is None else {"rows": tokens, "variables": [tokens]}
    return choose(spec, target).call(experts.device, outputs, [experts], NAME, **counted)


lower(GroupRows, NAME, lower_rows)
