"""The templates of a convolution on a GPU, sm_90a with wgmma, sm_80 and later: schedules, what is legal, and
what is tried."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import ClassVar, TypeVar

from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality

S = TypeVar("S", bound=GemmSchedule)
MOST_PIXELS = (1 << 31) - 1
CORNERS = range(-128, 128)      # of an im2col map in two dimensions
MOST_STEP = 8
K_BYTES = (128, 64, 32)         # of a stage: rows of a swizzle


@dataclass(frozen=True)
class ConvWgmma(Wgmma):
    """wgmma and TMA (wgmma.py): `block_m` positions by `block_n` output channels, `block_k` channels of a tap
    at a time."""
    template: ClassVar[str] = "conv_wgmma"

    @property
    def wgmma(self) -> Wgmma:
        """The schedule of a matmul."""
        return Wgmma(**asdict(self))


@dataclass(frozen=True)
class ConvMma(Mma):
    """mma.sync (mma.py): `block_m` positions by `block_n` output channels, `block_k` channels of a tap at a
    time."""
    template: ClassVar[str] = "conv_mma"

    @property
    def mma(self) -> Mma:
        """The schedule of a matmul."""
        return Mma(**asdict(self))


# **** what is legal ****

def wgmma_problems(spec: ConvSpec, s: ConvWgmma, arch: str) -> list[str]:
    """Why wgmma.py cannot have a schedule; empty when it can."""
    if s.swap: return ["the transposed matmul"]
    out = [*wgmma.problems(spec.gemm, s.wgmma, arch), *_channels(spec, s)]
    above, below, left, right = spec.padding
    corners = (-left, -above, right - spec.kernel[1] + 1, below - spec.kernel[0] + 1)
    if any(each not in CORNERS for each in corners):
        out.append(f"filters {spec.kernel}, padding {spec.padding}: corners of an im2col map are "
                   f"{CORNERS[0]} to {CORNERS[-1]}")
    if max(spec.stride) > MOST_STEP: out.append(f"stride {spec.stride}: an im2col map has up to {MOST_STEP}")
    return out


def mma_problems(spec: ConvSpec, s: ConvMma, arch: str) -> list[str]:
    """Why mma.py cannot have a schedule; empty when it can."""
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    return [*mma.problems(spec.gemm, s.mma, arch), *_channels(spec, s)]


def _channels(spec: ConvSpec, s: GemmSchedule) -> list[str]:
    out = []
    if spec.channels % s.block_k:
        out.append(f"{spec.channels} channels are no multiple of block_k={s.block_k}")
    if (size := spec.batch * spec.height * spec.width) > MOST_PIXELS:
        out.append(f"{size} pixels, less than 2^31 are possible")
    return out


# **** what is tried ****

def wgmma_candidates(spec: ConvSpec, gpu: GPU) -> list[ConvWgmma]:
    """Returns the candidates of a matmul with as many channels in a stage as divide the image's, and clusters
    and splits of them; those first that its cost model likes best."""
    size = spec.dtype.itemsize
    k = next((each // size for each in K_BYTES if not spec.channels * size % each), 0)
    if not k: return []
    tiles = [s.k(k).deepest(gpu.arch, size) for s in wgmma.candidates(spec.gemm, gpu) if not s.swap]
    sms = gpu_model_for(gpu.arch, gpu.sm_count).sm_count
    made = (each for tile in tiles for each in tile.fill_sms(spec.gemm, sms))
    return [ConvWgmma(**asdict(s)) for s in _best(spec, gpu, made) if
            not wgmma.problems(spec.gemm, s, gpu.arch)]


def mma_candidates(spec: ConvSpec, gpu: GPU) -> list[ConvMma]:
    """Returns the candidates of a matmul, the ones first that its cost model likes best."""
    every = mma.candidates(spec.gemm, gpu)
    made = [s for s in every if not mma.problems(spec.gemm, s, gpu.arch)
            and not spec.channels % s.block_k]
    return [ConvMma(**asdict(s)) for s in _best(spec, gpu, made) or every[-1:]]


def _best(spec: ConvSpec, gpu: GPU, made: Iterable[S]) -> list[S]:
    model = CostModel(spec.gemm, gpu_model_for(gpu.arch, gpu.sm_count))
    return sorted(made, key=lambda s: model.predict(s).seconds)


WGMMA = Template("conv_wgmma", ConvSpec, ConvWgmma, legality(wgmma_problems),
                 wgmma_candidates, lazy_build("tinygrad_nv.tile.conv.wgmma", "conv_wgmma"))
MMA = Template("conv_mma", ConvSpec, ConvMma, legality(mma_problems), mma_candidates,
               lazy_build("tinygrad_nv.tile.conv.mma", "conv_mma"))
FAMILY = Family("conv", (WGMMA, MMA))
