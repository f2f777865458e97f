"""Layouts of tensors over several devices that tinygrad's own rules do not know. Part of __init__.py, which
states the protocol.

tinygrad 0.14.0 cuts a tensor along one axis, over all of its devices; an UNSHARD can say more: several axes,
and ranges that are computed from the number of a device. Rules that resolve these (`add_shard_rules`) come
before tinygrad's. While there are any, storage of a Tensor gets the layout that they give its value
(`UOp.empty_like`), and `UOp.axis`, by which tinygrad compares layouts, is the last axis of it.
"""
from __future__ import annotations

import functools
from typing import Any

from tinygrad import Device
from tinygrad.dtype import strong_dtype
from tinygrad.mixin import gradient
from tinygrad.schedule.multi import multi_pm
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat, graph_rewrite

from tinygrad_nv.errors import HookError
from tinygrad_nv.hooks.replaced import add, remove, theirs

shard_rules: dict[str, PatternMatcher] = {}
MARK = "_nv_layout"  # in a node's __dict__: whether one of its sources has such a layout


def add_shard_rules(name: str, rules: PatternMatcher) -> None:
    """Adds rules, for hooks.add_shard_rules."""
    add(shard_rules, "shard rules", name, rules)
    resolving.cache_clear()


def remove_shard_rules(name: str) -> None:
    """Undoes `add_shard_rules`."""
    remove(shard_rules, "shard rules", name)
    resolving.cache_clear()


@functools.cache
def resolving() -> PatternMatcher:
    """Returns the matcher that resolves shards."""
    return functools.reduce(lambda after, before: before + after, shard_rules.values(), multi_pm)


def is_mesh(node: UOp) -> bool:
    """Whether this is a layout that tinygrad's own rules do not know."""
    return node.op is Ops.UNSHARD and isinstance(node.device, tuple) and (
        len(node.arg) > 1 or node.src[1].op is not Ops.RANGE)


def _leans(value: UOp) -> bool:
    """Whether a value is made of one with such a layout."""
    for node in value.toposort(lambda each: MARK not in each.__dict__):
        node.__dict__[MARK] = is_mesh(node) or any(each.__dict__.get(MARK, False) for each in node.src)
    return bool(value.__dict__[MARK])


def _layout(value: UOp) -> UOp:
    """A value, its shards resolved."""
    return graph_rewrite(value, resolving(), name="nv: layout")


def _axis(self: UOp) -> int | None:
    if not _leans(self): return theirs(UOp, "axis").func(self)
    made = _layout(self)
    return made.arg[-1] if made.op is Ops.UNSHARD else None


def _empty_like(self: UOp, dtype: Any = None, device: Any = None) -> UOp:
    wanted = self.device if device is None else device
    if not isinstance(wanted, tuple) or not _leans(self):
        return theirs(UOp, "empty_like")(self, dtype, device)
    made, names = _layout(self), tuple(map(Device.canonicalize, wanted))
    local = made.src[0] if made.op is Ops.UNSHARD else made
    empty = UOp.empty(local.shape, dtype=strong_dtype(self.dtype) if dtype is None else dtype, device=names)
    return empty.unshard(made.arg, made.src[1:]) if made.op is Ops.UNSHARD else empty


def _no_gradient(ret: UOp) -> None:
    if not is_mesh(ret): return
    raise HookError("a gradient of what was laid out over several axes of devices",
                    "a gradient of the Tensor that was made so", "lay it out before, and realize it")


axis = functools.cached_property(_axis)
axis.__set_name__(UOp, "axis")
_GRADIENT = PatternMatcher([(UPat(Ops.UNSHARD, name="ret"), _no_gradient)])


@functools.cache
def replacements() -> list[tuple[Any, str, Any]]:
    """Returns what stands in tinygrad's places while there are rules."""
    return [(UOp, "axis", axis), (UOp, "empty_like", _empty_like),
            (gradient, "pm_gradient", _GRADIENT + theirs(gradient, "pm_gradient"))]
