"""A progress bar for graphs that are captured ahead of use.

Protocol: on stderr, only if that is a terminal, and removed at the end.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tinygrad_nv.runtime.observe.memory_report import human


@contextmanager
def progress(sizes: Sequence[int], held: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with each size that is done; `held` returns the pool's bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[memory]}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        first = f"size {sizes[0]}" if sizes else ""
        task = bar.add_task(f"graphs: {first}", total=len(sizes), memory="")
        def advance(size: int) -> None:
            left = [other for other in sizes if other < size]
            bar.update(task, advance=1, refresh=True, memory=f"{human(held())} held",
                       description=f"graphs: size {left[0]}" if left else "graphs")
        yield advance
