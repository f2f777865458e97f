"""Statistics of a pool.

Protocol: `GraphPoolStats` is a snapshot; printed, it is a table with a line for each size.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tinygrad_nv.runtime.observe.memory_report import human

HEADER = ("size", "hits", "captures", "builds", "capture s", "rows", "padding", "updates", "evicted", "eager",
          "arena", "outputs", "graph")


@dataclass
class SizeCounts:
    """Counts of one size so far."""
    hits: int = 0           # calls served by a built graph
    captures: int = 0       # times the step was recorded and compiled
    builds: int = 0         # graph instantiations: after a capture, an eviction or an arena resize
    capture_s: float = 0.0  # in captures and builds
    rows: int = 0           # rows served
    padding: int = 0        # padding rows
    updates: int = 0        # graph nodes updated before a launch
    evictions: int = 0
    eager: int = 0          # calls that ran without one whole graph
    reasons: list[str] = field(default_factory=list)    # of eager calls, each once

    def because(self, reason: str) -> None:
        """Records why a call ran without one whole graph."""
        if reason not in self.reasons: self.reasons.append(reason)


@dataclass(frozen=True)
class BucketStats:
    """One size: counts so far, and bytes. `arena_bytes` and `output_bytes` are what it needs of the shared
    regions; `graph_bytes` is what the driver took to instantiate it, 0 while it is not built."""
    size: int
    hits: int
    captures: int
    builds: int
    capture_s: float
    rows: int
    padding: int
    updates: int
    evictions: int
    eager: int
    reasons: tuple[str, ...]
    arena_bytes: int
    output_bytes: int
    graph_bytes: int

    @property
    def padding_waste(self) -> float:
        """Padding rows / rows run."""
        return self.padding / run if (run := self.rows + self.padding) else 0.0

    def cells(self) -> tuple[str, ...]:
        """The cells of its line in the table."""
        counts = (self.updates, self.evictions, self.eager)
        sizes = (self.arena_bytes, self.output_bytes, self.graph_bytes)
        return (*map(str, (self.size, self.hits, self.captures, self.builds)), f"{self.capture_s:.2f}",
                str(self.rows), f"{self.padding_waste:.0%}", *map(str, counts), *map(human, sizes))


@dataclass(frozen=True)
class GraphPoolStats:
    """A pool: its sizes, and the bytes it holds. `limit_bytes` limits graphs, arena and outputs; None: no
    limit."""
    device: str
    buckets: tuple[BucketStats, ...]
    arena_bytes: int
    input_bytes: int
    output_bytes: int
    staging_bytes: int
    limit_bytes: int | None

    @property
    def graph_bytes(self) -> int: return sum(bucket.graph_bytes for bucket in self.buckets)

    @property
    def hits(self) -> int: return sum(bucket.hits for bucket in self.buckets)

    @property
    def padding_waste(self) -> float:
        """Padding rows / rows run, over all sizes."""
        padding, rows = sum(b.padding for b in self.buckets), sum(b.rows for b in self.buckets)
        return padding / (padding + rows) if padding + rows else 0.0

    def __str__(self) -> str:
        lines = [HEADER, *(bucket.cells() for bucket in self.buckets)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
                 for line in lines]
        limit = f" of {human(self.limit_bytes)}" if self.limit_bytes is not None else ""
        held = self.arena_bytes + self.output_bytes + self.graph_bytes
        table.append(f"{self.device}: {human(held)}{limit} in graphs ({human(self.graph_bytes)}), arena "
                     f"({human(self.arena_bytes)}) and outputs ({human(self.output_bytes)}); inputs "
                     f"{human(self.input_bytes)}, page-locked {human(self.staging_bytes)}")
        table += [f"size {bucket.size} without a whole graph: {reason}"
                  for bucket in self.buckets for reason in bucket.reasons]
        return "\n".join(table)


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
