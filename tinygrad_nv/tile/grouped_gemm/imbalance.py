"""How unevenly rows are dealt to groups, in words: what explain() shows where offsets are known."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def imbalance(offsets: Sequence[int]) -> str:
    """The most rows of a group beside the mean, and the groups without any."""
    counts = [end - first for first, end in pairwise(offsets)]
    if not (total := sum(counts)): return f"no rows in {len(counts)} groups"
    mean, empty = total / len(counts), counts.count(0)
    most = f"{max(counts)} at most, {max(counts) / mean:.2f} times the mean of {mean:.1f}"
    return f"rows of a group: {most}, {empty} of {len(counts)} groups empty"
