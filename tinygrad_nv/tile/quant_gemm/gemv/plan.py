"""The arithmetic of a `quant_gemv` kernel: which warp reads which units of the weights, and its resources.

Protocol: a CTA has `tiles` tiles of 16 columns, of each part, and all rows of activations. Units of K (quant/
types.py) are numbered; an iteration is `units` of them. Iteration i belongs to split
i // `iterations_a_split`, warp i % `warps_k` of it.

`problems` is what the template asks of a schedule; `candidates` are those worth trying first.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import MOST_GRID, SMEM_BYTES
from tinygrad_nv.tile.quant_gemm.fragments import looks_up
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU

OTHER_REGISTERS = 40    # addresses, predicates, converted weights
REGISTERS = 65536       # of an SM
MOST_CLUSTERED = 8      # CTAs of a cluster on every sm_90a
PAD_BYTES = 16          # of a row of activations: eight rows of ldmatrix are in different banks


@dataclass(frozen=True)
class QuantGemvPlan:
    """See above."""
    quant: QuantGemmSpec
    schedule: QuantGemv

    @staticmethod
    @lru_cache(1024)
    def of(spec: QuantGemmSpec, schedule: QuantGemv) -> QuantGemvPlan:
        """The plan."""
        return QuantGemvPlan(spec, schedule)

    @property
    def spec(self) -> GemmSpec: return self.quant.gemm

    @property
    def type(self) -> QType: return self.quant.type

    @property
    def groups(self) -> int:
        """Blocks of scales in a unit; 0: a row has one, which is applied at the end."""
        columns = self.type.scale.columns
        return max(1, self.type.unit // columns) if columns else 0

    @property
    def warps_k(self) -> int: return self.schedule.warps_m

    @property
    def block_n(self) -> int: return self.schedule.block_n

    @property
    def threads(self) -> int: return self.schedule.threads

    @property
    def blocks_n(self) -> int: return -(-self.spec.n // self.block_n)

    @property
    def tiles_m(self) -> int:
        """Groups of 8 rows of activations."""
        return -(-self.spec.m // 8)

    # **** along K ****

    @property
    def total_units(self) -> int: return self.type.pad_columns(self.spec.k) // self.type.unit

    @property
    def iterations(self) -> int: return -(-self.total_units // self.schedule.units)

    @property
    def iterations_a_split(self) -> int: return -(-self.iterations // self.schedule.splits)

    @property
    def splits(self) -> int:
        """Splits that have an iteration."""
        return -(-self.iterations // self.iterations_a_split)

    def is_cluster(self, arch: str) -> bool:
        """Whether the CTAs that share K are a cluster."""
        return arch == "sm_90a" and 1 < self.splits <= MOST_CLUSTERED

    @property
    def span(self) -> int:
        """Elements of K of a split."""
        return self.iterations_a_split * self.schedule.units * self.type.unit

    # **** resources ****

    @property
    def pitch_bytes(self) -> int:
        """Bytes between rows of activations in shared memory."""
        return self.span * self.spec.a.dtype.itemsize + PAD_BYTES

    @property
    def sums_pitch(self) -> int:
        """Columns of a row of sums in shared memory: 4 more, as lanes hold rows 2q."""
        return self.block_n + 4

    @property
    def smem_bytes(self) -> int:
        """Sums take the place of the activations."""
        sums = 4 * self.warps_k * self.spec.parts * self.spec.m * self.sums_pitch
        return max(self.spec.m * self.pitch_bytes, sums) + 16

    @property
    def registers(self) -> int:
        """Registers of a thread, about: sums, loads, activations of a unit, and what else there is."""
        tiles = self.schedule.tiles * self.spec.parts
        codes = self.type.unit * self.type.bits // 64
        factors = 1 + (self.type.outer is not None)
        loads = codes + max(1, self.groups) * (factors * (1 + self.type.mins) + self.type.zeros)
        # activations of a unit, sums of a block, and factors in float32
        now = self.tiles_m * (self.type.unit // 8 + 4 + 16 * self.type.mins) + 8 * (factors - 1)
        book = 8 * looks_up(self.type)
        return 4 * tiles * self.tiles_m + self.schedule.units * tiles * loads + now + book + OTHER_REGISTERS

    @property
    def ctas_an_sm(self) -> int:
        """For how many ptxas is to leave registers: up to 1024 threads that have what they need."""
        return max(min(REGISTERS // (-(-self.registers // 8) * 8), 1024) // self.threads, 1)


def problems(spec: QuantGemmSpec, s: QuantGemv, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    gemm = spec.gemm
    apart = [f"{gemm.parts} parts of n={gemm.n}, no multiple of 16"] if gemm.parts > 1 and gemm.n % 16 else []
    return apart + matrix_problems(spec, s, arch)


def matrix_problems(spec: QuantGemmSpec, s: QuantGemv, arch: str) -> list[str]:
    """The same where each part begins with a tile of its own."""
    gemm, plan = spec.gemm, QuantGemvPlan.of(spec, s)
    if gemm.m > MOST_ROWS: return [f"m={gemm.m} is above {MOST_ROWS}"]
    if s.threads > 1024: return [f"{s.warps_m} warps are {s.threads} threads, at most 1024"]
    out = []
    if not plan.groups and spec.type.mins: out.append("minima of whole rows")
    most = min(255, REGISTERS // s.threads // 8 * 8)
    if plan.registers > most:
        out.append(f"{s.units} units × {s.tiles} tiles + sums of {gemm.m} rows + {OTHER_REGISTERS} = "
                   f"{plan.registers} registers, {s.threads} threads have {most} each")
    if plan.smem_bytes > limits.SMEM_BYTES[arch]:
        out.append(f"{gemm.m} rows × {plan.pitch_bytes} B, or their sums, = {plan.smem_bytes} B of shared "
                   f"memory, {arch} has {limits.SMEM_BYTES[arch]}")
    if s.splits > plan.iterations:
        out.append(f"{s.splits} splits of {plan.total_units} units / {s.units} = {plan.iterations} "
                   "iterations")
    if plan.splits > MOST_GRID: out.append(f"{plan.splits} splits are above {MOST_GRID}")
    return out


def candidates(spec: QuantGemmSpec, gpu: GPU) -> list[QuantGemv]:
    """None for many rows; split where the activations do not fit in a third of the shared memory."""
    if spec.gemm.m > MOST_ROWS: return []
    made = []
    # from 5 rows on, two tiles share what is read of activations
    first = ((2, 2, 8), (1, 2, 8)) if spec.gemm.m > 4 else ((1, 2, 8), (2, 2, 8))
    for tiles, units, warps in (*first, (1, 1, 8), (1, 1, 4), (1, 1, 1)):
        base = QuantGemv().of(tiles, units).warps(warps)
        plan = QuantGemvPlan.of(spec, base)
        splits = -(-plan.smem_bytes * 3 // SMEM_BYTES[gpu.arch])
        made.append(base.split(min(splits, plan.iterations)))
    return made
