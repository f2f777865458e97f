"""Lines of the program's source that PTX is of, where nvcc wrote them down (-lineinfo)."""
from __future__ import annotations

import functools
import re
from typing import NamedTuple

LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')


class Place(NamedTuple):
    """A line of a file."""
    file: str
    line: int

    def __str__(self) -> str: return f"{self.file}:{self.line}"


@functools.lru_cache(8)
def _lines(ptx: str) -> tuple[list[str], dict[int, str]]:
    lines = ptx.splitlines()
    return lines, {int(found[1]): found[2] for found in map(FILE.match, lines) if found}


def place(ptx: str, line: int) -> Place | None:
    """The source of a line of PTX, from 1; None where it is not told."""
    lines, files = _lines(ptx)
    for at in range(min(line, len(lines)) - 1, -1, -1):
        if (found := LOC.match(lines[at])) is not None:
            return Place(files.get(int(found[1]), "?"), int(found[2]))
        if lines[at].lstrip().startswith((".entry", ".visible .entry", ".func")): return None
    return None


def quotations(ptx: str, line: int) -> list[str]:
    """The line of PTX, and where its source is."""
    lines, _ = _lines(ptx)
    if not 0 < line <= len(lines): return []
    at = place(ptx, line)
    return [f"PTX {line}: {lines[line - 1].strip()}", *([f"at {at}"] if at else [])]
