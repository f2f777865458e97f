"""The plugin points in tinygrad. This file and rewrites.py, devices.py, methods.py and threads.py are the
only ones that change anything inside tinygrad; replaced.py undoes all of it.

Protocol. Hooks are registered by name and removed by name:

    add_rewrite(name, fn, *keys, needs)   fn(sink) -> sink, on each call body before kernels are split
    add_later(register)                   register() adds rewrites and checks, before a graph is lowered first
    add_check(name, fn)                   fn(before, after) -> bool, on the result of the rewrites: if False,
                                          they run again
    keep_functions(kind)                  FUNCTIONs with an aux of this type reach the rewrites as they are
    add_shard_rules(name, rules)          resolve shards before tinygrad's rules do
    add_compile(name, fn)                 fn(linear, inner) -> linear, around tinygrad's compile_linear
    add_execute(name, fn)                 fn(call, ctx, run) -> seconds, around the execution of each call
    add_custom_function(name, execute, outs_ins)  runs CUSTOM_FUNCTION nodes called `name` or `name:anything`
    add_method(name, fn, always)          fn(theirs, self, …) replaces Tensor's method
    add_attribute(name, value, always)    gives Tensor an attribute that it does not have
    add_creation(name, fn)                fn(data, device) makes what Tensor(data, device) does not know
    add_device(name, cls, preferred)      Device[name] opens cls(name); it is the default if `preferred()`
                                          (free_intermediates of a TinyJit frees views, too, and programs
                                          get the `aux` of a kernel's KernelInfo with their TinyELF)
    install_cpu(ours, graph)              replaces attributes of the CPU device's module, and gives it graphs
    install_captures()                    TinyJit takes views for arguments, and says what of them differs
    install_decomposition(rules)          go before tinygrad's for dtypes that a renderer lacks
    install_threads()                     each thread has its own cache on disk, its own capture and the right
                                          to a device; one thread at a time lowers programs

`enable()` and `disable()` switch rewrites, compile hooks and methods, which decide how a program is lowered,
and attributes that are not for `always`. If none of a kind is registered, or while disabled, tinygrad runs
its own functions and its own caches. The other hooks stay until removed: an `add_execute` only observes, and
the rest are called by name. So a captured TinyJit keeps its kernels and custom functions, and replays them
while disabled. A TinyJit that was captured before a rewrite was registered goes on without it; `.reset()`
captures again. The compiler stays with NV=0 too, because it changes no schedule and a machine without clang
has no other.

A sink reaches the rewrites with shards resolved and functions inlined, except those kept. A rewrite is
called only if the ops it `needs` are in the graph; if none is called, the sink is tinygrad's alone and is
walked once (rewrites.py). Schedules are cached by the registered rewrites, and, if a rewrite was called, by
`configuration()` too: what each of their keys returns at that moment.

Where tinygrad has the plugin points of upstream.patch the hooks use them; in the 0.14.0 wheel they replace
attributes. Registrations are state of the process. One thread at a time makes schedules and programs
(threads.py); launches take no lock.
"""
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tinygrad.schedule as schedule
from tinygrad.engine import jit, realize
from tinygrad.helpers import BEAM, colored
from tinygrad.schedule import rangeify
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from tinygrad_nv.errors import HookError
from tinygrad_nv.hooks import captures, devices, layouts, methods, rewrites, threads
from tinygrad_nv.hooks.devices import add_device, install_decomposition, remove_cpu, remove_device
from tinygrad_nv.hooks.replaced import (
    TINYGRAD_VERSION,
    add,
    check_own,
    check_version,
    official,
    put_back,
    remove,
    replace,
    theirs,
)
from tinygrad_nv.hooks.rewrites import (
    configuration,
    flatten,
    inline,
    keep_functions,
    load_later,
    rewriting,
    rewritten,
)

__all__ = ["TINYGRAD_VERSION", "add_device", "configuration", "flatten", "inline", "install_decomposition",
           "keep_functions", "load_later", "official", "remove_cpu", "remove_device", "rewriting",
           "rewritten"]

OutsIns = tuple[tuple[int, ...], tuple[int, ...]]
Seconds = list[float | None]
Run = Callable[[UOp, realize.ExecContext], Seconds]


# **** what is registered ****

@dataclass(frozen=True)
class Compile:
    """The rest of the compilation, as a compile hook gets it. `beam` is 0 while candidates are timed."""
    beam: int
    run: Callable[[UOp], UOp]

    def __call__(self, linear: UOp) -> UOp: return self.run(linear)


@dataclass(frozen=True)
class CustomFunction:
    """Runs a CUSTOM_FUNCTION, as tinygrad's executors do; says which arguments it writes and reads."""
    execute: Callable[[realize.ExecContext, UOp, UOp], list[float | None]]
    outs_ins: Callable[[UOp], OutsIns]


_compiles: dict[str, Callable[[UOp, Compile], UOp]] = {}
_executes: dict[str, Callable[[UOp, realize.ExecContext, Run], Seconds]] = {}
_functions: dict[str, CustomFunction] = {}
_enabled = False
_before = list[bool]()  # what was in force before each block of `disabled` that has not ended


def add_rewrite(name: str, fn: Callable[[UOp], UOp], *keys: Callable[[], Hashable],
                needs: Iterable[Collection[Ops]] = ()) -> None:
    """Registers a rewrite of call bodies. Whatever it depends on besides the sink must be in what `keys`
    return; a key function that several rewrites share is called once. `needs` are sets of ops: a sink that
    has none of them completely is not given to `fn`; without `needs` every sink is."""
    rewrites.add_rewrite(name, fn, *keys, needs=needs)
    _apply()


def add_later(register: Callable[[], None]) -> None:
    """Registers a function that adds rewrites and checks: called once, before another is added or removed, a
    graph is rewritten or `configuration` asked for, or by `load_later()`."""
    rewrites.add_later(register)
    _apply()


def add_check(name: str, fn: Callable[[UOp, UOp], bool]) -> None:
    """Registers a check of what rewrites make. One that says False has changed what they will make."""
    load_later()
    add(rewrites.checks, "check", name, fn)


def remove_check(name: str) -> None:
    load_later()
    remove(rewrites.checks, "check", name)


def remove_rewrite(name: str) -> None:
    rewrites.remove_rewrite(name)
    _apply()


def add_shard_rules(name: str, rules: PatternMatcher) -> None:
    """Registers rules that resolve shards before tinygrad's own do, where rewrites are called."""
    layouts.add_shard_rules(name, rules)
    _apply()


def has_shard_rules(name: str) -> bool:
    """Whether rules are registered under this name."""
    return name in layouts.shard_rules


def remove_shard_rules(name: str) -> None:
    layouts.remove_shard_rules(name)
    rewrites.configured_cache.clear()
    _apply()


def add_compile(name: str, fn: Callable[[UOp, Compile], UOp]) -> None:
    """Registers a wrapper of compile_linear; the first is the outermost. TinyJit calls it at capture only."""
    add(_compiles, "compile", name, fn)
    _apply()


def remove_compile(name: str) -> None:
    remove(_compiles, "compile", name)
    _apply()


def add_execute(name: str, fn: Callable[[UOp, realize.ExecContext, Run], Seconds]) -> None:
    """Registers a wrapper of the execution of each call, also of a replayed TinyJit; the first is the
    outermost. `run(call, ctx)` is the rest; what it returns are seconds, where ctx.wait asks for them."""
    add(_executes, "execute", name, fn)
    _apply()


def is_watched() -> bool:
    """Whether any `add_execute` is there: code that launches without tinygrad then launches through it."""
    return bool(_executes)


def remove_execute(name: str) -> None:
    remove(_executes, "execute", name)
    _apply()


def add_custom_function(name: str, execute: Callable[[realize.ExecContext, UOp, UOp], list[float | None]],
                        outs_ins: Callable[[UOp], OutsIns]) -> None:
    """Registers the executor of CUSTOM_FUNCTION nodes whose arg is `name`, or starts with `name:`."""
    if name in ("encdec", "graph", "hcq", "validate", "submit_cmdbuf") or ":" in name:
        raise HookError(f"custom function name {name!r}", "a name without ':' that tinygrad does not have")
    add(_functions, "custom function", name, CustomFunction(execute, outs_ins))
    if official(): realize.custom_functions[name] = (execute, outs_ins)
    _apply()


def has_custom_function(name: str) -> bool:
    """Whether an executor is registered under this name."""
    return name in _functions


def remove_custom_function(name: str) -> None:
    remove(_functions, "custom function", name)
    if official(): del realize.custom_functions[name]
    _apply()


def add_method(name: str, fn: Callable[..., Any], always: bool = False) -> None:
    """Registers `fn(theirs, self, …)` for Tensor's method `name`; `theirs(self, …)` is tinygrad's own.
    `always`: while disabled, too."""
    methods.add_method(name, fn, always)
    _apply()


def remove_method(name: str) -> None: methods.remove_method(name)


def add_attribute(name: str, value: Any, always: bool = False) -> None:
    """Registers an attribute that tinygrad's Tensor does not have; `always`: while disabled, too."""
    methods.add_attribute(name, value, always)
    _apply()


def add_creation(name: str, fn: Callable[[Any, Any], tuple[UOp, Any] | None]) -> None:
    """Registers `fn(data, device)` for data that tinygrad's Tensor(data, device) does not know: the UOp and
    the device to make the Tensor of, or None."""
    methods.add_creation(name, fn)
    _apply()


def remove_attribute(name: str) -> None: methods.remove_attribute(name)


def remove_creation(name: str) -> None:
    methods.remove_creation(name)
    _apply()


# **** on and off ****

def enabled() -> bool:
    """Whether registered rewrites and compile hooks are in force."""
    return _enabled


def enable() -> None:
    """Puts rewrites and compile hooks in force. Raises `HookError` where tinygrad is not as expected."""
    _check()
    _set_enabled(True)


def disable() -> None:
    """Gives scheduling and compilation back to tinygrad. Registrations are kept for the next `enable()`."""
    _set_enabled(False)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """tinygrad's own lowering inside the block, for all threads; afterwards, also after an exception, as it
    was before. Of blocks that overlap, the last to end restores what the first has found."""
    with threads.LOWERING:
        before = _enabled
        disable()
        _before.append(before)
    try: yield
    finally:
        with threads.LOWERING: _set_enabled(_before.pop())


def _set_enabled(on: bool) -> None:
    global _enabled
    with threads.LOWERING:
        before, _enabled = _enabled, on
        try: _apply()
        except HookError:  # another package stands in the way: nothing has changed
            _enabled = before
            raise


def _check() -> None:
    check_version()
    if official(): return
    lowered = [fn for _, fn in theirs(schedule, "pm_schedule").patterns]
    check_own("tinygrad.schedule.get_kernel_graph", schedule.get_kernel_graph is rangeify.get_kernel_graph)
    check_own("tinygrad.schedule.pm_schedule", lowered == [schedule.lower_sink_to_linear])
    for name in ("compile_linear", "get_call_outs_ins"):
        fn = theirs(realize, name)
        own = fn is theirs(jit, name) and fn.__module__ == realize.__name__
        check_own(f"tinygrad.engine.realize.{name}", own)


# **** tinygrad's attributes: replaced, and put back ****

def _apply() -> None:
    """Makes tinygrad agree with what is registered and enabled; called after every change of either."""
    if _executes or (_functions and not official()): replace(realize, "pm_exec", _EXECUTOR)
    else: put_back(realize, "pm_exec")
    methods.apply(_enabled)
    for owner, attribute, ours in layouts.replacements():
        if _enabled and layouts.shard_rules: replace(owner, attribute, ours)
        else: put_back(owner, attribute)
    if official():
        _list(schedule.pre_schedule, (rewritten, configuration), _enabled and rewrites.has_rewrites())
        _list(realize.pre_compile, _compile, _enabled and bool(_compiles))
        return
    # hcq2 is imported by the first device that uses it, and takes what is in realize then
    users = [realize, jit, *filter(None, [sys.modules.get("tinygrad.runtime.support.hcq2")])]
    for wanted, attributes in (
        (_enabled and rewrites.has_rewrites(), [(schedule, "pm_schedule", rewrites.pm_schedule())]),
        (_enabled and bool(_compiles), [(realize, "compile_linear", _compile_linear),
                                        (jit, "compile_linear", _compile_linear)]),
        (bool(_functions), [*((owner, "get_call_name", _call_name) for owner in users if owner is not jit),
                            *((owner, "get_call_outs_ins", _outs_ins) for owner in users)]),
    ):
        for owner, attribute, ours in attributes:
            if wanted: replace(owner, attribute, ours)
            else: put_back(owner, attribute)


def _list(point: list[Any], entry: Any, wanted: bool) -> None:
    if wanted and entry not in point: point.append(entry)
    if not wanted and entry in point: point.remove(entry)


# **** around the compilation of a schedule ****

def _compile(linear: UOp, beam: int, inner: Callable[[UOp], UOp]) -> UOp:
    for fn in reversed(tuple(_compiles.values())):
        inner = functools.partial(_run_hook, fn, Compile(beam, inner))
    with threads.LOWERING: return inner(linear)


def _run_hook(fn: Callable[[UOp, Compile], UOp], inner: Compile, linear: UOp) -> UOp: return fn(linear, inner)


def _compile_linear(linear: UOp, beam: int | None = None, *args: Any, **kwargs: Any) -> UOp:
    def inner(linear: UOp) -> UOp: return theirs(realize, "compile_linear")(linear, beam, *args, **kwargs)
    return _compile(linear, BEAM.value if beam is None else beam, inner)


# **** execution, and custom functions ****

def custom_function(body: UOp) -> CustomFunction | None:
    """Returns what is registered for a call's body, if that is a CUSTOM_FUNCTION."""
    return _functions.get(body.arg.partition(":")[0]) if body.op is Ops.CUSTOM_FUNCTION else None


def _execute(ctx: realize.ExecContext, call: UOp, ast: UOp) -> list[float | None] | None:
    found = custom_function(ast)
    return None if found is None else found.execute(ctx, call, ast)


@functools.cache
def _pm_exec() -> PatternMatcher:
    custom = UPat(Ops.CUSTOM_FUNCTION, name="ast")
    ours = PatternMatcher([(UPat(Ops.CALL, src=(custom,), name="call", allow_any_len=True), _execute)])
    return ours + theirs(realize, "pm_exec")


class _Executor:
    """In the place of realize.pm_exec: what is registered around each call, and custom functions in it."""

    def rewrite(self, call: UOp, ctx: realize.ExecContext) -> Seconds:
        custom = _functions and not official()
        run: Run = (_pm_exec() if custom else theirs(realize, "pm_exec")).rewrite
        for fn in reversed(tuple(_executes.values())): run = functools.partial(fn, run=run)
        return run(call, ctx)


_EXECUTOR = _Executor()


def _outs_ins(call: UOp) -> OutsIns:
    if (found := custom_function(call.src[0])) is not None: return found.outs_ins(call)
    return theirs(realize, "get_call_outs_ins")(call)


def _call_name(call: UOp, *args: Any, **kwargs: Any) -> str:
    if custom_function(call.src[0]) is not None:
        return colored(call.src[0].arg.partition("#")[0], "yellow")  # what is behind it is for explain()
    return theirs(realize, "get_call_name")(call, *args, **kwargs)


# **** the CPU device ****

def install_cpu(ours: Mapping[str, Callable[[Any, Callable[[], bool]], Any]],
                graph: Callable[[], type]) -> None:
    """Puts `ours` of what tinygrad has there, by names in its module of the CPU device, into that module, for
    CPU devices opened from now on; their graphs are of the class that `graph()` gives while enabled. Each of
    `ours` is also given `enabled`."""
    devices.install_cpu(ours, graph, enabled)


# **** captures ****

def install_captures() -> None:
    """Has TinyJit copy an argument that is a view of a larger Tensor, and say which one has another size."""
    captures.install()


def remove_captures() -> None: captures.remove()


# **** threads ****

def install_threads() -> None:
    """Gives threads what tinygrad has one of: a connection to its cache, a capture, the right to a device."""
    threads.install()


def remove_threads() -> None: threads.remove()
