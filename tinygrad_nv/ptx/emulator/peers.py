"""Emulated GPUs that see each other's memory: their launches run beside one another.

Protocol: `Peers(gpus, seed)` joins emulators of different ordinals. `run` gets the work of each GPU, a
generator that yields what it waits for: a launch, as a function that makes its `Run` of its place among
peers, which is answered with the `Report`; or a `Point` that it has passed, or that another GPU's work has
to pass first. The launches of one GPU follow one another. GPUs take turns, by the seed; with seeds that four
does not divide, a GPU stands still now and then. When `run` returns, all is done, and ordered before what
comes next.

Memory of any of the GPUs may be used by all, and races between them are found. Flags in memory order them,
with accesses and fences of system scope (csrc/clocks.c). csrc/peers.c says more of turns, and of deadlocks.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator.buffer import Buffer, Multicast
from tinygrad_nv.ptx.emulator.emulator import Emulator
from tinygrad_nv.ptx.emulator.native import MOST_PEERS, library
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.emulator.running import Among, Run

TURNS = 100_000     # between looks at the keyboard
FIRST_MULTICAST, MULTICAST_GAP = 0x4000_0000_0000, 1 << 21

Launching = Callable[[Among | None], Run]


@dataclass(eq=False)
class Point:
    """A point in a GPU's work: passed or not; among peers, what is known there, by C's number of it."""
    passed: bool = False
    run: object = None
    number: int = -1


@dataclass(frozen=True)
class Passed:
    """The work has come to a point."""
    point: Point


@dataclass(frozen=True)
class Awaited:
    """The work goes on once another GPU's has passed a point."""
    point: Point


Asked = Launching | Passed | Awaited
Work = Generator[Asked, Report | None, None]


def alone(work: Work) -> None:
    """Does the work of a GPU without peers."""
    report = None
    try:
        while True:
            asked = work.send(report)
            report = None
            if isinstance(asked, Passed): asked.point.passed = True
            elif not isinstance(asked, Awaited): report = asked(None).to_end()
    except StopIteration: return


def launching(emulator: Emulator, *args: Any, **options: Any) -> Launching:
    """A launch with the arguments of `Emulator.launch`, as work yields it."""
    def prepare(among: Among | None) -> Run: return emulator.prepare_run(*args, among=among, **options)
    return prepare


class Peers:
    """GPUs that see each other's memory. Raises `PTXError` where two have the same addresses."""

    def __init__(self, gpus: Sequence[Emulator], seed: int = 0) -> None:
        self.gpus, self.seed, self.next_multicast = list(gpus), seed, FIRST_MULTICAST
        if len({gpu.ordinal for gpu in gpus}) < len(self.gpus):
            raise PTXError("two peers of one ordinal", 0, "GPUs whose addresses differ",
                           "Emulator(ordinal=0), Emulator(ordinal=1), …")

    def multicast(self, buffers: Sequence[Buffer]) -> Multicast:
        """The addresses at which multimem reaches memory of one size in each GPU."""
        sizes = {buffer.nbytes for buffer in buffers}
        if len(sizes) != 1 or not 1 <= len(buffers) <= MOST_PEERS:
            raise PTXError(f"a multicast object of {len(buffers)} buffers of {sorted(sizes)} bytes", 0,
                           f"1 to {MOST_PEERS} of one size")
        made = Multicast(self.next_multicast, sizes.pop(), tuple(buffer.ptr for buffer in buffers))
        self.next_multicast += -(-made.nbytes // MULTICAST_GAP + 1) * MULTICAST_GAP
        for gpu in self.gpus: gpu.multicasts.append(made)
        return made

    def run(self, works: Sequence[Work]) -> None:
        """Runs the work of each GPU beside that of the others, to the end."""
        session = _Session(self, list(works))
        try: session.run()
        finally: session.close()


class _Session:
    """One run: what C keeps of it."""

    def __init__(self, peers: Peers, works: list[Work]) -> None:
        self.peers, self.works, self.c = peers, works, library().c
        self.handle = int(self.c.peers_new(len(peers.gpus), ctypes.c_uint64(peers.seed)))
        self.running: dict[int, Run] = {}
        self.waiting: dict[int, Point] = {}
        self.pages: dict[Buffer, int] = {}      # which keeps buffers, too, that are freed meanwhile

    def run(self) -> None:
        for gpu in range(len(self.works)): self.advance(gpu, None)
        while self.running or self.waiting:
            ready = [gpu for gpu, point in self.waiting.items() if point.passed]
            for gpu in ready:
                self.learn(gpu, self.waiting.pop(gpu))
                self.advance(gpu, None)
            if ready: continue
            if not self.running:
                raise PTXError(f"GPU {min(self.waiting)} waits for what no GPU does", 0,
                               "an event that another GPU's work records")
            ended = self.c.peers_run(ctypes.c_void_p(self.handle), ctypes.c_uint64(TURNS))
            if ended >= 0: self.advance(ended // 4, self.running.pop(ended // 4).finish(ended % 4))

    def advance(self, gpu: int, report: Report | None) -> None:
        """A GPU's work goes on, to its next launch or to a point that no other GPU has passed."""
        while True:
            try: asked = self.works[gpu].send(report)
            except StopIteration: return
            report = None
            if isinstance(asked, Passed):
                point = asked.point
                point.passed, point.run = True, self
                point.number = self.c.peers_note(ctypes.c_void_p(self.handle), gpu)
            elif isinstance(asked, Awaited):
                if not asked.point.passed:
                    self.waiting[gpu] = asked.point
                    return
                self.learn(gpu, asked.point)
            else:
                run = asked(Among(self.handle, gpu, self.pages_of, self.buffers()))
                run.start()
                self.running[gpu] = run
                return

    def learn(self, gpu: int, point: Point) -> None:
        """Tells a GPU what is known at a point."""
        if point.run is self: self.c.peers_learn(ctypes.c_void_p(self.handle), gpu, point.number)

    def buffers(self) -> tuple[tuple[Buffer, int], ...]:
        """All memory that there is."""
        return tuple((buffer, number) for number, gpu in enumerate(self.peers.gpus)
                     for buffer in gpu.buffers.values())

    def pages_of(self, buffer: Buffer) -> int:
        """Returns where the shadow of a buffer is."""
        if buffer not in self.pages:
            nbytes = ctypes.c_uint64(buffer.nbytes)
            self.pages[buffer] = int(self.c.peers_pages(ctypes.c_void_p(self.handle), nbytes))
        return self.pages[buffer]

    def close(self) -> None:
        """Gives up what still runs."""
        for run in self.running.values(): run.abandon()
        for work in self.works: work.close()
        self.c.peers_free(ctypes.c_void_p(self.handle))
