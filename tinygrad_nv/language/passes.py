"""Kernels that are programs of the tile language, pass by pass.

Protocol: `show_passes(build, name)` runs a build once more, and is the text that its passes leave
(tile/language/passes.py): of all of them, each under its name, or of one. `NAMES` has the passes of each kind
of target.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinygrad_nv.cpu.language.kernel import PASSES as OF_CPU
from tinygrad_nv.errors import RequestError
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.language.gpu.kernel import PASSES as OF_GPU
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.passes import Made, passes_of
from tinygrad_nv.tile.language.program import FRONTEND

ALL = "all"
NAMES = {kind: tuple(each.name for each in (*FRONTEND, *own))
         for kind, own in (("gpu", OF_GPU), ("cpu", OF_CPU))}
Build = Callable[[], Any]


def check(name: str, kinds: tuple[str, ...] = ("gpu", "cpu")) -> None:
    """Raises `RequestError` for a pass that there is not."""
    if name == ALL or any(name in NAMES[kind] for kind in kinds): return
    words = "; ".join(f"{', '.join(NAMES[kind])} ({kind.upper()})" for kind in kinds)
    raise RequestError(f"pass {name!r}", f"{ALL}, or one of {words}", "choose one of these")


def show_passes(build: Build, name: str = ALL) -> str:
    """Returns what passes make in a build: all of them, each under its name, or one. Raises `RequestError`
    for a pass that the build does not have."""
    check(name)
    found = passes_of(build)
    return "\n\n".join(f"{_head(program, i, len(found))}{_show(made, name)}"
                       for i, (program, made) in enumerate(found, 1))


def list_passes(build: Build) -> str:
    """A line for each pass of a build, with how many lines of text it makes."""
    found = passes_of(build)
    tables = [_head(program, i, len(found)) + "\n".join(_table(made))
              for i, (program, made) in enumerate(found, 1)]
    return "\n\n".join(tables)


def _head(program: Program, number: int, count: int) -> str:
    return f"// launch {number} of {count}: {program.name}\n" if count > 1 else ""


def _table(made: list[Made]) -> list[str]:
    rows = [(each.name, str(len(each.text.splitlines())), each.sentence) for each in made]
    return align_columns([("pass", "lines", ""), *rows], numbers=(1,))


def _show(made: list[Made], name: str) -> str:
    if name != ALL:
        if (found := next((each for each in made if each.name == name), None)) is None:
            raise RequestError(f"pass {name!r} of a kernel without it",
                               f"one of {', '.join(each.name for each in made)}", "choose one of these")
        return found.text
    before, sections = "", []
    for number, each in enumerate(made, 1):
        text = "no change" if each.text == before else each.text
        sections.append(f"// {number} {each.name}: {each.sentence}\n{text}")
        before = each.text
    return "\n\n".join(sections)
