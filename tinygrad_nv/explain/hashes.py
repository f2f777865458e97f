"""Hashes of what runs: the same for the same graph and schedules, in any process.

Protocol: of a kernel `graph_hash` is of what it computes (its spec; of a kernel of tinygrad's its graph) and
`schedule_hash` of how (schedule and source; of one of tinygrad's nothing, as it is not compiled yet).
`step_hash` is of all kernels of a step in their order. SHA-256, of which 16 hexadecimal digits are shown.
"""
from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from typing import Protocol

from tinygrad_nv.table import align_columns

DIGITS = 16


class Hashed(Protocol):
    """Fields of a `KernelRecord` that are hashed."""

    @property
    def name(self) -> str: ...
    @property
    def template(self) -> str | None: ...
    @property
    def spec(self) -> Hashable: ...
    @property
    def schedule(self) -> Hashable: ...
    @property
    def source(self) -> str: ...
    @property
    def graph(self) -> str: ...


def graph_hash(kernel: Hashed) -> str:
    """A hash of what a kernel computes."""
    return kernel.graph if kernel.spec is None else _hash(kernel.template, repr(kernel.spec))


def schedule_hash(kernel: Hashed) -> str:
    """A hash of how a kernel of this package computes it; "" of another."""
    return "" if kernel.template is None else _hash(repr(kernel.schedule), kernel.source)


def step_hash(kernels: Sequence[Hashed]) -> str:
    """A hash of all kernels in their order."""
    return _hash(*(each for kernel in kernels
                     for each in (kernel.name, graph_hash(kernel), schedule_hash(kernel))))


def hash_table(kernels: Sequence[Hashed]) -> str:
    """A line for each kernel that differs from those before, and how often it runs; then the step's hash."""
    times: dict[tuple[str, str, str], int] = {}
    for kernel in kernels:
        key = kernel.name, graph_hash(kernel)[:DIGITS], schedule_hash(kernel)[:DIGITS] or "-"
        times[key] = times.get(key, 0) + 1
    rows = [("kernel", "graph", "schedule", "times"), *((*key, str(count)) for key, count in times.items())]
    return "\n".join([*align_columns(rows, (3,)), f"step {step_hash(kernels)[:DIGITS]}"])


def _hash(*words: str | None) -> str:
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()
