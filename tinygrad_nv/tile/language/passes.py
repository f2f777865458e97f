"""Passes: the steps from a function to a kernel, each with a name, and a watch over what they make.

Protocol: a table of `Pass`es belongs to the file that runs it: FRONTEND (program.py) makes a Program of a
function, PASSES of gpu/kernel.py and of cpu/language/kernel.py a kernel of that. `run_passes` runs a table on
the state of one build, which has its `program` in the end. There is no other description of the steps: inside
`with watch() as seen:` each pass leaves what it has made as text, as soon as it has ended, and functions that
keep their results (`keep_results`) run again.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.language.ir import Program

_here = threading.local()


class State(Protocol):
    """A build, as its passes read and leave it."""
    @property
    def program(self) -> Program: ...


S = TypeVar("S", bound=State)
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Pass(Generic[S]):
    """A step. `run` says in words why the build ends here; nothing where it goes on. `show` is the text of
    what it has made."""
    name: str
    sentence: str
    run: Callable[[S], Sequence[str] | None]
    show: Callable[[S], str]


@dataclass(frozen=True, eq=False)
class Made:
    """The text of what a pass has made in a build."""
    name: str
    sentence: str
    text: str
    state: State

    @property
    def program(self) -> Program:
        """The program of the build."""
        return self.state.program


@dataclass(eq=False)
class Seen:
    """Texts of passes since a watch began, and results of functions that keep them."""
    passes: list[Made] = field(default_factory=list)
    results: dict[Any, Any] = field(default_factory=dict)


def run_passes(passes: Sequence[Pass[S]], state: S) -> Sequence[str]:
    """Runs passes in their order. Returns why there is no kernel, in words; nothing where there is one."""
    seen = _now()
    for each in passes:
        found = each.run(state) or ()
        if seen is not None:
            text = f"refused: {'; '.join(found)}" if found else each.show(state)
            seen.passes.append(Made(each.name, each.sentence, text.rstrip(), state))
        if found: return found
    return ()


def _now() -> Seen | None: return getattr(_here, "seen", None)


@contextlib.contextmanager
def watch() -> Iterator[list[Made]]:
    """Collects what the passes of this thread make inside the block."""
    before, _here.seen = _now(), Seen()
    try: yield _here.seen.passes
    finally: _here.seen = before


def keep_results(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keeps results of a function that runs passes; in a watch they are made again, once."""
    def keep(fn: Callable[P, R]) -> Callable[P, R]:
        kept: Any = functools.lru_cache(most)(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if (seen := _now()) is None: return kept(*args, **kwargs)
            key = fn, args, tuple(kwargs.items())
            if key not in seen.results: seen.results[key] = fn(*args, **kwargs)
            return seen.results[key]
        vars(call)["cache_clear"] = kept.cache_clear
        return call
    return keep


def passes_of(build: Callable[[], Any]) -> list[tuple[Program, list[Made]]]:
    """Returns what each pass makes in a build, of each of its programs: those of the frontend run again, too,
    where the function still gives this program. A pass that refuses the program is the last."""
    found: dict[Program, list[Made]] = {}
    with watch() as seen:
        try: build()
        except ScheduleError:
            if not seen: raise
    for each in seen: found.setdefault(each.program, []).append(each)
    return [(program, [*_frontend(program), *made]) for program, made in found.items()]


def _frontend(program: Program) -> list[Made]:
    if program.retrace is None: return []
    with watch() as seen: again = program.retrace()
    return seen if again.key == program.key else []
