"""What the kinds of `tinygrad-nv bench` share: numbers of options, a progress bar, a file of figures."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import RequestError


def count(text: str) -> int:
    """A whole number from 1 on."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31: return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")


def write(path: Path, record: dict[str, Any]) -> None:
    """Figures as JSON."""
    try: path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error}", "a file in a directory there is",
                           "change the path") from error


@contextmanager
def progress(words: str, count: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words, total=count)
        yield lambda: bar.advance(task)
