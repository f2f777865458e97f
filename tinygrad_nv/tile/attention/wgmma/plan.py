"""Plan of `flash_wgmma`, which follows from a spec and a schedule: tiles, instructions, bytes. Numbers only.

Protocol: `FlashWgmmaPlan.of` computes, and refuses nothing. Both legality.py and the kernel take their
arithmetic from here. Registers let a multiprocessor have one CTA of default schedules. With more tiles than
`sm_count` CTAs are persistent: a tile that is alone waits for its launch, its barriers, its first copies and
its store, each a latency of about 1 µs; 128 rows over 1024 keys of 128 elements are 67 MFLOP, 15 µs of a
multiprocessor at 600 TFLOP/s. One that follows another has these under the end of that one. Heads are padded
to whole wgmmas, 16 elements (32 of 8 bits); TMA brings zeros for what is not there and stores nothing of it.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Rows
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.wgmma_tiles import K_BYTES, MAP_DTYPES, OperandTile, natural_span

WARPGROUP = 128      # threads
ROWS = 64            # of a consumer: those of a wgmma
STEP = 16            # of the sum, of a wgmma of 16-bit elements
TURNERS = 2          # warps that turn values of 8 bits
# registers a thread of the producer and of a consumer, by the number of consumers: together at most 512 for
# the warpgroups' 65536 / 128; one consumer keeps what the compiler gives it. Those that turn values need more
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}
TURNING = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
WHOLE, PIECE = 128, 64  # of a result of 8-bit operands: so many columns at once, or in pieces


@dataclass(frozen=True)
class FlashWgmmaPlan:
    """An attention by a schedule. `q`, `k`, `v` are tiles in shared memory, `out` that of a result which goes
    by TMA; `transposed_v` are values of 8 bits once keys lie side by side, as wgmma takes them."""
    spec: AttentionSpec
    schedule: FlashWgmma
    q: OperandTile
    k: OperandTile
    v: OperandTile
    out: OperandTile | None
    transposed_v: OperandTile | None = None
    ctas: int = 0  # of persistent ones

    @staticmethod
    @lru_cache(1024)
    def of(spec: AttentionSpec, schedule: FlashWgmma, sm_count: int = 0) -> FlashWgmmaPlan:
        """The plan, for a GPU of so many multiprocessors; 0: one for each tile."""
        dtype, size, n = spec.q.dtype, spec.q.dtype.itemsize, schedule.block_n
        d, d_v = (pad_head(each, K_BYTES // size) for each in (spec.d, spec.d_v))
        span, span_v = natural_span(d * size), natural_span(d_v * size)
        q = OperandTile(dtype, "K", schedule.block_m, d, span)
        k = OperandTile(dtype, "K", n, d, span)
        v = OperandTile(dtype, "MN", d_v, n, span_v)
        transposed_v = OperandTile(dtype, "K", d_v, n, natural_span(n)) if size == 1 else None
        # a map would not cut off where a sequence of a ragged batch ends, nor within 16 bytes
        whole = (spec.out.dtype.itemsize == 2 and spec.out.alignment_bytes == 16 and spec.d_v % 8 == 0
                 and not spec.is_ragged)
        span_out = natural_span(2 * d_v)
        out = OperandTile(spec.out.dtype, "K", schedule.block_m, d_v, span_out) if whole else None
        if spec.is_ragged: sm_count = 0  # tiles are found by the grid
        ctas = sm_count if 0 < sm_count < -(-spec.s_q // schedule.block_m) * spec.matrices else 0
        return FlashWgmmaPlan(spec, schedule, q, k, v, out, transposed_v, ctas)

    @property
    def consumers(self) -> int: return self.schedule.consumers

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Columns of the result, of 8-bit operands, that a block's products are made of at a time: first, and
        how many, always the same. Masks of bands with two ends take the registers of half of them."""
        d = self.v.mn
        most = WHOLE if self.spec.band.first is None else PIECE
        count = 1 if d <= most else -(-d // PIECE)
        while d % (8 * count): count += 1
        return [(at, d // count) for at in range(0, d, d // count)]

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer, and of a consumer; 0 as the compiler has it."""
        return (REGISTERS if self.transposed_v is None else TURNING)[self.consumers]

    @property
    def pingpong(self) -> bool: return self.schedule.mode == "pingpong" and self.consumers > 1

    @property
    def overlaid(self) -> bool:
        """Whether a consumer's result goes where its queries were: columns of the same rows. Where tiles
        follow each other the next queries come sooner if it has room of its own."""
        if self.out is None or self.out.span != self.q.span or self.out.columns > self.q.columns: return False
        return not self.ctas or self._bytes(self.out.nbytes) > SMEM_BYTES["sm_90a"]

    @property
    def staging_bytes(self) -> int:
        """Shared memory for the result alone."""
        return 0 if self.out is None or self.overlaid else self.out.nbytes

    @property
    def barrier_bytes(self) -> int:
        """A full and an empty one for each stage of keys and of values, transposed too, and for queries."""
        return 16 * ((2 + (self.transposed_v is not None)) * self.schedule.depth + 1)

    @property
    def smem_bytes(self) -> int:
        """All of shared memory; tiles begin at multiples of 1024."""
        return self._bytes(self.staging_bytes)

    def _bytes(self, staging: int) -> int:
        depth = self.schedule.depth
        transposed = self.transposed_v.nbytes if self.transposed_v is not None else 0
        tiles = (self.q.nbytes, self.k.nbytes * depth, self.v.nbytes * depth, transposed * depth, staging)
        return sum(-(-nbytes // 1024) * 1024 for nbytes in tiles) + self.barrier_bytes

    @property
    def scores(self) -> int:
        """Scores of a block that a thread holds."""
        return self.schedule.block_n // 2

    @property
    def sums(self) -> int:
        """Elements of the result that a thread holds."""
        return self.v.mn // 2

    @property
    def live_registers(self) -> int:
        """Registers of the three: scores of the next block, those of this one as weights, the result; of 8
        bits also this block's part of the result."""
        return self.scores + self.weights + self.sums + (self.pieces[0][1] // 2 if self.transposed_v else 0)

    @property
    def weights(self) -> int:
        """Registers of a block's weights."""
        return self.scores * self.spec.v.dtype.itemsize // 4

    @property
    def step(self) -> int:
        """Elements of a sum that a wgmma takes."""
        return K_BYTES // self.spec.q.dtype.itemsize

    @property
    def kind(self) -> str:
        """The operands' dtype as PTX has it."""
        return short(self.spec.q.dtype)

    @property
    def has_ragged_end(self) -> bool:
        """Whether the last block of columns may reach beyond the keys."""
        spec = self.spec
        return spec.is_ragged or "s_kv" in spec.symbolic or spec.s_kv % self.schedule.block_n != 0

    @property
    def blocks_of_rows(self) -> int:
        """CTAs along the rows, at most."""
        return -(-self.spec.s_q // self.schedule.block_m)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows, heads, batch; or the persistent ones."""
        if self.ctas: return self.ctas, 1, 1
        batch, heads, group = self.spec.batch
        return self.blocks_of_rows, heads * group, batch + self.spec.is_ragged


def pad_head(d: int, step: int = STEP) -> int:
    """A head in whole wgmmas."""
    return -(-d // step) * step


def map_dimensions(rows: Rows, batch: tuple[int, int, int]) -> tuple[int, ...]:
    """The dimensions of the batch that a map has, innermost first: those that the matrix differs along."""
    return tuple(i for i in (2, 1, 0) if rows.batch[i] and batch[i] > 1)


def map_argument(plan: FlashWgmmaPlan, rows: Rows, pointer: int, count: int, d: int, tile: OperandTile,
                 box: int,
                 symbol: str) -> MapArgument:
    """The tensor map of a matrix of `count` rows (the extent `symbol`): boxes of `box` rows."""
    spec, axes = plan.spec, map_dimensions(rows, plan.spec.batch)
    size = rows.dtype.itemsize
    pitch = rows.row * size if count > 1 else -(-d * size // 16) * 16  # of one row never used, but needed
    symbolic = symbol in spec.symbolic
    return MapArgument(pointer, MAP_DTYPES[rows.dtype], (d, count, *(spec.batch[i] for i in axes)),
                       (pitch, *(rows.batch[i] * size for i in axes)), (tile.inner, box, *(1 for _ in axes)),
                       f"{tile.span}B", rows.offset * size, 1 if symbolic else -1,
                       spec.symbolic.index(symbol) if symbolic else -1)
