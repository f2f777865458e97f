"""Grids whose warps draw their work tiles from a counter, from a few clusters that were recorded.

Protocol: `find_drawn_tiles(tapes)` has the tiles that were drawn, and how long each was: the steps of the
drawing warp, a producer's, from there to its next draw. `makespan(tiles, clusters)` deals the tiles in the
counter's order to all clusters, each to the one that is free first, and says when the last one ends. That
tells what the mean of the recorded clusters does not: under a causal mask, drawn from short rows to long
ones, most clusters wait for a long row at the end, a seventh of the time with eight tiles for each.

Tiles that were not recorded: where lengths repeat, as with the rows of a head, which those recorded tell,
they are as long as those around their place in the row; else as the nearest one. A warp's last draw finds
none.
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.ptx.emulator.tapes import Note, Tape

MOST = 1 << 22      # tiles: what a counter of something else may say
LEAST = 8           # tiles that tell whether their lengths repeat
RISES = 2.3         # of the longest less the shortest: what lengths that rise once in a row add up to is 2


@dataclass(frozen=True)
class DrawnTiles:
    """`known`: numbers and steps of tiles, in the counter's order; `beyond`: the first number that was of
    none; of each warp that draws, its cluster, its steps up to the first draw, and all of them."""
    known: np.ndarray
    beyond: int
    drawing: Sequence[tuple[int, int, int]]

    @property
    def of_cluster(self) -> float:
        """How many warps of a cluster draw."""
        return len(self.drawing) / len({cluster for cluster, _, _ in self.drawing})

    def whole(self, clusters: Sequence[int]) -> float:
        """Steps of some clusters' drawing warps, on average; 0 where none drew."""
        found = [steps for cluster, _, steps in self.drawing if cluster in clusters]
        return float(np.mean(found)) if found else 0.0


def find_drawn_tiles(tapes: Sequence[Tape]) -> DrawnTiles:
    """Returns what warps of recorded clusters drew, some of which drew at least once."""
    found: list[tuple[int, int]] = []
    drawing, beyond = [], []
    for tape in tapes:
        draws = np.flatnonzero(tape.notes["kind"] == Note.DRAWN)
        if not len(draws): continue
        noted = np.flatnonzero(tape.end_note > tape.first_note)
        begins = noted[np.searchsorted(tape.end_note[noted], draws, "right")]
        numbers = tape.notes["key"][draws] // np.maximum(tape.notes["a"][draws], 1)
        found += zip(numbers[:-1].tolist(), np.diff(begins).tolist(), strict=True)
        drawing.append((tape.cluster, int(begins[0]), len(tape.sources)))
        beyond.append(int(numbers[-1]))
    return DrawnTiles(np.array(sorted(found), np.int64).reshape(-1, 2), min(beyond), drawing)


def makespan(tiles: DrawnTiles, clusters: int) -> float:
    """Steps from the launch to the end of the last tile: the mean of those that may be the last, between the
    last one found and the first draw that found none, at the ends of rows where there are such. Where the
    counter has no tiles: of a warp that draws, on average."""
    warps = max(1, round(clusters * tiles.of_cluster))
    first = np.array([[cluster * warps // clusters - warps, steps] for cluster, steps, _ in tiles.drawing])
    if not len(tiles.known): return float(first[:, 1].max())
    if max(tiles.beyond, tiles.known[:, 0].max()) > MOST:
        return float(np.mean([steps for _, _, steps in tiles.drawing]))
    begun = _steps_before(first, tiles.known)
    both = np.concatenate([first - [0, begun], tiles.known])
    # a warp that draws its first tile, too, has done nothing before
    known, begin = (both, -warps) if row_of(both) else (tiles.known, 0)
    row, end = row_of(known), int(tiles.known[:, 0].max()) + 1
    every = lengths(known, np.arange(begin, max(end, tiles.beyond)), row, begin or None)
    ends = (every[:-begin] + begun).tolist() if begin else np.resize(first[:, 1], warps).tolist()
    ends = deal(ends, every[-begin:end - begin].tolist())
    found = {end: max(ends)}
    for number in range(end, tiles.beyond):
        ends = deal(ends, [float(every[number - begin])])
        found[number + 1] = max(ends)
    whole = [steps for number, steps in found.items() if row and (number - begin) % row == 0]
    return float(np.mean(whole or list(found.values())))


def _steps_before(first: np.ndarray, known: np.ndarray) -> int:
    """Returns the steps of first tiles that are a warp's beginning, where lengths of further ones repeat."""
    if not (row := row_of(known)): return 0
    return max(0, round(float(np.median(first[:, 1] - lengths(known, first[:, 0], row, int(first[0, 0]))))))


def deal(ends: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Returns when each of some servers ends that began with what ends at `ends`, and takes the next length
    whenever it is free."""
    heap = list(ends)
    heapq.heapify(heap)
    for length in lengths: heapq.heapreplace(heap, heap[0] + length)
    return heap


def row_of(known: np.ndarray, rows: Sequence[int] = ()) -> int:
    """Tiles after which lengths repeat, rising or falling once in between: of `rows`, or of all there may be
    the one after which they repeat best; 0 where they do not."""
    if len(known) < LEAST: return 0
    numbers, steps = known.T

    def variation(row: int) -> tuple[int, int]:
        found = steps[np.argsort(numbers % row, kind="stable")]
        # of those that fit alike the one with most factors of two: rows are heads times tiles
        return int(np.abs(np.diff(found, append=found[0])).sum()), -(row & -row)
    best = min(rows or range(2, int(np.ptp(numbers)) // 2), key=variation, default=0)
    return best if best and variation(best)[0] <= RISES * int(np.ptp(steps)) else 0


def lengths(known: np.ndarray, numbers: np.ndarray, row: int, begin: int | None = None) -> np.ndarray:
    """Steps of each tile. A row begins at the tile `begin`; None: where lengths change most."""
    if not row:
        at = np.argsort(known[:, 0], kind="stable")
        halves = (known[at[1:], 0] + known[at[:-1], 0] + 1) // 2
        return known[at, 1][np.searchsorted(halves, numbers, "right")].astype(float)
    places, where = np.unique((known[:, 0] - (begin or 0)) % row, return_inverse=True)
    means = np.bincount(where, known[:, 1]) / np.bincount(where)
    if begin is not None: return np.interp((numbers - begin) % row, places, means)
    # not from the end of a row to the beginning of the next
    first = int(np.abs(np.diff(means, prepend=means[-1])).argmax())
    return np.interp((numbers - places[first]) % row, (np.roll(places, -first) - places[first]) % row,
                     np.roll(means, -first))
