"""How much of what L2 is asked for comes from HBM.

Protocol: clusters that run at once ask for the same things at about the same time: the n-th read of each warp
counts as simultaneous. What is read for the first time among them comes from HBM, the rest from L2; each PTX
instruction that reads has a share of its own (`first_shares`), since queries and keys, for example, are read
at different rates than the recorded beginnings of clusters show. Where all that a launch reads fits into L2,
HBM gives every byte once at most, and gets nothing (`far_shares`).
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


def first_shares(reads: Sequence[np.ndarray]) -> dict[int, float]:
    """Of the bytes that each instruction reads, those that no warp has read before."""
    if not sum(map(len, reads)): return {}
    notes = np.concatenate(reads)
    order = np.argsort(np.concatenate([np.arange(len(each)) for each in reads]), kind="stable")
    notes = notes[order]
    nbytes = read_bytes(notes)
    _, first = np.unique(notes[["key", "count", "a", "b"]], return_index=True)
    new = np.zeros(len(notes), np.int64)
    new[first] = nbytes[first]
    sources = np.unique(notes["source"][nbytes > 0])
    return {int(each): float(new[notes["source"] == each].sum() / nbytes[notes["source"] == each].sum())
            for each in sources}


def far_shares(reads: Sequence[np.ndarray], memory: Sequence[tuple[int, int]], recorded: np.ndarray,
               times: float, l2_bytes: int) -> np.ndarray:
    """Of each recorded note the share of its bytes that comes from HBM. `reads`: of clusters that run at
    once, of each warp; `memory`: addresses and sizes of buffers; the whole launch has `times` as many
    notes."""
    known = first_shares(reads)
    nbytes, shares = read_bytes(recorded), np.ones(len(recorded))
    for source, share in known.items(): shares[recorded["source"] == source] = share
    starts = np.sort(recorded["key"][np.isin(recorded["kind"], (Note.READS, Note.WRITES, Note.SECTORS))])
    touched = sum(size for at, size in memory
                  if np.searchsorted(starts, at) < np.searchsorted(starts, at + size))
    far = float((shares * nbytes).sum()) * times
    kept = touched <= KEPT * l2_bytes
    if kept and far > touched: shares *= touched / far
    shares[nbytes == 0] = 0.0 if kept else 1.0  # of writes: those that do not stay in L2
    return shares
