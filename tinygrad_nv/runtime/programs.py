"""Compiled programs kept from one process to the next.

Protocol: tinygrad caches the compiler's output by source text, but rewrites every kernel from its graph to
that text again in each process, some 50 ms a kernel. `compile_cached` is a compile hook that stores whole
programs on disk under the key tinygrad uses in memory (graph, renderer, settings that change code) together
with tinygrad's version and the compiler's own cache key. NV_PROGRAM_CACHE=0 turns it off.

With DEBUG >= 3 or VIZ programs are made anew: what these show is shown as programs are made.

Not stored: programs BEAM would choose anew (their graphs carry the beam width) and programs that were
given, not made. Of these the compiler's output is cached by their text; `finish` takes it from there:
tinygrad would start its compile workers for that, a second each.
"""
from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tinygrad import dtypes
from tinygrad.codegen import to_program, to_program_cache, to_program_key
from tinygrad.device import Compiler
from tinygrad.helpers import CCACHE, DEBUG, VIZ, diskcache_get, diskcache_put
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.hooks import TINYGRAD_VERSION, Compile
from tinygrad_nv.runtime.renderers import renderer_of

TABLE = "nv_program_3"  # the number goes up when what is stored changes


_read = 0  # programs that this process has from disk
_elsewhere = 0  # programs that other processes have compiled for this one
_early: set[tuple[str, str]] = set()  # texts that it has compiled before their schedule was


def programs_known() -> int:
    """How many programs this process has, compiled or read."""
    return len(to_program_cache)


def programs_hash() -> str:
    """A hash of the programs that this process has, by name and text, whatever their order: of what ran."""
    found = {hashlib.sha256(f"{each.arg.name}\0{each.src[2].arg}".encode()).hexdigest()
             for each in to_program_cache.values() if isinstance(each, UOp) and len(each.src) > 2}
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def programs_compiled() -> int:
    """How many of them it compiled, and those that were compiled for it."""
    return programs_known() - _read + _elsewhere


def count_elsewhere(programs: int) -> None:
    """Counts programs that another process has compiled for this one."""
    global _elsewhere
    _elsewhere += programs


@dataclass(frozen=True)
class Compilations:
    """Counts of what this process has compiled and captured since this was made: programs of every device, by
    C compiler, ptxas or tinygrad, and steps that were traced."""
    programs: int = field(default_factory=lambda: programs_compiled())
    steps: int = field(default_factory=lambda: _captured)

    def since(self) -> int:
        """How many by now."""
        return programs_compiled() - self.programs + _captured - self.steps


_captured = 0  # steps that were traced, not read


def count_capture() -> None:
    """Counts a step that is traced now."""
    global _captured
    _captured += 1


def compile_text(compiler: Compiler, text: str) -> bytes:
    """Returns what a compiler makes of a text, by way of tinygrad's cache. `finish` finds it there. Raises
    what the compiler raises."""
    if compiler.cachekey is None: return compiler.compile(text)
    if (found := _read_cache(compiler.cachekey, text)) is not None: return bytes(found)
    _early.add((compiler.cachekey, text))
    return compiler.compile_cached(text)


def compile_cached(linear: UOp, inner: Compile) -> UOp:
    """Fills tinygrad's program cache from disk before compiling, and the disk after. Kernels with FP8 are
    compiled here: the processes that tinygrad compiles in have none of our conversions."""
    if inner.beam: return inner(linear)
    disk = CCACHE and config.get("NV_PROGRAM_CACHE") and DEBUG < 3 and not VIZ
    global _read
    made: dict[tuple[Any, ...], str] = {}
    for call in _calls(linear):
        if (found := _to_make(call)) is None: continue
        key = to_program_key(*found)
        if key in to_program_cache or key in made: continue
        name = disk_key(found[1], key) if disk else ""
        if disk and (program := _read_cache(TABLE, name)) is not None:
            to_program_cache[key] = program
            _read += 1
            continue
        if disk: made[key] = name
        if any(node.dtype in dtypes.fp8s for node in found[0].toposort()): to_program(*found)
    result = inner(linear)
    for key, name in made.items():
        if key in to_program_cache: _store(TABLE, name, to_program_cache[key])
    return result


def _read_cache(table: str, key: str) -> Any:
    """Returns what the disk has; None in threads other than the one that opened it, which alone it serves."""
    try: return diskcache_get(table, key)
    except sqlite3.ProgrammingError: return None


def _store(table: str, key: str, program: UOp) -> None:
    with contextlib.suppress(sqlite3.ProgrammingError): diskcache_put(table, key, program)


def _calls(linear: UOp) -> Iterable[UOp]:
    """The calls of a schedule, and where schedules are in it, as in a captured graph, those of these."""
    nested = any(call.op is not Ops.CALL or call.src[0].op in (Ops.LINEAR, Ops.CUSTOM_FUNCTION)
                 for call in linear.src)
    return linear.toposort() if nested else linear.src


def _to_make(call: UOp) -> tuple[UOp, Renderer] | None:
    """The kernel graph and the renderer of a call that has to be compiled."""
    if call.op is not Ops.CALL or call.src[0].op is not Ops.SINK: return None
    if getattr(call.src[0].arg, "beam", 0): return None
    return call.src[0], _renderer(call)


def finish(linear: UOp) -> None:
    """Puts the programs of a schedule that were given as text, and compiled before, into tinygrad's program
    cache."""
    global _read
    for call in linear.src:
        body = call.src[0]
        if body.op is not Ops.PROGRAM or body.src[-1].op is not Ops.SOURCE: continue
        renderer = _renderer(call)
        if to_program_key(body, renderer) in to_program_cache: continue
        table, text = renderer.compiler.cachekey, body.src[-1].arg
        if table is not None and _read_cache(table, text) is not None:
            to_program(body, renderer)
            _read += (table, text) not in _early


def _renderer(call: UOp) -> Renderer:
    return renderer_of(call.device if isinstance(call.device, str) else call.device[0])


def disk_key(renderer: Renderer, key: tuple[Any, ...]) -> str:
    """Name of a program on disk."""
    parts = (TINYGRAD_VERSION, renderer.compiler.cachekey, type(renderer).__qualname__, *map(repr, key[:1]),
             *map(str, key[2:]))
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
