"""Block sizes of the blocked GEMM, from the processor's caches and registers.

Protocol: `blocks` is what `default` puts in a schedule. In registers are two vectors of columns and as many
rows as there is room for, less where fewer are padded less: a step of rows x vectors costs that many
multiplications, and about half of one for each vector of b and unit of a that it loads. Then the blocks:

    block_k     a panel of b (block_k units x columns) fills the first cache: it is read again for each strip
                of rows
    block_m     packed a (block_m x block_k) takes a fourth of the second cache, and so do sums of as many
                columns as are in registers; b is packed once for each block of rows
    block_n     sums (block_m x block_n, of each part) take another fourth; tiles can be shared out evenly

The blocked kernel adds an element's terms one after the other from each block's first on, then the blocks. So
the class of its schedules (tile/order.py) is the instruction set and `block_k`, which is that of panels two
vectors wide, whatever the width is (`in_blocks`).
"""
from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.gemm.schedules import CPUGemm
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

STACK_BYTES = 1 << 20  # what a kernel may keep on a thread's stack
MOST_BYTES_K = 256     # products of bytes whose sum in float32 is exact: 256 · 255² < 2^24
WIDEST = 512           # columns of a tile; with more of them few rows have too few tiles to share out
SMALL = 1 << 21        # flops below which threads are not worth waking
PARTS = 4              # for each thread, so that one that is held up does less
Blocked = TypeVar("Blocked", bound=CPUGemm)


def registers(m: int, n: int, isa: ISA) -> tuple[int, int]:
    """Rows and columns of the result to keep in registers."""
    vectors = 1 if n <= isa.lanes else 2
    # a register for a's unit; without instructions of three operands two more for products
    most = (isa.registers - vectors - (1 if isa.lanes > 4 else 3)) // vectors

    def cost(rows: int) -> float: return -(-m // rows) * (rows * vectors + (rows + vectors) / 2)
    strips = range(-(-m // most), -(-m // (most // 2 + 1)) + 1)
    return min((-(-m // number) for number in strips), key=cost), vectors * isa.lanes


def deepest(spec: GemmSpec, target: CPU, columns: int, per: int) -> int:
    """Units along k of a panel of b that fits the first cache, at most."""
    lanes = target.isa.lanes
    most = max(lanes, min(512, target.l1_bytes // (4 * columns) // lanes * lanes))
    return min(most, MOST_BYTES_K) if spec.a.dtype in INT8S and per == 1 else most


def blocks(spec: GemmSpec, target: CPU, per: int) -> CPUGemm:
    """The schedule in one part of a product of units of `per` elements."""
    lanes, units = target.isa.lanes, -(-spec.k // per)
    rows, columns = registers(spec.m, spec.n, target.isa)
    block_k = up(-(-units // -(-units // deepest(spec, target, columns, per))), lanes)
    fourth = min(target.l2_bytes, STACK_BYTES) // 4
    tallest = max(rows, fourth // (4 * max(block_k, columns * spec.parts)) // rows * rows)
    block_m = up(-(-spec.m // -(-spec.m // tallest)), rows)
    widest = max(columns, min(WIDEST, fourth // (4 * block_m * spec.parts) // columns * columns))
    down, across = -(-spec.m // block_m) * spec.matrices, -(-spec.n // widest)
    while down * across % target.threads and -(-spec.n // across) > columns: across += 1
    return CPUGemm(target.isa, 1, block_m, up(-(-spec.n // across), columns), block_k * per, rows, columns)


def in_blocks(s: Blocked, spec: GemmSpec, target: CPU) -> Blocked:
    """A schedule with the class's blocks of k."""
    per, lanes = PER[kind_of(spec, target.isa)], target.isa.lanes
    units = -(-spec.k // per)
    most = deepest(spec, target, 2 * lanes, per)
    return replace(s, block_k=up(-(-units // -(-units // most)), lanes) * per)


def count_parts(spec: GemmSpec, tiles: int, target: CPU) -> int:
    """Returns how many parts share tiles of equal size. Threads take one part after the other, so all end at
    the same time only where tiles divide among parts, and parts among threads: 12 tiles in 8 parts took two
    threads 1.19 times as long as in 6. Of the numbers that are as good: the largest from half of `PARTS` for
    each thread to that, else the next one above, else the largest below."""
    if spec.flops < SMALL or target.threads == 1: return 1
    most = target.threads * PARTS

    def cost(parts: int) -> tuple[int, int, int]:
        place = 1 if parts > most else 0 if parts >= most // 2 else 2
        return -(-tiles // parts) * -(-parts // target.threads), place, parts if place == 1 else -parts
    return min(range(1, min(tiles, 2 * most) + 1), key=cost)


def words(s: CPUGemm) -> str:
    """The class of a schedule, in words."""
    return f"{s.isa}, blocks of {s.block_k} along k"
