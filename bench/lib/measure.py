"""Helpers that benches share: the spread of repeats, an aligned table, other processes, where results go."""
from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tinygrad_nv.runtime.programs import programs_hash

RESULTS = Path(__file__).parents[1] / "results"
SOURCES = (".py", ".c", ".h")
T = TypeVar("T")


def spread(values: Sequence[float]) -> str:
    """Smallest to largest."""
    return f"{min(values):.2f} … {max(values):.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    def align(line: list[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(cells)).rstrip()
    return "\n".join(map(align, lines))


def put_between(page: Path, mark: str, text: str) -> None:
    """Puts a text between the two lines `mark` of a page."""
    before, _, after = page.read_text().split(mark)
    page.write_text(f"{before}{mark}\n{text}\n{mark}{after}")


def ask(process: subprocess.Popen[str], line: str = "go") -> str:
    """Sends a line to a process: the line that it answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(line, file=process.stdin, flush=True)
    return process.stdout.readline()


def each(items: Sequence[T]) -> Iterator[T]:
    """The items, one after the other, with a progress line on stderr where that is a terminal."""
    for number, item in enumerate(items, 1):
        if sys.stderr.isatty():
            print(f"\r{number} of {len(items)}: {item}\x1b[K", end="", file=sys.stderr, flush=True)
        yield item
    if sys.stderr.isatty(): print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """From now on this process ends when its parent has, whatever it is waiting for."""
    parent = os.getppid()
    def watch() -> None:
        while os.getppid() == parent: time.sleep(1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{name or platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def git(*words: str) -> str:
    """Returns the output of git on this checkout; "" where there is no git, as on a machine that was sent the
    files."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False,
                              cwd=RESULTS.parent)
    except OSError: return ""
    return done.stdout.strip()


def sources() -> str:
    """A digest of the package's, the models' and the benches' sources: of what is measured and how, also
    where there is no git."""
    whole, root = hashlib.sha256(), RESULTS.parents[1]
    for folder, pattern in (("tinygrad_nv", "**/*"), ("models", "*.py"), ("bench", "*.py"),
                            ("bench", "*/*.py")):
        for path in sorted(root.joinpath(folder).glob(pattern)):
            if path.suffix not in SOURCES: continue
            whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def save(name: str, record: dict[str, Any]) -> Path:
    """Writes a result with the machine and the commit it was measured on, and a hash of the kernels that ran
    in this process."""
    head = git("rev-parse", "--short", "HEAD")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": processor(), "commit": head, "kernels": programs_hash()[:16],
                                **record}, indent=1) + "\n")
    print(f"written to {path.relative_to(RESULTS.parent.parent)}")
    return path
