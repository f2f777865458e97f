"""Kernels of ours that do not build: tinygrad's own lowering runs in their place.

Protocol. A template may raise while a rewrite builds a kernel (`attempt`), and a compiler may refuse its text
(`builds_all`). Both leave the nodes to tinygrad as if nothing had matched: one warning for each kernel on
stderr, and the reason in explain(). NV_STRICT=1 raises instead, at the place of the error.

`builds_all` compiles and loads what the rewrites of a graph have made before the graph becomes a schedule, so
nothing has run, no buffer is written and no TinyJit has captured anything when a kernel is refused. Texts
that were refused are in `program.refused`; the rewrites run again, and `program.program` raises `Refused` for
these. The compiler's output is in tinygrad's cache afterwards, where the compilation of the schedule finds
it.

Errors that are not of a kernel are raised: settings (`ConfigError`) and memory that is short.
"""
from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinygrad.device import Device, TinyELF
from tinygrad.helpers import PARALLEL, to_tuple
from tinygrad.uop.ops import Ops, UOp, to_function_name

from tinygrad_nv import config
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.program import KernelSource, Refused
from tinygrad_nv.runtime import programs
from tinygrad_nv.runtime.note import note_of

LONGEST = 400  # characters of an error that explain() and the warning show
T = TypeVar("T")
_good: set[KernelSource] = set()      # compiled and loaded in this process
_warned: set[str] = set()


def strict() -> bool:
    """Whether a kernel of ours that does not build is an error."""
    return bool(config.get("NV_STRICT"))


def attempt(template: str, value: UOp, make: Callable[[], T],
              fails: str = "its kernel does not build") -> T | None:
    """Returns what `make` builds for `value`; None, and a miss, where that `fails`."""
    try: return make()
    except Refused as no: reason = str(no)
    except (ConfigError, MemoryError, Unsupported): raise
    except Exception as error:
        if strict(): raise
        reason = f"{fails}: {_words(error)}"
        _warn(f"{template}: {fails}", error)
    program.miss(template, value, reason)
    return None


def guard_rewrite(template: str, rewrite: Callable[[UOp], UOp]) -> Callable[[UOp], UOp]:
    """A rewrite that leaves the graph as it is where its matching raises."""
    def run(sink: UOp) -> UOp:
        made = attempt(template, sink, lambda: rewrite(sink), "the rewrite fails")
        return sink if made is None else made
    return run


# **** compilers ****

def builds_all(before: UOp, after: UOp) -> bool:
    """Tells whether the kernels that rewrites have made of a graph build; the others are refused from now on.
    Those that were there before are the user's business."""
    if strict() or program.is_collecting(): return True
    given = {call.src[0] for call in _calls(before)}
    made = dict.fromkeys(_kernel(call) for call in _calls(after) if call.src[0] not in given)
    new = [kernel for kernel in made if kernel not in _good and kernel not in program.refused]
    if not new: return True
    _compile_all(new)
    failed = {kernel: error for kernel in new if (error := _failure(kernel)) is not None}
    _good.update(kernel for kernel in new if kernel not in failed)
    for kernel, error in failed.items():
        program.refused[kernel] = f"kernel {kernel.entry} does not build: {_words(error)}"
        _warn(f"kernel {kernel.entry} does not build", error)
    return not failed


def _calls(sink: UOp) -> list[UOp]:
    """Returns the calls of kernels that a compiler makes."""
    return [node for node in sink.toposort(enter_calls=False)
            if node.op is Ops.CALL and note_of(node.src[0]) is not None
            and node.src[0].src[-1].op is Ops.SOURCE]


def _kernel(call: UOp) -> KernelSource:
    body = call.src[0]
    return KernelSource(to_tuple(call.src[1].device)[0], body.src[0].arg.name, body.src[2].arg)


def _compile_all(kernels: list[KernelSource]) -> None:
    """Fills the compiler's cache, several at a time: what fails is found again by `_failure`."""
    compilers = {kernel: Device[kernel.device].renderer.compiler for kernel in kernels}
    if len(kernels) < 2 or PARALLEL < 2: return

    def fill(kernel: KernelSource) -> None:
        try: programs.compile_text(compilers[kernel], kernel.text)
        except Exception: return
    with ThreadPoolExecutor(PARALLEL.value) as threads: list(threads.map(fill, kernels))


def _failure(kernel: KernelSource) -> Exception | None:
    opened: Any = Device[kernel.device]
    compiler = opened.renderer.compiler
    try:
        binary = programs.compile_text(compiler, kernel.text)
        opened.runtime(TinyELF(binary, to_function_name(kernel.entry), opened.renderer.target, ()))
    except (ConfigError, MemoryError): raise
    except Exception as error: return error
    return None


# **** words ****

def _words(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= LONGEST else f"{words[:LONGEST]} ..."


def _warn(what: str, error: Exception) -> None:
    words = f"tinygrad_nv: {what}, tinygrad's own runs in its place: {_words(error)} (NV_STRICT=1 raises)"
    if words in _warned: return
    _warned.add(words)
    print(words, file=sys.stderr)
