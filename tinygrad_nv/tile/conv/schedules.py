"""How a convolution is computed on a GPU: the schedule of its template, what is legal, and what is tried."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.mma import defaults, legality
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU


@dataclass(frozen=True)
class ConvMma(Mma):
    """mma.sync (mma.py): `block_m` positions by `block_n` output channels, `block_k` channels of a tap at a
    time."""
    template: ClassVar[str] = "conv_mma"

    @property
    def mma(self) -> Mma:
        """The schedule of a matmul."""
        return Mma(**asdict(self))


def problems(spec: ConvSpec, s: ConvMma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    out = legality.problems(spec.gemm, s.mma, arch)
    if spec.channels % s.block_k:
        out.append(f"{spec.channels} channels are no multiple of block_k={s.block_k}")
    if (size := spec.batch * spec.height * spec.width) >= 1 << 31:
        out.append(f"{size} pixels, less than 2^31 are possible")
    return out


def candidates(spec: ConvSpec, gpu: GPU) -> list[ConvMma]:
    """Those of a matmul, the ones first that its cost model likes best."""
    model = CostModel(spec.gemm, gpu_model_for(gpu.arch, gpu.sm_count))
    made = [s for s in defaults.candidates(spec.gemm, gpu)
            if not legality.problems(spec.gemm, s, gpu.arch) and not spec.channels % s.block_k]
    made.sort(key=lambda s: model.predict(s).seconds)
    return [ConvMma(**asdict(s)) for s in made or defaults.candidates(spec.gemm, gpu)[-1:]]
