"""What the emulator records of a launch for its prediction.

Protocol: `record_launch(...)` runs chosen clusters (shape.py) and records them whole; of all others that run
at the same time only what they read. These take most of the time, and of a kernel with roles only its loading
warps matter: where the others read nothing in the recorded clusters, all clusters run those warps alone,
which wait for nothing. They must read what they read beside others, or all run.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.ptx.assemble import Resources
from tinygrad_nv.ptx.emulator.tapes import Tape, Tapes
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.l2 import Reads, read_bytes, summarize_reads
from tinygrad_nv.ptx.timing.listing import Listing, listing
from tinygrad_nv.ptx.timing.shape import MANY_PLACES, Shape, clusters_to_record, places

UNEVEN = 0.1                # of the mean: the least that lengths of CTAs differ by to be told apart
BRIEF = 40000               # warp-instructions of a CTA of which only reads are kept: some tiles
WHOLE = 200000              # the same of a grid that runs at once, whose CTAs may have more tiles or fewer
LIMIT = 20_000_000          # of recorded clusters alone: they may wait for others
ATOMICS = "atom."           # where clusters may draw tiles, or wait until all have come


@dataclass(frozen=True)
class Recording:
    """An entry function of a listing and the tapes of its `clusters_to_record`. `reads`: what all clusters
    that run at once read; `memory`: addresses and sizes of buffers; `begins`: where recording begins."""
    listing: Listing
    entry: str
    shape: Shape
    tapes: Tapes
    reads: Reads
    memory: Sequence[tuple[int, int]]
    begins: Sequence[int]


def record_launch(text: str, entry: str, shape: Callable[[Resources], Shape], gpu: GPUFigures,
                  record: Callable[[Tapes], bool], memory: Sequence[tuple[int, int]],
                  strict: bool = True) -> Recording:
    """Records the clusters of a launch that tell its time on a GPU. `record` runs tapes, and says whether all
    of them ended."""
    listed = listing(text, gpu.arch, entry, strict)
    found = shape(listed.resources[entry])
    at_once = min(found.clusters, found.at_once(gpu))
    begins, whole = places(found, gpu), at_once == found.clusters
    if whole and ATOMICS not in text:
        tapes = Tapes(clusters_to_record(found, gpu, begins), idle=True, limit=LIMIT)
        if record(tapes):
            reads = _record_others(tapes, found, record)
            return Recording(listed, entry, found, tapes, reads, memory, begins)

    def record_tapes(begins: Sequence[int]) -> Tapes:
        tapes = Tapes(clusters_to_record(found, gpu, begins), idle=True, others=range(at_once),
                      brief=(WHOLE if whole else BRIEF) * found.ctas)
        record(tapes)
        return tapes
    tapes = record_tapes(begins)
    if whole:
        if tapes.draws: tapes = record_tapes(begins := places(found, gpu, drawn=True))
    elif _is_uneven(tapes): tapes = record_tapes(begins := places(found, gpu, count=MANY_PLACES))
    return Recording(listed, entry, found, tapes, summarize_reads(tapes.reads.values()), memory, begins)


def _record_others(tapes: Tapes, shape: Shape, record: Callable[[Tapes], bool]) -> Reads:
    """Records what all clusters of a grid read that runs at once, and sets `tapes.readers`."""
    def record_reads() -> Tapes:
        others = Tapes((), idle=True, others=range(shape.clusters), brief=WHOLE * shape.ctas,
                       readers=tapes.readers)
        record(others)
        return others
    tapes.readers = _readers(tapes.warps)
    others = record_reads()
    if tapes.readers and not _read_alike(counted(tapes), others):
        tapes.readers = 0
        others = record_reads()
    return summarize_reads(others.reads.values())


def counted(tapes: Tapes) -> list[Tape]:
    """Returns the warps that ran in other clusters too."""
    return [tape for tape in tapes.warps if not tapes.readers or tapes.readers >> tape.warp & 1]


def _readers(warps: Iterable[Tape]) -> int:
    """Returns the mask of the warps of a CTA that read; 0 where all do."""
    each = {tape.warp for tape in warps if read_bytes(tape.notes).any()}
    return sum(1 << warp for warp in each) if each != {tape.warp for tape in warps} else 0


def _read_alike(warps: Iterable[Tape], others: Tapes) -> bool:
    """Whether warps read the same where they ran alone, as far as that is recorded."""
    for tape in warps:
        mine = tape.notes[read_bytes(tape.notes) > 0]
        theirs = others.reads.get((tape.cta, tape.warp), mine[:0])
        both = min(len(mine), len(theirs))
        if len(theirs) > len(mine) or 4 * both < len(mine): return False
        if not np.array_equal(mine[["key", "count"]][:both], theirs[["key", "count"]][:both]): return False
    return True


def differ(known: np.ndarray) -> bool:
    """Whether clusters are not all about as long, by numbers and steps of some."""
    return bool(np.ptp(known[:, 1]) >= UNEVEN * known[:, 1].mean())


def _is_uneven(tapes: Tapes) -> bool:
    """Whether clusters differ."""
    steps: dict[int, int] = {}
    for tape in tapes.warps: steps[tape.cluster] = steps.get(tape.cluster, 0) + len(tape.sources)
    return differ(np.array([*steps.items()]))
