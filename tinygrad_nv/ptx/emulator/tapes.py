"""Tapes: the instructions that chosen clusters' warps executed, in each warp's order, with what tells them
apart in time: passes through shared memory, phases of barriers, copies and where they lie.

Protocol: `Emulator.launch(..., tapes=Tapes((0, 66)))` runs clusters 0 and 66 of the grid and no other, and
fills `tapes.warps`, one `Tape` for each warp of theirs. csrc/tape.c says what a step and a note are. """
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

KIND_BITS, SOURCE_BITS, PASSES_BITS = 8, 20, 11
FAR, LOOP = 256, 8  # steps to the next try; instructions of the loop around it
RAW = np.dtype([("kind", "<u4"), ("count", "<u4"), ("key", "<u8"), ("a", "<u8"), ("b", "<u8")])
NOTE = np.dtype([("kind", "<u4"), ("source", "<i4"), ("count", "<u4"), ("key", "<u8"), ("a", "<u8"),
                 ("b", "<u8")])


class Note(IntEnum):
    """Kinds of notes: csrc/tape.c."""
    WAITED = 1
    FAILED = 2
    ARRIVED = 3
    LOADS = 4
    READS = 5
    WRITES = 6
    SECTORS = 7
    MEETS = 8
    JOINS = 9
    FOLLOWS = 10
    DRAWN = 11
    REDUCED = 12


@dataclass(frozen=True)
class Tape:
    """A warp's, of the CTA `rank` of a cluster. `sources`: the number of each step's PTX instruction;
    `passes`: through shared memory; `first_note` and `end_note`: its notes. Failed try_waits, and what their
    loops executed, are left out."""
    cluster: int
    rank: int
    cta: int
    warp: int
    sources: np.ndarray
    passes: np.ndarray
    first_note: np.ndarray
    end_note: np.ndarray
    notes: np.ndarray


@dataclass
class Tapes:
    """Tapes of the clusters that run and are recorded, and what they did. `idle`: tensor cores add random
    numbers instead of products, to save time. Of `others` only what they read is recorded, in the first
    `brief` warp-instructions of each: `reads`, the notes of each CTA's warps; `readers`, a mask, has the
    warps of theirs that run, alone, so that none of them waits (0: all run). `draws`: how often a warp drew
    a work tile from a counter. `limit`: warp-instructions after which nothing runs on (0: the emulator's)."""
    clusters: Sequence[int] = (0,)
    idle: bool = False
    others: Sequence[int] = ()
    brief: int = 0
    readers: int = 0
    limit: int = 0
    warps: list[Tape] = field(default_factory=list)
    reads: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    draws: int = 0

    def __post_init__(self) -> None: self.numbers = np.array([*self.clusters, *self.others], np.int32)

    def read(self, library: Any, machine: Any) -> None:
        """Reads what C has kept, before the machine is freed."""
        self.draws = library.c.machine_draws(machine)
        for number in range(library.c.machine_tape_count(machine)):
            raw = library.c.machine_tape(machine, ctypes.c_int32(number)).contents
            if not raw.brief: self.warps.append(_tape(raw))
            elif raw.note_count: self.reads[raw.cta, raw.warp] = _notes(raw)


def _tape(raw: Any) -> Tape:
    steps = _copy_array(raw.steps, raw.step_count, np.dtype("<u4"))
    last = _copy_array(raw.notes, raw.note_count, RAW)["kind"] < 1 << 31
    notes = _notes(raw)
    noted = steps >> 31 == 1
    ends = np.flatnonzero(last) + 1
    end = np.zeros(len(steps), np.int32)
    end[noted] = ends[:int(noted.sum())]
    first = np.zeros(len(steps), np.int32)
    first[noted] = np.concatenate(([0], ends))[:int(noted.sum())]
    sources = (steps & (1 << SOURCE_BITS) - 1).astype(np.int32)
    keep = _without_failures(sources, noted, first, notes)
    passes = (steps >> SOURCE_BITS & (1 << PASSES_BITS) - 1).astype(np.int32)
    return Tape(raw.cluster, raw.rank, raw.cta, raw.warp, sources[keep], passes[keep], first[keep],
                end[keep], notes)


def _notes(raw: Any) -> np.ndarray:
    found = _copy_array(raw.notes, raw.note_count, RAW)
    notes = np.zeros(len(found), NOTE)
    for name in ("count", "key", "a", "b"): notes[name] = found[name]
    notes["kind"] = found["kind"] & (1 << KIND_BITS) - 1
    notes["source"] = found["kind"] >> KIND_BITS & (1 << SOURCE_BITS) - 1
    return notes


def _copy_array(address: int | None, count: int, dtype: np.dtype) -> np.ndarray:
    if not count or address is None: return np.zeros(0, dtype)
    return np.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype).copy()


def _without_failures(sources: np.ndarray, noted: np.ndarray, first: np.ndarray,
                      notes: np.ndarray) -> np.ndarray:
    """From a try_wait that failed up to where the same is tried again, nothing of the loop is kept; other
    lanes may have gone on meanwhile."""
    keep = np.ones(len(sources), bool)
    tried = np.flatnonzero(noted)
    failed = tried[notes["kind"][first[tried]] == Note.FAILED] if len(tried) else tried
    for at in failed:
        keep[at] = False
        again = np.flatnonzero(sources[at + 1:at + FAR] == sources[at])
        if not len(again): continue
        between = slice(at + 1, at + 1 + int(again[0]))
        beyond = sources[between] - sources[at]
        keep[between] &= noted[between] | (beyond < 0) | (beyond > LOOP)
    return keep
