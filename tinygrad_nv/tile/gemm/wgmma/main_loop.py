"""The consumers' main loop: wgmmas of a warpgroup's rows of A with all of B, stage after stage.

Protocol: `sum(iterations)` gives the sums of the next tile, in ping-pong when it is this consumer's turn. At
any time one stage's wgmmas are in flight and the next stage's are being issued, so a stage is given back when
the one after it has been issued (`wait_group 1`). fp8 sums are kept to about 14 bits by the tensor core: each
stage, or 128 of K, has its own, which are waited for and added to others in float32.

Two consumers that share a tile end it one after the other: the second pauses before its last stages until
the first has issued all of its own, and multiplies alone while the first runs its epilogue; while it runs its
own, the first multiplies the next tile's first stages.

Descriptors are built of a low word, which is all that moves, and a constant high word.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.gemm.wgmma.plan import PROMOTED_K, WARPGROUP, WgmmaPlan
from tinygrad_nv.tile.layout import K_BYTES, OperandTile
from tinygrad_nv.tile.pipeline import OrderedBarrier, Pipeline

ENDED = 2  # the named barrier at which the second of two consumers waits for the first
NEVER = 0xFFFFFFFF
Sums = list[list[Value]]  # of each 64 rows, the registers of a wgmma


@dataclass(frozen=True)
class Descriptors:
    """Descriptors of one operand: `base` is the low word of the first stage's, `high` the constant word."""
    kb: Kernel
    tile: OperandTile
    base: Value
    high: Value

    @staticmethod
    def of(kb: Kernel, tile: OperandTile, start: Value) -> Descriptors:
        """Returns the descriptors of the tile of the first stage, at the shared address `start` (u32)."""
        bits = tile.descriptor
        low = (start & 0x3FFFF) >> 4
        if bits & 0xFFFFFFFF: low = low | (bits & 0xFFFFFFFF)
        high = kb.reg("u32", bits >> 32)
        return Descriptors(kb, tile, low, high)

    def stage(self, stage: Value) -> Value:
        """The low word for a stage."""
        return self.base + stage * (self.tile.nbytes >> 4)

    def at(self, low: Value, offset_bytes: int) -> Value:
        """A descriptor so many bytes into the stage whose low word is given."""
        made = self.kb.reg("b64")
        self.kb.emit("mov.b64", made, [low + (offset_bytes >> 4) if offset_bytes else low, self.high])
        return made


class OperandStages(Protocol):
    """Stages that the main loop reads: the ring, and where the stages of both operands begin (u32)."""
    ring: Shared

    @property
    def starts(self) -> tuple[Value, Value]: ...


class MainLoop:
    """The main loop of one consumer warpgroup."""

    def __init__(self, kb: Kernel, plan: WgmmaPlan, ring: Pipeline, ordered: OrderedBarrier | None,
                 loads: OperandStages) -> None:
        self.kb, self.plan, self.ring, self.ordered = kb, plan, ring, ordered
        self.kind = "s32" if plan.spec.accumulate == dtypes.int32 else "f32"
        self.loads = loads

    def begin(self) -> None:
        """Registers of the consumer: its place in the ring, its descriptors, the barriers it arrives at."""
        kb, plan, ring = self.kb, self.plan, self.ring
        self.at = ring.cursor()
        self.last = kb.reg("u32", 0)  # the stage whose products are in flight
        # the same in all lanes; ptxas keeps what comes from redux, and all made of it, in uniform registers
        self.consumer = kb.reg("u32")
        kb.emit("redux.sync.min.u32", self.consumer, kb.tid.x // WARPGROUP, -1)
        a, b = self.loads.starts
        if plan.readers > 1: a = a + self.consumer * plan.a.at_mn(plan.rows)
        self.a, self.b = Descriptors.of(kb, plan.a, a), Descriptors.of(kb, plan.b, b)
        lane = kb.special("laneid")
        self.mine = lane < plan.peers
        self.empty_barriers = ring.empty_barriers(self._peer(lane) if plan.peers > 1 else None)
        if self.ordered is not None:
            self.ordered.begin(self.consumer, lane == 0)
            self.at.jump(self.consumer * plan.iterations)
        self.sums: Sums = [kb.regs(self.kind, plan.schedule.block_n // 2) for _ in range(plan.subtiles)]
        self.partial = kb.regs("f32", plan.schedule.block_n // 2) if plan.needs_promotion else []

    def _peer(self, lane: Value) -> Value:
        """The cluster rank that a lane gives stages back to: lanes below `cluster_m` those of this CTA's
        column, further ones those of its row but itself."""
        kb, s, rank = self.kb, self.plan.schedule, self.kb.special("cluster_ctarank")
        row, column = rank % s.cluster_m, rank // s.cluster_m
        others = lane - s.cluster_m
        others = others + kb.select(others >= column, 1, 0, "u32")
        return kb.select(lane < s.cluster_m, column * s.cluster_m + lane, row + others * s.cluster_m, "u32")

    def sum(self, iterations: Number) -> Sums:
        """The sums of the next `iterations` stages (at least one), when it is this consumer's turn."""
        if self.ordered is not None: self.ordered.wait()
        if self.plan.needs_promotion: self._accumulate_promoted(iterations)
        else: self._accumulate(iterations)
        return self.sums

    def _arrive(self) -> None:
        """Waits until the next stage is there."""
        self.ring.wait(self.at)

    def _arrive_issued(self) -> None:
        if self.ordered is not None: self.ordered.arrive()

    def _accumulate(self, iterations: Number) -> None:
        """The first stage apart: it adds to nothing, and none is given back."""
        kb, pause, ended = self.kb, *self._ends(iterations)
        self._issue(False)
        self._next()
        with kb.loop(1, iterations, kind="u32") as i:
            if pause is not None: kb.emit("bar.sync", ENDED, self.plan.threads, guard=i == pause)
            self._issue(True)
            kb.wgmma_wait(1)
            self.ring.release(self.empty_barriers, self.last, self.mine)
            self._next()
        self._arrive_issued()
        if ended is not None: kb.emit("bar.arrive", ENDED, self.plan.threads, guard=ended)
        kb.wgmma_wait(0)
        self.ring.release(self.empty_barriers, self.last, self.mine)

    def _ends(self, iterations: Number) -> tuple[Value | None, Value | None]:
        """The stage before which this consumer pauses, and whether it says that it has ended; None where
        consumers end together. A part of a tile may be shorter than the ring."""
        kb, alone = self.kb, self.plan.stagger_stages
        if not alone: return None, None
        second, first = self.consumer > 0, self.consumer == 0
        if isinstance(iterations, Value):
            second, first = (each & (iterations >= self.plan.schedule.depth) for each in (second, first))
        return kb.select(second, iterations - alone, NEVER, "u32"), first

    def _issue(self, further: bool) -> None:
        """wgmmas of the next stage."""
        self._arrive()
        self.kb.wgmma_fence()
        self._stage(dict(enumerate(self.sums)), further, 0, self.plan.steps)
        self.kb.wgmma_commit()

    def _next(self) -> None:
        self.last.set(self.at.stage)
        self.at.advance()

    def _accumulate_promoted(self, iterations: Number) -> None:
        """Each 128 of K, and each 64 rows, apart."""
        kb, steps = self.kb, self.plan.steps
        for row in self.sums:
            for each in row: each.set(0.0)
        at_once = PROMOTED_K * self.plan.a.size // K_BYTES
        with kb.loop(0, iterations, kind="u32"):
            self._arrive()
            for first in range(0, steps, at_once):
                for i, row in enumerate(self.sums):
                    kb.wgmma_fence()
                    self._stage({i: self.partial}, False, first, min(first + at_once, steps))
                    kb.wgmma_commit()
                    kb.wgmma_wait(0)
                    if first + at_once >= steps and i + 1 == len(self.sums):
                        self.ring.release(self.empty_barriers, self.at.stage, self.mine)
                    for each, more in zip(row, self.partial, strict=True): each += more
            self.at.advance()
        self._arrive_issued()

    def _stage(self, rows: Mapping[int, Sequence[Value]], further: bool, first: int, end: int) -> None:
        """wgmmas `first` … `end` of the stage for some 64 rows; whether the first adds to what was there."""
        kb, plan = self.kb, self.plan
        a, b = self.a.stage(self.at.stage), self.b.stage(self.at.stage)
        trans = (plan.a.major == "MN", plan.b.major == "MN")
        for step in range(first, end):
            right = self.b.at(b, plan.b.at_step(step))
            for i, row in rows.items():
                left = self.a.at(a, plan.a.at_mn(64 * i) + plan.a.at_step(step))
                kb.wgmma(plan.shape, plan.types, row, left, right, further or step > first, trans=trans)
