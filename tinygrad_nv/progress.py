"""A progress bar for what takes seconds: on stderr, only where that is a terminal, and removed at the end."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]    # how many are done, of at most how many


@contextmanager
def bar(words: str) -> Iterator[Progress]:
    """A bar with these words."""
    from rich.console import Console
    from rich.progress import Progress as Shown
    console = Console(stderr=True)
    with Shown(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(words, total=None)
        yield lambda done, count: shown.update(task, completed=done, total=count)
