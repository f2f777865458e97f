"""Plan of `flash_wgmma`, which follows from a spec and a schedule: tiles, instructions, bytes. Numbers only.

Protocol: `FlashWgmmaPlan.of` computes, and refuses nothing. `problems` and the kernel take their
arithmetic from here. Registers let a multiprocessor have one CTA of default schedules. With more tiles than
`sm_count` CTAs are persistent: a tile that is alone waits for its launch, its barriers, its first copies and
its store, each a latency of about 1 µs; 128 rows over 1024 keys of 128 elements are 67 MFLOP, 15 µs of a
multiprocessor at 600 TFLOP/s. One that follows another has these under the end of that one. Heads are padded
to whole wgmmas, 16 elements (32 of 8 bits); TMA brings zeros for what is not there and stores nothing of it.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Rows, multiple
from tinygrad_nv.tile.expression import short, show
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import K_BYTES, MAP_DTYPES, OperandTile, natural_span
from tinygrad_nv.tile.limits import MOST, MOST_GRID, SMEM_BYTES

WARPGROUP = 128      # threads
ROWS = 64            # of a consumer: those of a wgmma
STEP = 16            # of the sum, of a wgmma of 16-bit elements
TURNERS = 2          # warps that turn values of 8 bits
# registers a thread of the producer and of a consumer, by the number of consumers: together at most 512 for
# the warpgroups' 65536 / 128; one consumer keeps what the compiler gives it. Those that turn values need more
REGISTERS = {1: (0, 0), 2: (24, 240), 3: (32, 160)}
TURNING = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
WHOLE, PIECE = 128, 64  # of a result of 8-bit operands: so many columns at once, or in pieces
WARP_ROWS = 16
MOST_COLUMNS = 256
# by consumers, registers a thread that ptxas was seen to keep without spilling: scores, their 16-bit form and
# the result; and beside the evaluation of a score that is more than a multiple of the sum, with its columns
MOST_HELD, MOST_BESIDE, MOST_EVALUATED = {1: 224, 2: 212, 3: 128}, {1: 188, 2: 168, 3: 92}, 112


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


def problems(spec: AttentionSpec, schedule: FlashWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if spec.q.dtype == dtypes.float32: return ["operands of f32 are of flash_fma"]
    if (spec.is_ragged or spec.kept < KEEP_ALL) and spec.scales is not None:
        return ["ragged batches and dropout of 8 bits: no template has them"]
    out = [*_operands(spec), *_count_problems(schedule, spec), *epilogue.problems(spec.score, arch)]
    if found := _extents(schedule, spec.q.dtype.itemsize): return out + found
    return [*out, *_scales(schedule, spec), *_room(FlashWgmmaPlan.of(spec, schedule))]


def _scales(s: FlashWgmma, spec: AttentionSpec) -> list[str]:
    """A warp's rows and a block of columns have one scale each."""
    if spec.scales is None: return []
    sides = (("q", WARP_ROWS, "a warp's rows"), *((name, s.block_n, "a block of columns") for name in "kv"))
    return [f"{name}: scales of {each.rows} rows, not of whole times {count}, {what}"
            for each, (name, count, what) in zip(spec.scales, sides, strict=True)
            if each.block and each.rows % count]


def _operands(spec: AttentionSpec) -> list[str]:
    """Returns the problems of q, k and v, as TMA asks of them."""
    rows, keys = spec.total or (spec.s_q, spec.s_kv)
    sides = (("q", spec.q, rows), ("k", spec.k, keys), ("v", spec.v, keys))
    return [each for name, side, count in sides for each in no_tma(name, side, count, spec.batch)]


def no_tma(name: str, rows: Rows, count: int, batch: tuple[int, int, int]) -> list[str]:
    """Why TMA cannot read `count` rows of each element of a batch; empty when it can: strides of more than
    one, and beginnings, are multiples of 16 bytes."""
    size = rows.dtype.itemsize
    strides = [("row", rows.row, count), *((f"batch[{i}]", rows.batch[i], batch[i]) for i in range(3))]
    out = [f"{name}: {what} stride {stride * size} B is not a multiple of 16 B: no TMA"
           for what, stride, extent in strides if extent > 1 and stride * size % 16]
    if rows.offset * size % 16:
        out.append(f"{name}: offset {rows.offset * size} B is not a multiple of 16 B: no TMA")
    return out


def _count_problems(s: FlashWgmma, spec: AttentionSpec) -> list[str]:
    """Returns the problems of what is numbered."""
    batch, heads, group = spec.batch
    grid = (("heads", heads * group), ("elements of the batch", batch + spec.is_ragged))
    out = [f"{count} {what} are above {MOST_GRID}, a grid's" for what, count in grid if count > MOST_GRID]
    far = max(spec.s_q, spec.s_kv, spec.s_q + spec.start) + 2 * (s.block_m + s.block_n)
    if far > MOST: out.append(f"places up to {far} are above {MOST}")
    return out


def _extents(s: FlashWgmma, size: int) -> list[str]:
    """Warpgroups and the tile."""
    if s.warps_m not in (8, 12, 16):
        return [f"{s.warps_m} warps: a producer and 1 to 3 consumers of 4 warps each are 8, 12 or 16, along "
                "the rows"]
    out = []
    if s.mode == "pingpong" and s.consumers < 2:
        out.append(f"ping-pong with {s.consumers} consumer: {s.warps_m} warps - 4 of the producer, at least "
                   "8")
    if s.block_m != ROWS * s.consumers:
        rows = ROWS * s.consumers
        out.append(f"block_m={s.block_m} is not {s.consumers} consumers × {ROWS} = {rows} rows")
    if s.block_n % (step := K_BYTES // size) or not step <= s.block_n <= MOST_COLUMNS:
        out.append(f"block_n={s.block_n} is not a multiple of {step} up to {MOST_COLUMNS}: no such wgmma")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out


def _room(plan: FlashWgmmaPlan) -> list[str]:
    """Shared memory and registers."""
    out, s, most = [], plan.schedule, SMEM_BYTES["sm_90a"]
    if plan.smem_bytes > most:
        staged = f" + {plan.staging_bytes} B of the result" if plan.staging_bytes else ""
        v = plan.transposed_v
        transposed = f" + {v.nbytes} B of them turned" if v is not None else ""
        out.append(f"{plan.q.nbytes} B of queries + {s.depth} stages × ({plan.k.nbytes} B of keys + "
                   f"{plan.v.nbytes} B of values{transposed}){staged} + {plan.barrier_bytes} B of barriers = "
                   f"{plan.smem_bytes} B of shared memory, sm_90a has {most}")
    evaluated, dropped = multiple(plan.spec.score) is None, plan.spec.kept < KEEP_ALL
    if plan.live_registers > (held := (MOST_BESIDE if evaluated or dropped else MOST_HELD)[plan.consumers]):
        beside = f" beside {show(plan.spec.score)}" if evaluated else " beside dropout" if dropped else ""
        part = f" + {plan.pieces[0][1] // 2} of a block" if plan.transposed_v is not None else ""
        pairs = "fours" if plan.transposed_v is not None else "pairs"
        out.append(f"{plan.scores} scores + {plan.weights} {pairs} of weights + {plan.sums} sums{part} = "
                   f"{plan.live_registers} registers a thread, at most {held} with {plan.consumers} "
                   f"consumers{beside}")
    if evaluated and s.block_n > MOST_EVALUATED:
        out.append(f"block_n={s.block_n} beside {show(plan.spec.score)}, which is evaluated in registers: at "
                   f"most {MOST_EVALUATED}")
    return out
