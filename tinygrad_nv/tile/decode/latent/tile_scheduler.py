"""Tile scheduler of latents: persistent CTAs, splits of requests whose lengths are read on the device.

Protocol: `count` is called by one warp before a barrier of all: it reads the lengths and leaves in shared
memory the number of each request's first work tile. A request has, for each of its splits, one for each block
of 64 rows of each key head; a request of length 0 has them for one split without keys. A CTA takes every
number that is its own plus a multiple of how many CTAs there are, so that what a row's bits are does not
depend on how many there are. Blocks of rows of one split are neighbours: their CTAs read the same latents at
one time. A number's request is found by two ballots: among the lanes' shares of the requests, then within
one.

All lanes of a warp take part in `work_tiles`.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.copy import Bounds
from tinygrad_nv.tile.decode.latent.plan import LANES, LatentPlan
from tinygrad_nv.tile.decode.plan import Parameters, Span
from tinygrad_nv.tile.lanes import count_lanes


@dataclass(frozen=True)
class LatentTile:
    """64 rows of a key head, from row 64 · `block` on, and a split of a request's keys: `tiles` tiles of them
    from `first` on (s32)."""
    request: Value
    head: Value
    block: Value
    split: Value
    length: Value
    span: Span
    bounds: Bounds
    first: Value
    tiles: Value


class LatentTileScheduler:
    """The work tiles of a CTA."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters) -> None:
        self.kb, self.plan, self.given = kb, plan, given
        self.lane_ends = kb.shared("lane_ends", 4 * LANES)
        self.firsts = kb.shared("firsts", 4 * (LANES * plan.each + 1))

    def count(self) -> None:
        """One warp counts the work tiles of all requests, each lane those of its share."""
        kb, plan, lane = self.kb, self.plan, self.kb.special("laneid")
        own = lane * plan.each
        ends = [kb.reg("u32", 0)]
        for i in range(plan.each):
            number = own + i
            request, count = kb.reg("u32"), kb.reg("u32")
            kb.emit("min.u32", request, number, plan.spec.batch - 1)
            kb.emit("max.u32", count, Span(kb, plan, self.given.length(request)).count(), 1)
            ends.append(ends[-1] + kb.select(number < plan.spec.batch, count * plan.blocks, 0, "u32"))
        total = self._scan_lanes(ends[-1])
        kb.st("shared", "u32", (self.lane_ends.address() + lane * 4).at(), total)
        at, before = self.firsts.address() + own * 4, total - ends[-1]
        for i, end in enumerate(ends):  # the next lane's first, but for the last lane
            guard = lane == LANES - 1 if i == plan.each else None
            kb.emit("st.shared.u32", at.at(4 * i), before + end, guard=guard)

    def _scan_lanes(self, value: Value) -> Value:
        """Returns the sum of all lanes up to this one."""
        kb, lane = self.kb, self.kb.special("laneid")
        for distance in (1, 2, 4, 8, 16):
            other = kb.reg("u32")
            kb.emit("shfl.sync.up.b32", other, value, distance, 0, -1)
            value = value + kb.select(lane >= distance, other, 0, "u32")
        return value

    @contextmanager
    def work_tiles(self) -> Iterator[LatentTile]:
        """Emits the code inside so that it is done for each tile of this CTA."""
        kb = self.kb
        total = kb.ld("shared", "u32", self.firsts.at(4 * LANES * self.plan.each))[0]
        with kb.loop(kb.ctaid.x, total, kb.nctaid.x, name="work") as number: yield self._tile(number)

    def _tile(self, number: Value) -> LatentTile:
        """The work tile of a number."""
        kb, plan, spec, n = self.kb, self.plan, self.plan.spec, self.plan.schedule.block_n
        request = self._request(number)
        length = self.given.length(request)
        rest = number - kb.ld("shared", "u32", (self.firsts.address() + request * 4).at())[0]
        split, block = rest // plan.blocks, rest % plan.blocks
        span = Span(kb, plan, length)
        begin = span.low + split.to("s32") * span.keys
        bounds = Bounds(begin, kb.reg("s32"), kb.reg("s32"))
        kb.emit("max.s32", bounds.low, begin, span.first)
        kb.emit("min.s32", bounds.high, begin + span.keys, span.high)
        first = begin
        if spec.window is not None:  # tiles of keys that no row sees are not gone through
            first = kb.reg("s32")
            kb.emit("max.s32", first, begin, bounds.low & -n)
        tiles = (bounds.high - first + (n - 1)) // n
        return LatentTile(request, block // plan.row_blocks, block % plan.row_blocks, split, length, span,
                          bounds, first, tiles)

    def _request(self, number: Value) -> Value:
        """The request of a number: as many as end before it."""
        kb, each, lane = self.kb, self.plan.each, self.kb.special("laneid")
        ended = kb.ld("shared", "u32", (self.lane_ends.address() + lane * 4).at())[0]
        share = count_lanes(kb, ended <= number)
        if each == 1: return share
        own = kb.reg("u32")
        kb.emit("min.u32", own, lane, each - 1)
        request = share * each
        ended = kb.ld("shared", "u32", (self.firsts.address() + (request + own) * 4).at(4))[0]
        return request + count_lanes(kb, (ended <= number) & (lane < each))
