"""The arithmetic of a `gemv` kernel: which lane reads which bytes of the weights, and its resources.

Protocol: the matmul is turned so that operand a has few rows (activations) and operand b is the weights. A
lane reads chunks of 16 bytes along the dimension in which weights lie side by side, as 16 / `width` loads
of `width` bytes; the loads of neighbouring lanes are neighbours. A warp is `lanes_n` × `lanes_k` lanes:

    along k (K-major weights)   a chunk is part of one row; a step is `lanes_k` chunks along K, `rows` rows a
                                lane
    along n (MN-major weights)  a chunk is a row of K with several columns; a step is `lanes_k` times
                                `depth` rows of K, `rows` chunks of columns a lane

A warp's iteration is `steps` steps, block_k of K; `warps_k` warps take turns at iterations, `warps_n` warps
stand beside each other along N. Iteration i belongs to split i // `blocks_a_split`, warp i % `warps_k` of it.
What is left of K, less than an iteration, is one more.

`tensor`: mma.sync multiplies, with the weights as its 16-row operand: 16-bit floats and bytes of two rows
and more, and fp8 (as float16, which holds it exactly). CUDA cores do the rest.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal

from tinygrad_nv.tile.gemm.schedules import MOST_ROWS, Gemv
from tinygrad_nv.tile.gemm.spec import FLOAT16S, FP8, INT8S, GemmSpec

CHUNK = 16  # bytes
MOST_SUMS = 128  # registers of a lane
MOST_LOADED = 64  # 256 bytes a lane, 64 KiB in flight of 8 warps: an H100 needs 18 KiB an SM
OTHER_REGISTERS = 28  # addresses, predicates, converted weights
REGISTERS = 65536  # of an SM
MOST_CLUSTERED = 8  # CTAs of a cluster on every sm_90a


def turns(spec: GemmSpec) -> bool:
    """Whether operand b is the one with few rows, so that the default schedule is a swapped one."""
    return spec.m > MOST_ROWS >= spec.n and spec.parts == 1 and not spec.symbolic


@dataclass(frozen=True)
class GemvPlan:
    """See above. `width` and `chunk` are bytes, the rest elements, lanes, warps and counts."""
    spec: GemmSpec
    schedule: Gemv
    along: Literal["k", "n"]
    tensor: bool
    width: int
    chunk: int
    lanes_k: int

    @staticmethod
    @lru_cache(1024)
    def of(spec: GemmSpec, schedule: Gemv) -> GemvPlan:
        """The plan, of the product with activations on the left."""
        if schedule.swap: spec = spec.swap_operands()
        along, size = _along(spec), spec.b.dtype.itemsize
        kind = spec.b.dtype
        tensor = kind in FP8 or (kind in (*FLOAT16S, *INT8S) and spec.m > 1)
        chunk = CHUNK
        # on CUDA cores each column of a chunk has a sum for each row of activations
        while along == "n" and not tensor and chunk > 4 and chunk // size * spec.m * spec.parts > MOST_SUMS:
            chunk //= 2
        lanes_k = 4
        if along == "k" and not tensor:
            while lanes_k < 32 and lanes_k * CHUNK // size < spec.k: lanes_k *= 2
        return GemvPlan(spec, schedule, along, tensor, min(chunk, _width(spec, along)), chunk, lanes_k)

    # **** a lane ****

    @property
    def itemsize(self) -> int: return self.spec.b.dtype.itemsize

    @property
    def vector(self) -> int:
        """Elements of a chunk."""
        return self.chunk // self.itemsize

    @property
    def piece(self) -> int:
        """Elements of a load."""
        return self.width // self.itemsize

    @property
    def depth(self) -> int:
        """Rows of K that a lane reads in a step, of weights along n; 1 for others."""
        return 1 if self.along == "k" else min(8, CHUNK // self.itemsize)

    # **** a warp ****

    @property
    def lanes_n(self) -> int: return 32 // self.lanes_k

    @property
    def lanes(self) -> int:
        """Lanes along the dimension of chunks."""
        return self.lanes_k if self.along == "k" else self.lanes_n

    @property
    def step(self) -> int:
        """Elements of K in a step."""
        return self.lanes_k * (self.vector if self.along == "k" else self.depth)

    @property
    def granule(self) -> int:
        """Columns of the result a warp makes at least."""
        if self.along == "n": return self.lanes_n * self.vector
        return 16 if self.tensor else self.lanes_n

    @property
    def warps(self) -> int: return self.schedule.warps_m

    @property
    def warps_n(self) -> int:
        """Number of warps along N: as many as have a granule each, and divide them evenly."""
        return gcd(self.warps, self.schedule.block_n // self.granule)

    @property
    def warps_k(self) -> int: return self.warps // self.warps_n

    @property
    def warp_n(self) -> int:
        """Columns of a warp."""
        return self.schedule.block_n // self.warps_n

    @property
    def rows(self) -> int:
        """Chunks of a lane at one place of K: rows of weights, or, along n, chunks of columns."""
        return self.warp_n // (self.lanes_n if self.along == "k" else self.granule)

    @property
    def steps(self) -> int: return self.schedule.block_k // self.step

    @property
    def load_registers(self) -> int:
        """Registers a lane loads in an iteration."""
        return self.steps * self.rows * self.depth * self.spec.parts * -(-self.chunk // 4)

    @property
    def tiles_m(self) -> int:
        """Groups of 8 rows of activations that mma.sync takes at a time."""
        return -(-self.spec.m // 8)

    @property
    def sums(self) -> int:
        """Registers of a lane that hold sums."""
        if not self.tensor:
            return self.rows * self.spec.parts * self.spec.m * (1 if self.along == "k" else self.vector)
        pairs = self.rows // 2 if self.along == "k" else self.rows * self.vector // 2
        return 4 * pairs * self.tiles_m * self.spec.parts

    @property
    def x_registers(self) -> int:
        """Registers of a lane that hold activations of a step: fp8 as float16."""
        twice, words = self.spec.a.dtype in FP8, max(self.x_chunk // 4, 1)
        if self.tensor: return self.tiles_m * words * (2 if twice else 1)
        if self.along == "n": return self.spec.m * words
        return min(self.spec.m, self.few) * (words if self.itemsize == 1 else self.vector)

    @property
    def few(self) -> int:
        """Rows of activations of which a lane holds a chunk at once, on CUDA cores along k."""
        return self.spec.m if self.spec.m * self.vector <= 32 else 1

    @property
    def registers(self) -> int:
        """Most registers of a thread: sums, loads, activations, and what ptxas was seen to take besides."""
        return self.sums + self.load_registers + self.x_registers + OTHER_REGISTERS

    @property
    def ctas_an_sm(self) -> int:
        """For how many ptxas is to leave registers: up to 1024 threads that have what they need."""
        threads = self.schedule.threads
        return max(min(REGISTERS // (-(-self.registers // 8) * 8), 1024) // threads, 1)

    # **** a CTA ****

    @property
    def full(self) -> int:
        """Iterations in all of K."""
        return self.spec.k // self.schedule.block_k

    @property
    def tail(self) -> int:
        """Elements of K in the iteration that is left."""
        return self.spec.k % self.schedule.block_k

    @property
    def blocks_a_split(self) -> int: return -(-(self.full + (self.tail > 0)) // self.schedule.splits)

    @property
    def splits(self) -> int:
        """Splits that have an iteration."""
        return -(-(self.full + (self.tail > 0)) // self.blocks_a_split)

    def is_cluster(self, arch: str) -> bool:
        """Whether splits meet in a cluster."""
        return arch == "sm_90a" and 1 < self.splits <= MOST_CLUSTERED

    @property
    def span(self) -> int:
        """Elements of K of a split."""
        return self.blocks_a_split * self.schedule.block_k

    @property
    def x_chunk(self) -> int:
        """Bytes of a row of activations that a lane multiplies in a step."""
        return self.chunk if self.along == "k" else self.depth * self.itemsize

    @property
    def x_width(self) -> int:
        """Bytes of activations that a lane reads from shared memory at a time."""
        return self.width if self.along == "k" else self.x_chunk

    @property
    def pitch_bytes(self) -> int:
        """Bytes of a row of activations in shared memory. The 4 lanes along K of an mma.sync read side by
        side, those of the next row are to be in the banks after theirs."""
        nbytes = self.span * self.itemsize
        return -(-nbytes // 128) * 128 + max(4 * self.x_width, 16) if self.tensor else -(-nbytes // 16) * 16

    @property
    def x_bytes(self) -> int: return self.spec.m * self.pitch_bytes

    @property
    def sums_pitch(self) -> int:
        """Columns of a row of sums in shared memory: 4 more, as the lanes of an mma.sync hold rows 2q."""
        return self.schedule.block_n + (4 if self.tensor else 0)

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of all warps along K."""
        return 4 * self.warps_k * self.spec.parts * self.spec.m * self.sums_pitch

    @property
    def smem_bytes(self) -> int:
        """Sums take the place of the activations."""
        return max(self.x_bytes, self.sums_bytes) + 16

    @property
    def block_n(self) -> int: return self.schedule.block_n

    @property
    def threads(self) -> int: return self.schedule.threads

    @property
    def blocks_n(self) -> int: return -(-self.spec.n // self.schedule.block_n)

    @property
    def reach_bytes(self) -> int:
        """How far apart the loads of an iteration lie: distances are offsets of instructions."""
        b = self.spec.b
        return (self.warp_n * b.mn + self.schedule.block_k * b.k) * self.itemsize


def _along(spec: GemmSpec) -> Literal["k", "n"]:
    """The dimension in which weights lie closer together."""
    b = spec.b
    if b.mn == 1 and spec.k == 1: return "n"
    return "k" if b.k == 1 or b.k <= b.mn else "n"


def _width(spec: GemmSpec, along: Literal["k", "n"]) -> int:
    """Bytes of a load: they are aligned, and no load is half inside the matrix."""
    b, size = spec.b, spec.b.dtype.itemsize
    stride, other, extent = (b.k, b.mn, spec.k) if along == "k" else (b.mn, b.k, spec.n)
    if stride != 1: return size
    width = CHUNK
    while any(place * size % width for place in (other, b.offset, *b.batch, spec.part)) \
            or extent % (width // size): width //= 2
    return width
