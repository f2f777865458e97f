"""Predicted times of collectives among GPUs of one machine: α + β · bytes that a GPU sends.

Protocol: `seconds(kind, nbytes, ranks, arch)`, None of a GPU without figures. Those of an H100 are fitted to
NCCL's times that vLLM publishes for bfloat16 all-reduces over NVLink (0.5 to 4 MB among 4 and 6 GPUs, 21 to
53 µs), and miss them by up to 22 %. Nothing here was measured on this machine, and more than one machine is
not covered.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """α, the time of a collective of no bytes, and how fast a GPU sends to all others."""
    latency_s: float
    bytes_per_s: float


LINKS = {"sm_90a": Link(19e-6, 230e9)}


def sent(kind: str, nbytes: int, ranks: int) -> float:
    """Bytes that a rank sends: `nbytes` are all elements of all_reduce, broadcast, send and recv, those of
    one rank otherwise."""
    others = ranks - 1
    if kind == "all_reduce": return 2 * others / ranks * nbytes
    return nbytes if kind in ("broadcast", "send", "recv") else others * nbytes


def seconds(kind: str, nbytes: int, ranks: int, arch: str) -> float | None:
    """Of a collective of this many bytes."""
    link = LINKS.get(arch)
    return None if link is None else link.latency_s + sent(kind, nbytes, ranks) / link.bytes_per_s
