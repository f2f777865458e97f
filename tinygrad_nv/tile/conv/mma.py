"""Convolutions with mma.sync (spec.py): the ring of gemm/mma, whose left operand is copied from images. For
sm_80 and later, channels that tiles of K divide.

    as gemm/mma: a tile along K is some channels of one tap; a thread copies 16 bytes of a position's pixel
    of that tap with cp.async, or zeros where the pixel is outside of the image

From a tap to the next in a row of the filter, the channels of a pixel follow those of its neighbour, so the
place of all copies moves by the same bytes; from a row to the next by `jump` more. Which pixels are inside
depends on row and column of the tap, which all threads count.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.conv.templates import ConvMma
from tinygrad_nv.tile.gemm.mma.kernel import MmaKernel
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.ops import CHUNK, TileCopy, width_of
from tinygrad_nv.tile.template import GPU


def conv_mma(spec: ConvSpec, schedule: ConvMma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out, x, w, those of the epilogue."""
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    return ConvMmaKernel(kb, MmaPlan.of(spec.gemm, schedule.mma), spec).emit_kernel()


class ConvMmaKernel(MmaKernel):
    """A matmul's kernel whose rows are patches of images."""

    def __init__(self, kb: Kernel, plan: MmaPlan, conv: ConvSpec) -> None:
        self.conv = conv
        super().__init__(kb, plan)

    def make_copies(self, x: Value, w: Value) -> None:
        """The copies of patches, then of filters."""
        kb, spec, s = self.kb, self.spec, self.schedule
        patches = PatchCopy(kb, spec.a, x, self.first_m, spec.m, s.block_k, CHUNK, s.block_m, s.block_k, 0,
                            self.conv)
        filters = TileCopy(kb, spec.b, w, self.first_n, spec.n, s.block_k,
                           width_of(spec.b, spec.n, s.block_k), self.columns, s.block_k, patches.tile.nbytes)
        self.copies = self.tiles = [patches, filters]
        self.stage_bytes = filters.start + filters.tile.nbytes


@dataclass
class PatchCopy(TileCopy):
    """Copies rows of patches from images at `pointer`."""
    conv: ConvSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        kb, c = self.kb, self.conv
        (self.r, self.s), self.channel = kb.regs("u32", 2, 0), kb.reg("u32", 0)
        self.moved = kb.reg("u64", 0)
        rows = sorted({self.where(i)[0] for i in range(self.passes)})
        self.pixels = {row: self._pixel(row) for row in rows}
        self.jump = (c.width - c.kernel[1]) * c.channels * self.size

    def _pixel(self, row: int) -> tuple[Value, Value, Value]:
        """Returns, of the position `row` rows after the thread's first, at the filter's first tap, where its
        pixel's chunk lies, and the pixel's row and column, which wrap around below 0."""
        c, own = self.conv, self.first + self.row + row
        down, across = own // c.out_width % c.out_height, own % c.out_width
        image = own // (c.out_height * c.out_width)
        i, j = down * c.stride[0], across * c.stride[1]
        nbytes = c.channels * self.size
        start = advance(self.kb, self.pointer, image * (c.height * c.width) + i * c.width + j, nbytes)
        above, left = c.padding[0], c.padding[2]
        start = start + self.byte.to("u64") - (above * c.width + left) * nbytes
        return start, i - above, j - left

    def ask(self) -> None:
        """Nothing: the pixel may be outside."""

    def _advance(self, elements: Value | int) -> None:
        kb, c = self.kb, self.conv
        self.moved += self.block_k * self.size
        if c.kernel == (1, 1): return
        self.channel += self.block_k
        over = self.channel == c.channels
        self.channel.set(kb.select(over, 0, self.channel))
        self.s.set(kb.select(over, self.s + 1, self.s))
        below = self.s == c.kernel[1]
        self.s.set(kb.select(below, 0, self.s))
        self.r.set(kb.select(below, self.r + 1, self.r))
        self.moved.set(kb.select(below, self.moved + self.jump, self.moved))

    def _outside(self, row: int, column: int, masked: bool) -> Value | None:
        c, (_, i, j) = self.conv, self.pixels[row]
        found = (i + self.r >= c.height) | (j + self.s >= c.width)
        return found if self.edge is None else found | (self.edge <= row)

    def _at(self, row: int, column: int) -> MemoryOperand:
        return (self.pixels[row][0] + self.moved).at(column)
