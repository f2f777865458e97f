"""Plan of `latent_wgmma`, which follows from a spec and a schedule: tiles and bytes. Numbers only.

Protocol: a CTA has 64 of a key head's rows and one split of a request's keys (`SplitPlan`). A tile of
`block_n` latents lies in shared memory once: as keys it is K-major, `block_n` rows of d elements, and its
columns from `values_at` on are the values, MN-major. Each of two warpgroups has half of these.

`problems` is what the template asks of a spec and a schedule.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.spec import OPERANDS
from tinygrad_nv.tile.decode.plan import MOST_SPLITS, MOST_STRIDE, SplitPlan
from tinygrad_nv.tile.decode.schedules import LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import loads, short
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.limits import SMEM_BYTES

ROWS, STEP = 64, 16             # of a wgmma; elements of the sum that it takes
WARPGROUP, CONSUMERS = 128, 2   # threads; warpgroups that multiply
SPAN = 128                      # bytes of a row of a column of boxes
COLUMN = SPAN // 2              # elements of it
REGISTERS = 56, 224             # of a thread that loads, and of one that multiplies: 56 + 2 · 224 ≤ 512
LANES = 32
BLOCKS = (32, 64, 128)          # keys of a tile
MOST_VALUES = CONSUMERS * 256   # elements: a wgmma has 256 columns
MOST_REQUESTS = 512             # 16 of a lane that counts


@dataclass(frozen=True)
class LatentPlan(SplitPlan):
    """Plan of a spec and a schedule."""
    schedule: LatentWgmma

    @staticmethod
    @lru_cache(1024)
    def of(spec: DecodeSpec, schedule: LatentWgmma) -> LatentPlan:
        """The plan."""
        return LatentPlan(spec, schedule)

    @property
    def row_blocks(self) -> int: return -(-self.spec.rows // ROWS)

    @property
    def blocks(self) -> int:
        """Work tiles of a split: blocks of rows of all key heads."""
        return self.spec.heads * self.row_blocks

    @property
    def work_tiles(self) -> int:
        """Most work tiles of all requests."""
        return self.spec.batch * self.most_splits * self.blocks

    @property
    def each(self) -> int:
        """Requests that a lane counts."""
        return -(-self.spec.batch // LANES)

    @property
    def values_at(self) -> int:
        """The element of a latent with which its value begins."""
        return self.spec.v.offset - self.spec.k.offset

    @property
    def half(self) -> int:
        """Columns of values of a warpgroup."""
        return self.spec.d_v // CONSUMERS

    @property
    def kind(self) -> str:
        """The operands' dtype as PTX has it."""
        return short(self.spec.q.dtype)

    # **** shared memory ****

    @property
    def queries(self) -> OperandTile: return OperandTile(self.spec.q.dtype, "K", ROWS, self.spec.d, SPAN)

    @property
    def keys(self) -> OperandTile:
        """A tile of latents as keys."""
        return OperandTile(self.spec.k.dtype, "K", self.schedule.block_n, self.spec.d, SPAN)

    @property
    def values(self) -> OperandTile:
        """Half of the columns of values in it."""
        return OperandTile(self.spec.k.dtype, "MN", self.half, self.schedule.block_n, SPAN)

    @property
    def weights(self) -> OperandTile:
        """The weights of a tile, for the warpgroup that does not compute them."""
        n = self.schedule.block_n
        return OperandTile(self.spec.q.dtype, "K", ROWS, n, min(SPAN, 2 * n))

    @property
    def smem_bytes(self) -> int:
        """All of shared memory: also three numbers of each row, one of each request, and barriers."""
        tiles = self.queries.nbytes + self.keys.nbytes * self.schedule.depth + self.weights.nbytes
        return tiles + 12 * ROWS + 4 * LANES * (self.each + 1) + 16 + 8 * (2 * self.schedule.depth + 2)


def problems(spec: DecodeSpec, schedule: LatentWgmma, arch: str) -> list[str]:
    """Why `latent_wgmma` cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"{arch} has no wgmma"]
    if not spec.latent: return ["values of their own memory: no latents"]
    s, plan = schedule, LatentPlan.of(spec, schedule)
    out = _spec_problems(spec, plan) + epilogue.problems(spec.score, arch)
    if s.block_n not in BLOCKS: out.append(f"{s.block_n} keys of a tile, not {', '.join(map(str, BLOCKS))}")
    if s.depth < 2: out.append(f"{s.depth} stage is not 2 or more")
    if s.splits > MOST_SPLITS: out.append(f"{s.splits} splits, at most {MOST_SPLITS}")
    if not out and (needed := plan.smem_bytes) > (most := SMEM_BYTES[arch]):
        out.append(f"queries {plan.queries.nbytes} B, {s.depth} stages × {plan.keys.nbytes} B, weights "
                   f"{plan.weights.nbytes} B: {needed} B of shared memory, {arch} has {most}")
    if spec.batch > MOST_REQUESTS: out.append(f"{spec.batch} requests, at most {MOST_REQUESTS}")
    return out


def _spec_problems(spec: DecodeSpec, plan: LatentPlan) -> list[str]:
    """Returns the problems of the spec, whatever the schedule."""
    out = []
    if spec.q.dtype not in OPERANDS:
        out.append(f"q of {short(spec.q.dtype)}, not one of {', '.join(map(short, OPERANDS))}")
    if not spec.table or loads(spec.score): out.append("keys without a table, or a score that reads memory")
    if spec.heads > 1 and spec.v.head != spec.k.head: out.append("values of another key head's latents")
    for name, extent, unit in (("d", spec.d, COLUMN), ("d_v", spec.d_v, CONSUMERS * COLUMN),
                               ("the beginning of values", plan.values_at, COLUMN)):
        if extent % unit: out.append(f"{name}={extent} is not a multiple of {unit}")
    if not 0 <= plan.values_at <= spec.d - spec.d_v: out.append("values beside their keys")
    if spec.d_v > MOST_VALUES: out.append(f"d_v={spec.d_v}, at most {MOST_VALUES}: sums are in registers")
    for name, aligned in (("latents", spec.k.alignment_bytes), ("rows of q", spec.q.alignment_bytes)):
        if aligned < 16: out.append(f"{name} begin at multiples of {aligned} B, copies at multiples of 16")
    if (far := spec.k.page * spec.k.dtype.itemsize) > MOST_STRIDE:
        out.append(f"pages {far} B apart, at most {MOST_STRIDE}")
    if spec.out.alignment_bytes < 4:
        out.append(f"rows of the result begin at multiples of {spec.out.alignment_bytes} B, stores at "
                   "multiples of 4")
    return out
