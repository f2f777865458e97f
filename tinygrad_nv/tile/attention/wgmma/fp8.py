"""The main loop of flash_wgmma for operands of 8 bits (e4m3), as FlashAttention-3 has it: scales, weights of
8 bits, values transposed.

Scales. Of q and k: where all keys have one, both are part of the softmax's factor, and cost nothing for an
element; else a block's sums are multiplied by that of its keys. A warp's rows have one scale of q, a block of
columns one of k and one of v. That of v comes in as a block's part of the result is added in float32, which
also bounds what the 14 bits of wgmma's sums of 8-bit products lose: no such sum goes over more than a block.

Weights are 2^LIFT times p, of e4m3's range up to 448. Four of them are a register. The fragment of scores,
four cells of 8 columns, is that of a left operand with columns in this order: byte j of lane q (of four) of
half h has in the operand the place 16 h + 4 q + j, and in the scores the column

    16 h + 8 (j / 2) + 2 q + j % 2

so keys must lie in that order along the rows of the right operand.

Values come as rows of keys, [keys, d]; wgmma takes operands of 8 bits with what is summed over, the keys,
side by side only. TURNERS warps of the producer's warpgroup turn them: of 32 keys and 16 elements of d,

    ldmatrix.x4.trans   lane 4 g + q has of keys 2q and 2q + 1 of each eight the elements 2g and 2g + 1
    prmt                of two such registers, 16 keys: element 2g, or 2g + 1, of four keys
    stmatrix.x4         rows of d, 16 keys side by side

and keys come out in just the order that the weights are in. Rows of d of one stmatrix are even for lanes 0 to
15 and odd for the others, or the other way round: eight different ones of the swizzle, no bank twice.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import SINK, Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.score import AccFragment, OnlineSoftmax, Scores
from tinygrad_nv.tile.attention.spec import RowScales
from tinygrad_nv.tile.attention.wgmma.load import AttentionLoads
from tinygrad_nv.tile.attention.wgmma.main_loop import AttentionMainLoop
from tinygrad_nv.tile.attention.wgmma.plan import TURNERS, WARPGROUP, FlashWgmmaPlan
from tinygrad_nv.tile.attention.wgmma.tile_scheduler import AttentionTile, AttentionTileScheduler
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.lanes import to_fp8
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.pipeline import Pipeline, PipelineState

LIFT = 8.0           # the largest weight is 2^8
LEAST = 2.0**-100    # of a factor: −inf times 0 would be NaN, and sums are below 2^26
KEYS, WIDE = 32, 16  # of a turner's step: keys, elements of d


class Written(Pipeline):
    """A ring whose stages `writers` warps write themselves."""

    def __init__(self, kb: Kernel, depth: int, writers: int, readers: int, name: str) -> None:
        self.writers = writers
        super().__init__(kb, depth, 0, readers, name=name)

    @property
    def full_arrivals(self) -> int:
        """A lane of each writer."""
        return self.writers

    acquire = Pipeline.vacant       # no bytes of copies are to come


class TransposedValues:
    """Transposed values in shared memory, and how they come there."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, loads: AttentionLoads) -> None:
        assert plan.transposed_v is not None
        self.kb, self.plan, self.loads, self.tile = kb, plan, loads, plan.transposed_v
        depth = plan.schedule.depth
        self.values = kb.shared("turned", self.tile.nbytes * depth, align=1024)
        self.ring = Written(kb, depth, TURNERS, WARPGROUP // 32 * plan.consumers, "full_and_empty_turned")

    def produce(self, tile_scheduler: AttentionTileScheduler,
                blocks: Callable[[AttentionTile], KeyBlocks]) -> None:
        """All blocks of all tiles, by the turners: whole warps, of which each has every other 16 elements."""
        kb, ring, n = self.kb, self.loads.v_ring, self.plan.schedule.block_n
        self._begin()
        at, empty_barriers = ring.cursor(), ring.empty_barriers()
        mine = self.lane == 0
        with tile_scheduler.tiles() as tile:
            seen = blocks(tile)
            with seen.any():
                left = kb.reg("s32", seen.key_end - (seen.end - 1) * n)
                with kb.loop(0, seen.end - seen.first):
                    ring.wait(at)
                    stage = self.loads.values.address() + at.stage * self.plan.v.nbytes
                    if isinstance(seen.key_end, Value):
                        with kb.if_(left < n): self._clear(stage, left.to("u32"))
                        left.set(n)
                    # both rings are as deep: what is read and what is written have the same stage
                    full = self.ring.acquire(PipelineState(self.ring, at.stage, at.parity ^ 1))
                    self._turn(stage, self.values.address() + at.stage * self.tile.nbytes)
                    kb.fence_proxy_async()
                    kb.emit("bar.warp.sync", -1)
                    ring.release(empty_barriers, at.stage, mine)
                    kb.emit("mbarrier.arrive.shared::cta.b64", SINK, full, guard=mine)
                    at.advance()

    def _begin(self) -> None:
        """A lane's places: the row of keys that it reads, the row of d that it writes."""
        kb = self.kb
        self.lane = lane = kb.special("laneid")
        self.wide = (kb.tid.x // 32 & 1) * WIDE
        self.from_ = _swizzle(self.plan.v, lane) ^ self.wide
        matrix, row = lane >> 3, lane & 7
        odd = (row >> 2 ^ matrix) & 1
        self.to = _swizzle(self.tile, self.wide + row * 2 + odd) ^ (matrix >> 1) * 16
        self.one = kb.select(lane < 16, 0x6420, 0x7531, "b32")
        self.other = kb.select(lane < 16, 0x7531, 0x6420, "b32")

    def _clear(self, stage: Value, seen: Value) -> None:
        """Values of columns that exist but that no row sees may be anything, NaN too: of the warp's elements
        all from key `seen` (u32) on become 0."""
        kb, tile = self.kb, self.plan.v
        with kb.loop(seen + self.lane, tile.rows, 32) as key:
            own = _swizzle(tile, key) ^ self.wide
            for base, offset in self._places(tile, stage, own):
                kb.st("shared", "b32", base.at(offset), [0] * 4)
        kb.emit("bar.warp.sync", -1)

    def _places(self, tile: OperandTile, stage: Value, own: Value) -> list[tuple[Value, int]]:
        """Addresses and offsets of a row's every other 16 bytes."""
        step = 2 * WIDE
        sums = [stage + (own ^ inside if inside else own) for inside in range(0, tile.span, step)]
        places = (divmod(at, tile.span) for at in range(0, tile.columns * tile.span, step))
        return [(sums[inside // step], column * tile.column_bytes) for column, inside in places]

    def _turn(self, stage: Value, base: Value) -> None:
        """A block, 32 keys and 16 elements of d at a time."""
        kb, v, tile = self.kb, self.plan.v, self.tile
        targets = self._places(tile, base, self.to)
        for i, (source, offset) in enumerate(self._places(v, stage, self.from_)):
            for j, (target, column) in enumerate(targets):
                keys = kb.ldmatrix(source.at(offset + j * KEYS * v.span), trans=True)
                made = kb.regs("b32", 4)
                for number, each in enumerate(made):
                    pair = keys[number // 2 * 2:number // 2 * 2 + 2]
                    kb.emit("prmt.b32", each, *pair, self.other if number % 2 else self.one)
                kb.stmatrix(target.at(column + i * 2 * WIDE * tile.span), made)


def _swizzle(tile: OperandTile, row: Value) -> Value:
    """Returns the address at which a row of a tile begins, under the swizzle."""
    plain = row * tile.span
    return plain ^ (plain >> 7 & tile.span // 16 - 1) << 4


class Fp8MainLoop(AttentionMainLoop):
    """One consumer's main loop; `scales` are pointers to those of q, k and v."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, loads: AttentionLoads,
                 v_transposer: TransposedValues,
                 scales: Sequence[Value],
                 consumer: Value) -> None:
        self.v_transposer, self.pointers = v_transposer, scales
        assert plan.spec.scales is not None
        self.by_block = [each.block != 0 for each in plan.spec.scales]
        super().__init__(kb, plan, loads, consumer)
        self.part = kb.regs("f32", plan.pieces[0][1] // 2)
        self.now = kb.reg("f32")
        self.scale: Value | None = None

    def _values(self) -> tuple[Descriptors, Pipeline]:
        v = self.v_transposer
        return Descriptors.of(self.kb, v.tile, v.values.address()), v.ring

    # **** scales ****

    def _softmax(self, scores: Scores) -> OnlineSoftmax:
        kb, factor = self.kb, scores.factor
        assert self.plan.spec.scales is not None
        self.bases = [self._base(each, pointer, scores) for each, pointer in
                      zip(self.plan.spec.scales, self.pointers, strict=True)]
        row = kb.reg("u32", scores.extents.s_q) - 1
        kb.emit("min.u32", row, row, scores.first)  # rows beyond the last have no scale
        scale = self._scale(0, row)
        if not self.by_block[1]: scale *= self._scale(1)
        if not self.by_block[2]: self.now = self._scale(2)
        self.scale = None if scores.linear else scale
        if not scores.linear: return OnlineSoftmax(kb, 1, factor, LIFT)
        least = kb.reg("f32")
        kb.emit("max.f32", least, scale * factor, LEAST)
        return OnlineSoftmax(kb, 1, least, LIFT)

    def _base(self, scales: RowScales, pointer: Value, scores: Scores) -> Value:
        made = pointer + scales.offset * 4 if scales.offset else pointer
        for index, stride in zip(scores.batch, scales.batch, strict=True):
            made = advance(self.kb, made, index, stride * 4)
        return made

    def _scale(self, which: int, row: Value | None = None) -> Value:
        """Returns the scale of q, k or v in a row (u32)."""
        kb, made, base = self.kb, self.kb.reg("f32"), self.bases[which]
        assert self.plan.spec.scales is not None
        scales = self.plan.spec.scales[which]
        if row is not None and scales.block: base = advance(kb, base, row // scales.rows, scales.block * 4)
        kb.emit("ld.global.f32", made, base.at())
        return made

    def _prefetch_scales(self, column: Value) -> None:
        if self.by_block[1]: self.of_keys = self._scale(1, self._uniform(column))

    def _ahead_of_sums(self, column: Value) -> None:
        if self.by_block[2]: self.now = self._scale(2, self._uniform(column))

    def _uniform(self, column: Value) -> Value:
        """A block's first column, the same in all lanes: redux keeps it and what follows from it in uniform
        registers. ptxas spilled 20 bytes without it (128 elements, scales of blocks)."""
        made = self.kb.reg("u32")
        self.kb.emit("redux.sync.min.u32", made, column.to("u32"), -1)
        return made

    def _dequantize_scores(self, cells: AccFragment) -> AccFragment:
        scale = self.scale
        if self.by_block[1]: scale = self.of_keys if scale is None else scale * self.of_keys
        if scale is not None:
            for cell in cells[0]:
                for each in cell: each *= scale
        return cells

    def finish(self, sink: Value | None = None) -> tuple[list[Value], list[Value]]:
        """Returns the factors of the result, of each row, and l."""
        inverses, logs = super().finish(sink)
        return (inverses if self.by_block[2] else [each * self.now for each in inverses]), logs

    # **** products ****

    def _clear(self, seen: Value) -> None:
        """The turners have."""

    def _pack(self) -> None:
        kb = self.kb
        for i, each in enumerate(self.p):
            chunk, half, rows = i // 4, i // 2 % 2, i % 2
            at = 16 * chunk + 8 * half + 2 * rows
            pairs = [to_fp8(kb, self.weights[first:first + 2], dtypes.fp8e4m3) for first in (at, at + 4)]
            kb.emit("mov.b32", each, pairs)

    def _issue_sums(self) -> None: self._issue_piece(*self.plan.pieces[0])

    def _issue_piece(self, first: int, columns: int) -> None:
        kb, plan, tile = self.kb, self.plan, self.v_transposer.tile
        kb.wgmma_fence()
        low = self.values.stage(self.at_v.stage)
        for step in range(plan.schedule.block_n // plan.step):
            place = tile.at_step(step) + tile.at_mn(first)
            kb.wgmma(f"m64n{columns}k{plan.step}", f"f32.{plan.kind}.{plan.kind}", self.part[:columns // 2],
                    self.p[4 * step:4 * step + 4], self.values.at(low, place), step > 0)
        kb.wgmma_commit()

    def _add_values(self) -> None:
        kb = self.kb
        for first, columns in self.plan.pieces:
            if first:
                self._issue_piece(first, columns)
                kb.wgmma_wait(0)
            for each, part in zip(self.out[first // 2:], self.part[:columns // 2], strict=False):
                if self.by_block[2]: kb.emit("fma.rn.f32", each, part, self.now, each)
                else: each += part
