"""Shared memory of a program, and the barriers between its accesses.

Protocol: `take` and `give` allocate bytes, first fit; the kernel's array is as long as what was in use at
most. Every access is announced (`reads`, `writes`), of a range of bytes or of a tensor that the program
writes: where another thread may have written what is read, or still read what is written, since the last
barrier of all threads, one is emitted first. All threads of a program take the same branches, so a barrier
may stand anywhere. Behind a branch the accesses of both sides count; a loop ends with a barrier where its
body has accesses that no barrier orders.

Copies by cp.async count as writes when they are issued; the barrier waits for them. Writes that wgmma reads
are fenced for it before the barrier.
"""
from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tinygrad_nv.ptx.builder import Kernel, Shared, Value

FEW = 1024          # bytes that need no barrier before they are written
HUGE = 1 << 30      # until it is known how much is needed
ALIGN = 1024


@dataclass(frozen=True)
class Access:
    """Access to bytes `start` … `end` of `space`. Where two have an `owner`, and the same, no element is of
    more than one thread."""
    space: Hashable
    start: int
    end: int
    write: bool
    owner: Hashable = None

    def conflicts(self, other: Access) -> bool:
        """Whether the two have to be in order."""
        return self.space == other.space and self.start < other.end and other.start < self.end and \
            (self.write or other.write) and (self.owner is None or self.owner != other.owner)


@dataclass(frozen=True)
class Mark:
    """Accesses ahead of a loop, and those in it, of which a barrier may be behind some."""
    pending: list[Access]
    inside: list[Access]
    copying: bool


class Arena:
    """Shared memory, and what has been accessed since the last barrier."""

    def __init__(self, kb: Kernel) -> None:
        self.kb = kb
        self.array = Shared(kb, "tiles", HUGE, ALIGN, 0)
        self.used: list[tuple[int, int]] = []
        self.nbytes = 0
        self.pending: list[Access] = []
        self.loops: list[list[Access]] = []     # accesses in the loops that are being written
        self.copying = False        # copies by cp.async have not been waited for
        self.unfenced = False       # writes that wgmma will read have no fence
        self.barrier: tuple[int, ...] = ()      # of all threads; else its number and how many there are
        self._address: Value | None = None

    def begin_after(self, nbytes: int, barrier: int, threads: int) -> None:
        """The array begins behind other shared memory; barriers are of some threads."""
        self.array = Shared(self.kb, "tiles", HUGE, ALIGN, -(-nbytes // ALIGN) * ALIGN)
        self.barrier = (barrier, threads)

    # **** allocation ****

    def take(self, nbytes: int, align: int = 16) -> int:
        """The first byte of so many. A few are taken where nothing has been accessed since the last barrier:
        a barrier costs more than bytes."""
        at, busy = 0, list(self.used)
        if nbytes <= FEW: busy += [(each.start, each.end) for each in self.pending if each.space == "shared"]
        for start, end in sorted(busy):
            if at + nbytes <= start: break
            at = max(at, -(-end // align) * align)
        self.used.append((at, at + nbytes))
        self.nbytes = max(self.nbytes, at + nbytes)
        return at

    def give(self, start: int) -> None:
        """Bytes that are needed no more. Their next writer waits for their readers."""
        self.used.remove(next(each for each in self.used if each[0] == start))

    def take_back(self, start: int, nbytes: int) -> None:
        """Gives back bytes that barriers of their own have guarded: all threads may still read them."""
        self.pending.append(Access("shared", start, start + nbytes, False))
        self.give(start)

    @contextmanager
    def scratch(self, nbytes: int, align: int = 16) -> Iterator[int]:
        """Bytes for the time of a block."""
        at = self.take(nbytes, align)
        try: yield at
        finally: self.give(at)

    @property
    def address(self) -> Value:
        """The shared address of the first byte (u32), made at the kernel's beginning."""
        if self._address is None:
            saved, self.kb.current = self.kb.current, self.kb.head
            try: self._address = self.array.address()
            finally: self.kb.current = saved
        return self._address

    def describe(self) -> str:
        """Returns what is in use at most, in words."""
        return f"{self.nbytes} B of operands and scratch at once"

    def declare(self) -> None:
        """Reserves what was in use."""
        if self.nbytes:
            self.kb.tiles.append(replace(self.array, nbytes=self.nbytes))

    # **** barriers ****

    def sync(self) -> None:
        """A barrier of all threads."""
        if self.copying: self.kb.cp_async_wait(0)
        self.note_sync()
        self.kb.sync(*self.barrier)

    def note_sync(self) -> None:
        """Notes what a barrier of all threads puts in order, ahead of it."""
        if self.unfenced and self.kb.hopper: self.kb.fence_proxy_async()
        self.pending, self.copying, self.unfenced = [], False, False

    def reads(self, start: int, nbytes: int, space: Hashable = "shared", owner: Hashable = None) -> None:
        """Bytes that this thread reads from here on."""
        self.accesses(Access(space, start, start + nbytes, False, owner))

    def writes(self, start: int, nbytes: int, space: Hashable = "shared", owner: Hashable = None) -> None:
        """Bytes that this thread writes from here on."""
        self.accesses(Access(space, start, start + nbytes, True, owner))

    def accesses(self, *each: Access) -> None:
        """Notes what this thread does from here on, in any order: a barrier for one is a barrier ahead of
        all."""
        if any(one.conflicts(other) for one in each for other in self.pending): self.sync()
        for noted in (self.pending, *self.loops): noted += [one for one in each if one not in noted]

    def mark(self) -> Mark:
        """Returns a mark where a loop begins."""
        self.loops.append([])
        return Mark(list(self.pending), self.loops[-1], self.copying)

    def close(self, mark: Mark) -> None:
        """The end of a loop's body: the next iteration follows."""
        if any(one.conflicts(other) for one in self.pending for other in mark.inside): self.sync()

    def leave(self, mark: Mark) -> None:
        """Notes the end of a loop, whose body may have run no time at all."""
        self.loops = [each for each in self.loops if each is not mark.inside]
        self.pending += [each for each in mark.pending if each not in self.pending]
        self.copying = self.copying or mark.copying

    @contextmanager
    def branches(self) -> Iterator[Branches]:
        """Sides of a branch, of which one runs."""
        made = Branches(self)
        yield made
        made.join()


class Branches:
    """The accesses of each side."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.before, self.copying = list(arena.pending), arena.copying
        self.after: list[Access] = []
        self.copied, self.unfenced = False, False

    @contextmanager
    def side(self) -> Iterator[None]:
        """One side."""
        self.arena.pending, self.arena.copying = list(self.before), self.copying
        yield
        self.after += [each for each in self.arena.pending if each not in self.after]
        self.copied = self.copied or self.arena.copying
        self.unfenced = self.unfenced or self.arena.unfenced

    def join(self) -> None:
        """Behind all of them."""
        self.arena.pending, self.arena.copying, self.arena.unfenced = self.after, self.copied, self.unfenced
