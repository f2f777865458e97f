"""A pipeline of stages between one producer thread and the warps that read.

Protocol: a stage has two mbarriers. A phase of `full` is one round of its copies: the producer's arrival,
which names the bytes, and the bytes. A phase of `empty` is one round of its readers: a lane of each warp that
reads the stage arrives when its products are done. With clusters a copy goes to several CTAs, so `empty`
counts the warps of all CTAs that the copies of this one reach, and each warp arrives at all CTAs whose copies
reach it.

    producer                                        readers
        at = ring.cursor(producer=True)                 at = ring.cursor()
        ring.acquire(at)   waits for empty, names       ring.wait(at)      waits for full
                           the bytes                    … products …
        … copies of `nbytes` bytes to full[at] …        ring.release(barrier of the stage)
        at.advance()                                    at.advance()

A cursor's parity is that of the phase to wait for: a producer begins with 1, which passes on fresh barriers.
All arrival counts come from `Pipeline`'s own fields.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import SINK, Barriers, Kernel, MemoryOperand, Value


@dataclass(frozen=True)
class PipelineState:
    """A place in the ring: the stage, and the parity of its phase (u32 registers)."""
    ring: Pipeline
    stage: Value
    parity: Value

    def advance(self) -> None:
        """The next stage."""
        if self.ring.depth == 1:  # always the first: a register fewer from tile to tile
            self.parity.__ixor__(1)
            return
        self.stage.__iadd__(1)
        self._wrap()

    def skip(self, count: int) -> None:
        """`count` stages further: those that other readers have."""
        rounds, rest = divmod(count, self.ring.depth)
        self.stage.__iadd__(rest)
        if rounds % 2: self.parity.__ixor__(1)
        self._wrap()

    def jump(self, count: Value) -> None:
        """Skips as `skip` does, by a register."""
        total = self.stage + count
        self.stage.set(total % self.ring.depth)
        self.parity.__ixor__(total // self.ring.depth & 1)

    def _wrap(self) -> None:
        # selected, not predicated: two instructions fewer in the main loop
        kb, depth = self.ring.kb, self.ring.depth
        wrapped = self.stage >= depth
        self.parity.__ixor__(kb.select(wrapped, 1, 0, "u32"))
        self.stage.set(kb.select(wrapped, self.stage - depth, self.stage, "u32"))


class Pipeline:
    """`depth` stages of `nbytes` bytes. `warps` read a stage in each CTA; `peers` CTAs are reached by this
    one's copies, itself among them, and as many CTAs' copies reach it. `name` is that of the barriers.
    `loaders` threads beside the producer copy to each stage, too, of this CTA alone: after `vacant`, they
    arrive at the barrier that it gives."""

    def __init__(self, kb: Kernel, depth: int, nbytes: int, warps: int, peers: int = 1,
                 name: str = "full_and_empty", loaders: int = 0) -> None:
        self.loaders = loaders
        self.kb, self.depth, self.nbytes, self.warps, self.peers = kb, depth, nbytes, warps, peers
        self.barriers: Barriers = kb.mbarriers(name, 2 * depth)
        self.base = self.barriers.address()

    @property
    def full_arrivals(self) -> int:
        """The producer's, and those of others that copy; bytes are counted apart."""
        return 1 + self.loaders

    @property
    def empty_arrivals(self) -> int:
        """One for each warp that reads what this CTA's producer writes."""
        return self.warps * self.peers

    def init(self) -> None:
        """Makes the barriers: one thread; a fence and a barrier of all follow."""
        for stage in range(self.depth):
            self.kb.mbarrier_init(self.barriers[stage], self.full_arrivals)
            self.kb.mbarrier_init(self.barriers[self.depth + stage], self.empty_arrivals)

    def cursor(self, producer: bool = False) -> PipelineState:
        """The first stage."""
        return PipelineState(self, self.kb.reg("u32", 0), self.kb.reg("u32", int(producer)))

    def _full(self, at: PipelineState) -> Value: return self.base + at.stage * 8

    def acquire(self, at: PipelineState) -> MemoryOperand:
        """Waits until the stage's readers are done, names the bytes to come; the barrier for the copies."""
        full = self._full(at)
        self.kb.mbarrier_wait(full.at(8 * self.depth), at.parity)
        self.kb.mbarrier_expect(full.at(), self.nbytes)
        return full.at()

    def vacant(self, at: PipelineState) -> MemoryOperand:
        """Waits until the stage's readers are done; the barrier at which a loader arrives."""
        full = self._full(at)
        self.kb.mbarrier_wait(full.at(8 * self.depth), at.parity)
        return full.at()

    def wait(self, at: PipelineState) -> None:
        """Waits until the stage's bytes are there."""
        self.kb.mbarrier_wait(self._full(at).at(), at.parity)

    def empty_barriers(self, rank: Value | None = None) -> Value:
        """The address (u32) of the `empty` barriers that this lane arrives at: its own CTA's, or those of
        the CTA of a cluster rank."""
        own = self.base + 8 * self.depth
        return own if rank is None else self.kb.mapa(own, rank)

    def release(self, empty_barriers: Value, stage: Value, mine: Value) -> None:
        """Arrives at the stage's barrier among `empty_barriers`, in lanes where `mine` holds."""
        space = "cta" if self.peers == 1 else "cluster"
        self.kb.emit(f"mbarrier.arrive.shared::{space}.b64", SINK, (empty_barriers + stage * 8).at(),
                    guard=mine)


class OrderedBarrier:
    """Readers that take turns at whole tiles: while one multiplies, the others finish theirs. A phase of a
    reader's barrier is one turn given to it; the first reader's first turn is there from the beginning."""

    def __init__(self, kb: Kernel, readers: int, warps: int) -> None:
        self.kb, self.readers, self.warps = kb, readers, warps
        self.barriers: Barriers = kb.mbarriers("turns", readers)

    def init(self) -> None:
        """Makes the barriers: every warp of the reader before gives the turn."""
        for reader in range(self.readers): self.kb.mbarrier_init(self.barriers[reader], self.warps)

    def begin(self, reader: Value, mine: Value) -> None:
        """Begins as reader number `reader`; lanes where `mine` holds, one of each warp, give the turn."""
        self.mine = mine
        self.own = self.barriers.address() + reader * 8
        following = self.kb.select(reader == self.readers - 1, 0, reader + 1, "u32")
        self.next = self.barriers.address() + following * 8
        self.parity = self.kb.select(reader == 0, 1, 0, "u32")

    def wait(self) -> None:
        """Waits for the turn."""
        self.kb.mbarrier_wait(self.own.at(), self.parity)
        self.parity ^= 1

    def arrive(self) -> None:
        """Gives it to the next reader."""
        self.kb.emit("mbarrier.arrive.shared::cta.b64", SINK, self.next.at(), guard=self.mine)
