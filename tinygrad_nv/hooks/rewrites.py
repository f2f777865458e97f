"""Rewrites of call bodies before kernels are split, and the schedules made of them. Part of __init__.py,
which states the protocol.

A body reaches the rewrites with shards resolved and functions inlined, but for those of a kept kind. What is
in it is found in one walk: an eager operation is scheduled in about 1 ms; each walk of its graph costs 10 µs,
each of tinygrad's `graph_rewrite` 20 to 30 µs.
"""
from __future__ import annotations

import functools
import itertools
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any

import tinygrad.schedule as schedule
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context
from tinygrad.schedule import rangeify
from tinygrad.uop.ops import KernelInfo, Ops, PatternMatcher, UOp, UPat, graph_rewrite
from tinygrad.uop.spec import spec_tensor, type_verify

from tinygrad_nv import config
from tinygrad_nv.errors import HookError
from tinygrad_nv.hooks import layouts, threads
from tinygrad_nv.hooks.replaced import add, remove

_serial = itertools.count()


@dataclass(frozen=True)
class Rewrite:
    """A rewrite of call bodies. `serial` tells apart two functions that bore one name after each other."""
    name: str
    fn: Callable[[UOp], UOp]
    keys: tuple[Callable[[], Hashable], ...]
    needs: tuple[frozenset[Ops], ...]
    serial: int = field(default_factory=lambda: next(_serial))


rewrites: dict[str, Rewrite] = {}
checks: dict[str, Callable[[UOp, UOp], bool]] = {}
_later: list[Callable[[], None]] = []
_loading = False


def add_later(register: Callable[[], None]) -> None:
    """Adds rewrites that are loaded later, for hooks.add_later."""
    _later.append(register)


def load_later() -> None:
    """Calls what `add_later` was given, once. One that raises is called again the next time."""
    global _loading
    if not _later: return
    with threads.LOWERING:
        if _loading: return  # what it registers asks, too
        _loading = True
        try:
            while _later:
                _later[0]()
                del _later[0]
        finally: _loading = False


def has_rewrites() -> bool:
    """Whether a rewrite is registered, or may be once it is loaded."""
    return bool(rewrites or _later)


def add_rewrite(name: str, fn: Callable[[UOp], UOp], *keys: Callable[[], Hashable],
                needs: Iterable[Collection[Ops]] = ()) -> None:
    """Adds a rewrite, for hooks.add_rewrite."""
    load_later()
    add(rewrites, "rewrite", name, Rewrite(name, fn, keys, tuple(map(frozenset, needs))))


def remove_rewrite(name: str) -> None:
    """Undoes `add_rewrite`, and forgets the schedules that rewrites have made."""
    load_later()
    remove(rewrites, "rewrite", name)
    configured_cache.clear()


# **** what is in a graph ****

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


# **** functions ****

_kept: set[type] = set()


def keep_functions(kind: type) -> None:
    """Keeps FUNCTIONs whose call has an aux of this type from being inlined before the rewrites: one of those
    has to lower or inline them."""
    _kept.add(kind)


def inline(function: UOp) -> UOp | None:
    """The body of a FUNCTION over its arguments."""
    load_later()  # which says what is kept
    if type(function.arg.aux) in _kept:
        function = function.replace(src=(flatten(function.src[0]), *function.src[1:]))
    return rangeify.resolve_function(function)


def flatten(graph: UOp) -> UOp:
    """A graph as the rewrites see it: functions inlined, but for those kept, and nothing detached."""
    load_later()
    return graph_rewrite(graph, _inline, bottom_up=True, name="nv: inline functions")


_inline = PatternMatcher([
    (UPat(Ops.FUNCTION, name="c"), lambda c: None if type(c.arg.aux) in _kept else inline(c)),
    (UPat(Ops.GETTUPLE, src=(UPat(Ops.TUPLE, name="t"),), name="g"), lambda g, t: t.src[g.arg]),
    (UPat((Ops.DETACH, Ops.CONTIGUOUS_BACKWARD), name="x"), lambda x: x.src[0]),
])


# **** rewriting ****

_own = threading.local()


def rewriting() -> bool:
    """Whether a registered rewrite runs in this thread: new storage then belongs to the schedule, not to a
    Tensor."""
    return getattr(_own, "rewriting", False)


def rewritten(sink: UOp) -> UOp:
    """A call body after every registered rewrite that it has the ops for, in the order of registration."""
    with threads.LOWERING: return _rewritten(sink)[0]


def _rewritten(sink: UOp) -> tuple[UOp, bool]:
    """That, and whether any rewrite was called: else the schedule depends on the sink alone."""
    load_later()
    ops = ops_of(sink)
    # what is in a function is known once it is inlined
    if Ops.FUNCTION not in ops and not any(has(ops, each.needs) for each in rewrites.values()):
        return sink, False
    if not PREPARED.isdisjoint(ops):
        sink = flatten(graph_rewrite(sink, layouts.resolving(), name="nv: shards"))
        ops = ops_of(sink)
    outer, _own.rewriting = rewriting(), True
    try:
        while True:
            made, called = _once(sink, ops)
            if not called or all(check(sink, made) for check in checks.values()): return made, called
    finally: _own.rewriting = outer


def _once(sink: UOp, ops: frozenset[Ops]) -> tuple[UOp, bool]:
    """A prepared body after the rewrites, and whether any was called."""
    called = False
    for rewrite in tuple(rewrites.values()):
        if not has(ops, rewrite.needs): continue
        before, sink, called = sink, rewrite.fn(sink), True
        if sink is not before: ops = ops_of(sink)
        if config.get("NV_SPEC"): _verify(sink, rewrite.name)
    return sink, called


def _verify(sink: UOp, name: str) -> None:
    try: type_verify(sink, spec_tensor)
    except RuntimeError as error:
        raise HookError(f"rewrite {name!r} made a graph that tinygrad's verifier refuses: {error}",
                        "a valid tensor graph", f"run without it: hooks.remove_rewrite({name!r})") from error


# **** schedules ****

def configuration() -> Hashable:
    """Everything about the registered rewrites that a schedule depends on."""
    load_later()
    keys = dict.fromkeys(key for rewrite in rewrites.values() for key in rewrite.keys)
    return (_registration_key(), *(key() for key in keys))


def _registration_key() -> Hashable:
    """The registered rewrites, and whether sums have one order."""
    load_later()
    return (config.get("NV_DETERMINISTIC"), *layouts.shard_rules,
            *[rewrite.serial for rewrite in rewrites.values()])


class _ConfiguredCache(dict[Any, UOp]):
    """Schedules made while rewrites are in force. An entry belongs to the configuration that made it, which
    takes 20 to 40 µs to find; where no rewrite was called, to the registered ones only."""

    def get(self, key: Any, default: UOp | None = None) -> UOp | None:
        if (known := super().get((_registration_key(), key))) is not None: return known
        return super().get((configuration(), key), default)

    def __setitem__(self, key: Any, value: UOp) -> None:
        # whether a rewrite was called for the schedule that this thread has made last
        super().__setitem__((configuration() if getattr(_own, "called", True) else _registration_key(), key),
                            value)


configured_cache = _ConfiguredCache()


def _kernel_graph(sink: UOp) -> UOp:
    with threads.LOWERING:
        sink, _own.called = _rewritten(sink)
        return in_order(sink) if config.get("NV_DETERMINISTIC") else rangeify.get_kernel_graph(sink)


def in_order(sink: UOp) -> UOp:
    """The kernels of a prepared body, each float sum of tinygrad's own in one kernel and in the order of its
    loops. Hand-coded optimisations, BEAM and split reductions depend on the sizes of other dimensions."""
    with Context(SPLIT_REDUCEOP=0): made = rangeify.get_kernel_graph(sink)
    return graph_rewrite(made, _as_written, name="nv: loops as written")


def _leave_unoptimised(call: UOp) -> UOp | None:
    body = call.src[0]
    if not isinstance(body.arg, KernelInfo) or body.arg.opts_to_apply is not None: return None
    if not any(node.op is Ops.REDUCE and node.arg[0] is Ops.ADD and dtypes.is_float(node.dtype)
               for node in body.toposort()): return None
    return call.replace(src=(body.replace(arg=replace(body.arg, opts_to_apply=())), *call.src[1:]))


_as_written = PatternMatcher([(UPat(Ops.CALL, src=(UPat(Ops.SINK),), allow_any_len=True, name="call"),
                              _leave_unoptimised)])


@functools.cache
def pm_schedule() -> PatternMatcher:
    """tinygrad's pm_schedule with the rewrites in it and a cache of its own.

    A pattern's function runs on a copy of its globals made when it first matches: replacing get_kernel_graph
    in tinygrad.schedule does nothing once a schedule was made, and done before that it cannot be undone.
    """
    own = {**vars(schedule), "get_kernel_graph": _kernel_graph, "schedule_cache": configured_cache}
    lower = types.FunctionType(schedule.lower_sink_to_linear.__code__, own)
    return PatternMatcher([(UPat(Ops.SINK, name="function"), lower)])
