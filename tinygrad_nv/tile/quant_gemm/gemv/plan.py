"""The arithmetic of a `quant_gemv` kernel: which warp reads which units of the weights, and its resources.

Protocol: a CTA has `tiles` tiles of 16 columns, of each part, and all rows of activations. Units of K (quant/
types.py) are numbered; an iteration is `units` of them. Iteration i belongs to split
i // `iterations_a_split`, warp i % `warps_k` of it.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.quant_gemm.fragments import looks_up
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

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
