"""Convolutions with wgmma and TMA (spec.py): the kernel of gemm/wgmma, whose left operand is copied from
images by an im2col tensor map. For sm_90a, channels that tiles of K divide.

    producer:   a stage of K is `block_k` channels of one tap (r, s)
                one copy brings them for `block_m` positions that follow one another

TMA walks over the base pixels (i · stride − above, j · stride − left) of these positions, across rows and
images, within the box that the map has corners of. It adds the tap to each, and brings zeros for pixels
outside of the image. So a position's row and column are computed once for each tile, by one thread.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.conv.templates import ConvWgmma
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.gemm.wgmma.kernel import WgmmaKernel
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads, OperandLoads, to_signed
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import MAP_DTYPES, OperandTile
from tinygrad_nv.tile.template import GPU


def conv_wgmma(spec: ConvSpec, schedule: ConvWgmma, gpu: GPU) -> GemmKernel:
    """The kernel. Parameters in this order: out, x, w, those of the epilogue."""
    plan = WgmmaPlan.of(spec.gemm, schedule.wgmma)
    kb = Kernel(schedule.template, arch=gpu.arch, threads=schedule.threads, min_ctas=1,
                cluster=(plan.cluster, 1, 1) if plan.cluster > 1 else ())
    ctas = plan.ctas(gpu_model_for(gpu.arch, gpu.sm_count).sm_count, gpu.clusters)
    return ConvWgmmaKernel(kb, plan, ctas, spec).emit_kernel()


class ConvWgmmaKernel(WgmmaKernel):
    """A matmul's kernel whose rows are patches of images."""
    OPERANDS = ("x", "w")

    def __init__(self, kb: Kernel, plan: WgmmaPlan, ctas: int, conv: ConvSpec) -> None:
        self.conv = conv
        super().__init__(kb, plan, ctas)

    def make_loads(self, first_pointer: int) -> GemmLoads:
        return ConvLoads(self.kb, self.plan, first_pointer, self.conv)


class ConvLoads(GemmLoads):
    """Copies of patches and of filters."""

    def __init__(self, kb: Kernel, plan: WgmmaPlan, first_pointer: int, conv: ConvSpec) -> None:
        self.conv = conv
        self.across, self.down, self.image = kb.regs("s32", 3)      # the first base pixel of a copy
        self.s, self.r = kb.regs("u32", 2)
        super().__init__(kb, plan, first_pointer)

    def map_of(self, name: str, operand: Operand, tile: OperandTile, pointer: int, extent: int, k: int,
               rows: int, part_offset: int, symbolic: bool) -> MapArgument:
        if name != "a":
            return super().map_of(name, operand, tile, pointer, extent, k, rows, part_offset, symbolic)
        return image_map(self.conv, tile, pointer, rows)

    def start_at(self, side: OperandLoads, mn: Value, start: Value | int) -> None:
        if side is not self.a: return super().start_at(side, mn, start)
        kb, c = self.kb, self.conv
        first = mn if side.number is None else mn + side.number * side.rows
        i, j = first // c.out_width % c.out_height, first % c.out_width
        self.across.set(to_signed(kb, j * c.stride[1] - c.padding[2]))
        self.down.set(to_signed(kb, i * c.stride[0] - c.padding[0]))
        self.image.set(to_signed(kb, first // (c.out_height * c.out_width)))
        tap = start // c.channels
        channel = start - tap * c.channels
        side.at_k.set(channel if isinstance(channel, int) else to_signed(kb, channel))
        self.r.set(tap // c.kernel[1])
        self.s.set(tap % c.kernel[1])
        return None

    def advance(self, side: OperandLoads) -> None:
        super().advance(side)
        if side is not self.a: return
        kb, c = self.kb, self.conv
        over = side.at_k == c.channels
        side.at_k.set(kb.select(over, 0, side.at_k))
        self.s.set(kb.select(over, self.s + 1, self.s))
        below = self.s == c.kernel[1]
        self.s.set(kb.select(below, 0, self.s))
        self.r.set(kb.select(below, self.r + 1, self.r))

    def copy_boxes(self, side: OperandLoads, part: int, tensor_map: Value, target: Value,
                   full: MemoryOperand) -> None:
        if side is not self.a: return super().copy_boxes(side, part, tensor_map, target, full)
        tap = [self.kb.reg("b16"), self.kb.reg("b16")]
        for into, value in zip(tap, (self.s, self.r), strict=True): self.kb.emit("cvt.u16.u32", into, value)
        for column in range(side.tile.columns):
            channel = side.at_k + column * side.tile.inner if column else side.at_k
            self.kb.tma_load(target.at(column * side.tile.column_bytes), tensor_map,
                             [channel, self.across, self.down, self.image], full, side.mask, offsets=tap)
        return None


def image_map(conv: ConvSpec, tile: OperandTile, pointer: int, positions: int) -> MapArgument:
    """The im2col map of images (B, H, W, C): `positions` of the result at a time."""
    c, pixel = conv, conv.channels * tile.size
    above, below, left, right = c.padding
    return MapArgument(pointer, MAP_DTYPES[c.dtype], (c.channels, c.width, c.height, c.batch),
                       (pixel, pixel * c.width, pixel * c.width * c.height), (tile.inner, positions),
                       f"{tile.span}B", lower=(-left, -above),
                       upper=(right - c.kernel[1] + 1, below - c.kernel[0] + 1),
                       steps=(1, c.stride[1], c.stride[0], 1))
