"""How much of what L2 is asked for comes from HBM.

Protocol: clusters that run at once ask for the same things at about the same time: the n-th read of each warp
counts as simultaneous. What is read for the first time among them comes from HBM, the rest from L2
(`first_share`). Where all that a launch reads fits into L2, HBM gives every byte once at most (`far_share`).
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinygrad_nv.ptx.emulator.tapes import Note

KEPT = 0.8  # of L2, for what is read again: assumed
SECTOR_BYTES = 32


def read_bytes(notes: np.ndarray) -> np.ndarray:
    """Bytes that each note reads from global memory."""
    rows = (notes["kind"] == Note.READS) * notes["count"].astype(np.int64) * notes["a"].astype(np.int64)
    lines = (notes["kind"] == Note.SECTORS) & (notes["b"] == 0)
    return rows + lines * notes["count"].astype(np.int64) * SECTOR_BYTES


def first_share(reads: Sequence[np.ndarray]) -> float:
    """Of the bytes that warps read, those that none of them has read before. 1 where nothing is read."""
    if not reads or not sum(map(len, reads)): return 1.0
    notes = np.concatenate(reads)
    order = np.argsort(np.concatenate([np.arange(len(each)) for each in reads]), kind="stable")
    notes = notes[order]
    nbytes = read_bytes(notes)
    _, first = np.unique(notes[["key", "count", "a", "b"]], return_index=True)
    return float(nbytes[first].sum() / max(1, nbytes.sum()))


def far_share(reads: Sequence[np.ndarray], memory: Sequence[tuple[int, int]], total: float,
              l2_bytes: int) -> float:
    """Of all `total` bytes of reads those that come from HBM. `reads`: of clusters that run at once, of each
    warp; `memory`: addresses and sizes of buffers."""
    share = first_share(reads)
    if not reads: return share
    starts = np.concatenate([each["key"] for each in reads])
    touched = sum(size for at, size in memory if ((starts >= at) & (starts < at + size)).any())
    return min(share, touched / max(total, 1.0)) if touched <= KEPT * l2_bytes else share
