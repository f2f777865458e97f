"""The numbers of a decode kernel: who reads what, what lies where.

Protocol: a CTA has 16 · `warps_m` of a key head's rows and one split of a request's keys, which it takes
`block_n` keys at a time; each of its `warps_n` groups of warps has `keys` of these, in a ring of its own.

Splits depend on the request's own length alone, and on what the spec and the schedule have:

    low    = first key that a row sees, rounded down to a multiple of `unit`
    keys   = max(min_split_keys, ⌈(length − low) / splits⌉), rounded up to a multiple of `unit`
    split s has keys low + s · keys … low + (s + 1) · keys − 1

A contiguous cache has no pages to look up: `unit` is the block of keys alone.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile import epilogue, limits
from tinygrad_nv.tile.attention.spec import MOST_HEAD, OPERANDS
from tinygrad_nv.tile.decode.schedules import Decode, KeySplits
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import Position, short, walk
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.limits import MOST_GRID

MOST_SPLITS = 32    # a lane of a warp for each
RESIDENT = 128      # elements of a head up to which the rows of q stay in registers: 4 for each 16
MOST_STRIDE = (1 << 31) - 1  # bytes that an instruction takes
MOST_TILE = 256              # keys of a block, of which addresses are constants away from the first


def up(value: int, unit: int) -> int:
    """Rounded up to a multiple."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class SplitPlan:
    """How a request's keys are split, and what splits leave each other."""
    spec: DecodeSpec
    schedule: KeySplits

    @property
    def unit(self) -> int:
        """Splits begin at multiples of it: both powers of two."""
        return max(self.schedule.block_n, self.spec.page_size if self.spec.table else 1)

    @property
    def min_split_keys(self) -> int:
        """Keys of a split at least."""
        return up(self.schedule.split_keys, self.unit)

    @property
    def most_span(self) -> int:
        """Keys from `low` to the last at most."""
        spec = self.spec
        if spec.window is None: return spec.longest
        return min(spec.longest, spec.window + spec.s_q - 1 + self.unit - 1)

    @property
    def most_keys(self) -> int:
        """Most keys of a split."""
        return max(self.min_split_keys, up(-(-self.most_span // self.schedule.splits), self.unit))

    @property
    def most_splits(self) -> int:
        """Most splits of a request; as many CTAs are launched for each."""
        return min(self.schedule.splits, -(-self.most_span // self.min_split_keys))

    # **** the workspace ****

    @property
    def all_rows(self) -> int: return self.spec.batch * self.spec.heads * self.spec.rows

    @property
    def stats_start(self) -> int:
        """Bytes before the maxima and sums: sums are first, [request, key head, row, split, d_v]."""
        return 4 * self.all_rows * self.most_splits * self.spec.d_v

    @property
    def workspace_bytes(self) -> int:
        """0 where no request is split."""
        return 0 if self.most_splits == 1 else self.stats_start + 8 * self.all_rows * self.most_splits


@dataclass(frozen=True)
class DecodePlan(SplitPlan):
    """Plan of a spec and a schedule."""
    schedule: Decode

    @staticmethod
    @lru_cache(1024)
    def of(spec: DecodeSpec, schedule: Decode) -> DecodePlan:
        """The plan."""
        return DecodePlan(spec, schedule)

    @property
    def keys(self) -> int:
        """Keys of a warp's tile."""
        return self.schedule.block_n // self.schedule.warps_n

    @property
    def group_threads(self) -> int:
        """Threads that share a tile of keys."""
        return 32 * self.schedule.warps_m

    # **** rows ****

    @property
    def block_rows(self) -> int: return 16 * self.schedule.warps_m

    @property
    def row_blocks(self) -> int: return -(-self.spec.rows // self.block_rows)

    # **** shared memory ****

    @property
    def most_pages(self) -> int:
        """Most pages of a split that are looked up."""
        return self.most_keys // self.spec.page_size if self.spec.table else 0

    def tile(self, width: int) -> SharedTile:
        """Returns the tile of a warp's keys or values, with `width` elements each, in rows of 32, 64 or
        multiples of 128 bytes."""
        nbytes = width * self.spec.k.dtype.itemsize
        return SharedTile(self.keys, next((size for size in (32, 64) if nbytes <= size), up(nbytes, 128)))

    @property
    def k_tile(self) -> SharedTile: return self.tile(self.spec.d)

    @property
    def v_tile(self) -> SharedTile: return self.tile(self.spec.d_v)

    @property
    def stage_bytes(self) -> int:
        """Bytes of all warps' tiles of a stage."""
        return (self.k_tile.nbytes + self.v_tile.nbytes) * self.schedule.warps_n

    @property
    def pitch(self) -> int:
        """Floats between rows of sums in shared memory: 8 beyond a multiple of 32 for stores of two from
        lanes of eight rows, 16 beyond it for stores of four."""
        return up(self.spec.d_v, 32) + (16 if self.spec.is_quantised else 8)

    @property
    def sums_bytes(self) -> int:
        """Bytes that warps exchange at the end: outputs, then max and sum of each row."""
        return 4 * self.schedule.warps_n * self.block_rows * (self.pitch + 2)

    @property
    def ring_bytes(self) -> int:
        """The ring; at the end the sums take its place."""
        return max(self.stage_bytes * self.schedule.depth, self.sums_bytes)

    @property
    def q_bytes(self) -> int:
        """Rows of q in shared memory, where they do not stay in registers."""
        return 0 if self.spec.d <= RESIDENT else 2 * self.block_rows * self.spec.d

    @property
    def table_bytes(self) -> int:
        """A split's pages, and their scales."""
        return 4 * self.most_pages * (3 if self.spec.is_quantised else 1)

    @property
    def smem_bytes(self) -> int: return up(self.ring_bytes, 16) + up(self.q_bytes, 16) + self.table_bytes


class Parameters:
    """Parameters of both kernels."""

    def __init__(self, kb: Kernel, plan: SplitPlan) -> None:
        self.kb, self.out = kb, kb.pointer("out")
        if plan.workspace_bytes: self.workspace = kb.pointer("workspace")
        self.spec = spec = plan.spec
        self.q, self.keys = (kb.pointer(name) for name in ("q", "keys"))
        self.values = self.keys if spec.latent else kb.pointer("values")
        if spec.table: self.table = kb.pointer("table")
        if spec.length == "memory": self.lengths = kb.pointer("lengths")
        if spec.is_quantised: self.scales = [kb.pointer(name) for name in ("k_scale", "v_scale")]
        self.sinks = kb.pointer("sinks") if spec.sinks else None
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        if spec.length == "argument": self.argument = kb.param("length", "u32")

    def length(self, request: Value) -> Value:
        """Tokens of a request: s32."""
        if self.spec.length == "argument": return self.argument.to("s32")
        if self.spec.length == "most": return self.kb.reg("s32", self.spec.longest, name="length")
        made = self.kb.reg("s32", name="length")
        self.kb.emit("ld.global.s32", made, (self.lengths + request.to("u64") * 4).at())
        return made


class Span:
    """A request's keys that rows see, and how they are split. All s32."""

    def __init__(self, kb: Kernel, plan: SplitPlan, length: Value) -> None:
        self.kb, spec, unit = kb, plan.spec, plan.unit
        self.high = length
        self.first, self.low = kb.reg("s32", 0), kb.reg("s32", 0)  # that a row sees; of the first split
        if spec.window is not None:
            kb.emit("max.s32", self.first, length - spec.reach, 0)
            if spec.chunked: self.first.set(self.first - self.first % spec.window)
            kb.emit("and.b32", self.low, self.first, -unit)
        self.all = self.high - self.low
        splits = plan.schedule.splits
        self.keys = kb.reg("s32")
        kb.emit("max.s32", self.keys, (self.all + (splits * unit - 1)) // (splits * unit) * unit,
                plan.min_split_keys)

    @property
    def several(self) -> Value: return self.all > self.keys

    def count(self) -> Value:
        """Splits: u32."""
        return ((self.all + self.keys - 1) // self.keys).to("u32")


def problems(spec: DecodeSpec, schedule: Decode, arch: str) -> list[str]:
    """Why `decode_attention` cannot have this schedule; empty when it can."""
    if spec.q.dtype not in OPERANDS:
        kind = short(spec.q.dtype)
        return [f"q of {kind}, a result of {kind}, not one of {', '.join(map(short, OPERANDS))} for both"]
    spec = divide_columns(spec)
    s, plan = schedule, DecodePlan.of(spec, schedule)
    out = _spec_problems(spec) + epilogue.problems(spec.score, arch)
    if s.warps_m not in (1, 2, 4) or s.warps_n not in (1, 2, 4, 8):
        out.append(f"{s.warps_m}x{s.warps_n} warps are not 1, 2 or 4 along rows, 1, 2, 4 or 8 along keys")
    elif s.block_n & (s.block_n - 1) or plan.keys < 16:
        out.append(f"block_n={s.block_n} is not a power of 2, of {s.warps_n} warps × 16 keys at least")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > MOST_SPLITS: out.append(f"{s.splits} splits, at most {MOST_SPLITS}")
    if not out and (needed := plan.smem_bytes) > (most := limits.SMEM_BYTES[arch]):
        out.append(f"{s.depth} stages × {plan.stage_bytes} B, or {plan.sums_bytes} B of sums; queries "
                   f"{plan.q_bytes} B; pages {plan.table_bytes} B: {needed} B of shared memory, {arch} has "
                   f"{most}")
    blocks = spec.heads * plan.row_blocks
    for name, count in (("requests", spec.batch), ("key heads × blocks of rows", blocks)):
        if count > MOST_GRID: out.append(f"{count} {name}, at most {MOST_GRID}")
    return out


def _spec_problems(spec: DecodeSpec) -> list[str]:
    """Returns the problems of the spec, whatever the schedule."""
    out, unit = [], 32 if spec.is_quantised else 16
    for name, extent in (("d", spec.d), ("d_v", spec.d_v)):
        if extent % unit: out.append(f"{name}={extent} is not a multiple of {unit}")
    if spec.d_v > MOST_HEAD:
        out.append(f"d_v={spec.d_v} of {spec.heads} key heads, at most {MOST_HEAD}: sums are in registers")
    for name, pages in (("keys", spec.k), ("values", spec.v)):
        if pages.alignment_bytes < 16:
            out.append(f"{name} begin at multiples of {pages.alignment_bytes} B, copies at multiples of 16")
        far = [("pages", pages.page)] if spec.table else [(f"{MOST_TILE} tokens", MOST_TILE * pages.token)]
        for what, stride in far:
            if (stride := stride * pages.dtype.itemsize) > MOST_STRIDE:
                out.append(f"{what} of {name} {stride} B apart, at most {MOST_STRIDE}")
    least = 8 if spec.is_quantised else 4
    if spec.q.alignment_bytes < least:
        out.append(f"rows of q begin at multiples of {spec.q.alignment_bytes} B, "
                                                f"loads at multiples of {least}")
    if spec.out.alignment_bytes < 4: out.append(f"rows of the result begin at multiples of "
                                              f"{spec.out.alignment_bytes} B, stores at multiples of 4")
    return out


@lru_cache(1024)
def divide_columns(spec: DecodeSpec) -> DecodeSpec:
    """The spec that CTAs have; the same where values are narrow enough, or cannot be divided. A warp keeps
    the sums of its 16 rows in registers: 256 columns take 128 of each lane. Wider values of one key head,
    those of latents (MLA), are to the kernel several key heads with the same keys, which have so many columns
    of values each. Each computes all scores, so that with 576 elements of keys and 512 of values 2 · (576 +
    256) numbers of a key are multiplied instead of 576 + 512; what is read twice is in L2 the second time."""
    count = -(-spec.d_v // MOST_HEAD)
    if count == 1 or spec.heads > 1 or spec.sinks or spec.d_v % count or Position(1) in walk(spec.score):
        return spec
    width, (request, _, query), (to, _, of) = spec.d_v // count, spec.q.batch, spec.out.batch
    k_scale, v_scale = (None if each is None else replace(each, head=0)
                        for each in (spec.k_scale, spec.v_scale))
    return replace(spec, heads=count, d_v=width, q=replace(spec.q, batch=(request, 0, query)),
                   k=replace(spec.k, head=0), v=replace(spec.v, head=width),
                   out=replace(spec.out, batch=(to, width, of)), k_scale=k_scale, v_scale=v_scale)
