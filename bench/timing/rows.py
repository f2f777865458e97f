"""Rows of timing/table.py: a problem, our kernels for it, and those of others that solve it.

Protocol: `ours(row)` and each `Peer.launched` give the launches' timings in their order; `total_seconds` is
their time as nodes of a graph, without PDL unless the row says so. A peer that needs a checkout names its
option in `needs`, and is left out where it was not given; `Checkouts` has them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.timing.gate_cases import GPU_NAME, HOPPER
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import in_row, seconds
from tinygrad_nv.tile.arguments import Contents
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.templates import TABLE


@dataclass(frozen=True)
class Checkout:
    """A public repository, and folders of headers that it needs beside."""
    folder: Path
    include: tuple[Path, ...] = ()


Checkouts = Mapping[str, Checkout]
Launches = Sequence[Timing]


@dataclass(frozen=True)
class Peer:
    """A kernel of others: `needs` is the option of timing/table.py that gives its checkout, "" for none."""
    name: str
    launched: Callable[[Checkouts], Launches]
    needs: str = ""


@dataclass(frozen=True)
class Row:
    """A problem. `flops`: of the problem, or `nbytes`: that any kernel must move; one of them is shown.
    `schedule`: None for the default. `given`: operands by name, instead of zeros. `launched`: our launches
    and their schedule in words, of a row that is no single spec; with `pdl` ours are launched so."""
    family: str
    name: str
    spec: Any
    peers: tuple[Peer, ...]
    flops: int = 0
    nbytes: int = 0
    schedule: Any = None
    given: Contents = field(default_factory=dict)
    launched: Callable[[], tuple[str, Launches]] | None = None
    pdl: bool = False

    def __str__(self) -> str: return f"{self.family}: {self.name}"


def ours(row: Row) -> tuple[str, Launches]:
    """Our schedule, and what it launches. Raises the project's errors."""
    if row.launched is not None: return row.launched()
    schedule = row.schedule or TABLE.choose(row.spec, HOPPER)
    made = TABLE.build(row.spec, schedule, HOPPER)
    return str(schedule), timings(made, row.spec, GPU_NAME, given=row.given)


def total_seconds(launches: Launches, pdl: bool = False) -> float:
    """Seconds of launches one after the other, as nodes of a graph, without what one launch costs."""
    gpu = figures(GPU_NAME)
    return seconds(in_row(launches, gpu, pdl), gpu) - gpu.launch_s
