"""How much of what L2 is asked for comes from HBM.

Protocol: clusters that run at once ask for the same things at about the same time: the n-th read of each warp
counts as simultaneous. What is read for the first time among them comes from HBM, the rest from L2; each PTX
instruction that reads has a share of its own (`first_shares`), since queries and keys, for example, are read
at different rates than the recorded beginnings of clusters show. Where all that a launch reads fits into L2,
HBM gives every byte once at most, and gets nothing (`shares_of`). Where it does not, HBM gets what is
written; of reductions, which many clusters add to the same place, each byte of a buffer once at most.

What several SMs of a GPC ask for at about the same time goes to L2 once (the L2 request coalescer, Nsight
Compute's "lrc"), though each SM gets its own copy.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.ptx.emulator.tapes import Note
from tinygrad_nv.ptx.timing.gpu import GPUFigures

KEPT = 0.8  # of L2, for what is read again: assumed
GPCS = 8    # groups of SMs that ask L2 for a line together (its request coalescer)
SECTOR_BYTES = 32
GLOBAL = (Note.READS, Note.WRITES, Note.REDUCED, Note.SECTORS)


def read_bytes(notes: np.ndarray) -> np.ndarray:
    """Bytes that each note reads from global memory."""
    rows = (notes["kind"] == Note.READS) * notes["count"].astype(np.int64) * notes["a"].astype(np.int64)
    lines = (notes["kind"] == Note.SECTORS) & (notes["b"] == 0)
    return rows + lines * notes["count"].astype(np.int64) * SECTOR_BYTES


def reduction_bytes(notes: np.ndarray) -> np.ndarray:
    """Bytes that each note has added, or the like, to global memory."""
    rows = (notes["kind"] == Note.REDUCED) * notes["count"].astype(np.int64) * notes["a"].astype(np.int64)
    lines = (notes["kind"] == Note.SECTORS) & (notes["b"] == 2)
    return rows + lines * notes["count"].astype(np.int64) * SECTOR_BYTES


def last_shares(notes: np.ndarray, memory: Sequence[tuple[int, int]], times: float) -> np.ndarray:
    """Returns the share of what each note writes that HBM gets: all, of reductions no more than a buffer
    has."""
    nbytes, shares = reduction_bytes(notes), np.ones(len(notes))
    for at, size in memory:
        there = (nbytes > 0) & (notes["key"] >= at) & (notes["key"] < at + size)
        if (reduced := float(nbytes[there].sum()) * times) > size: shares[there] = size / reduced
    return shares


@dataclass(frozen=True)
class Reads:
    """Reads of clusters that run at once: `nbytes` in all; `first`: by instruction, the share of its bytes
    that no warp has read before."""
    nbytes: int
    first: Mapping[int, float]


def summarize_reads(notes: Iterable[np.ndarray]) -> Reads:
    """Returns what the warps read whose notes these are."""
    reads = list(notes)
    return Reads(sum(int(read_bytes(each).sum()) for each in reads), first_shares(reads))


def first_shares(reads: Sequence[np.ndarray]) -> dict[int, float]:
    """Returns the share of the bytes that each instruction reads that no warp has read before."""
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


def shares_of(known: Mapping[int, float], memory: Sequence[tuple[int, int]], recorded: np.ndarray,
              times: float, together: int, gpu: GPUFigures) -> np.ndarray:
    """Returns for each recorded note [share of its bytes that comes from HBM, share that L2 serves]. `known`:
    of `first_shares`, of clusters that run at once; `memory`: addresses and sizes of buffers; the whole
    launch has `times` as many notes; an SM has `together` CTAs, of which one at a time reads in step with
    other SMs."""
    nbytes = read_bytes(recorded)
    # an instruction that none of them came to reads like the others
    shares = np.full(len(recorded), float(np.mean([*known.values()])) if known else 1.0)
    for source, share in known.items(): shares[recorded["source"] == source] = share
    near = 1 - gpu.coalesced / together * (1 - np.minimum(1.0, GPCS * shares))
    near[nbytes == 0] = 1.0
    starts = np.sort(recorded["key"][np.isin(recorded["kind"], GLOBAL)])
    touched = sum(size for at, size in memory
                  if np.searchsorted(starts, at) < np.searchsorted(starts, at + size))
    far = float((shares * nbytes).sum()) * times
    kept = touched <= KEPT * gpu.l2_bytes
    if kept and far > touched: shares *= touched / far
    writes = nbytes == 0
    shares[writes] = 0.0 if kept else last_shares(recorded, memory, times)[writes]
    return np.stack([shares, near], 1)
