"""A matmul of 8-bit floats whose operands have scales of blocks. A spec does not know its target.

Protocol: a `GemmSpec` whose sums are of groups of `GROUP` of K, each multiplied by the scales of the two
blocks that it is a product of, in float32:

    sum[m, n] = Σ_g s_a[m // R_a, g] · s_b[n // R_b, g] · Σ_{k in group g} a[m, k] · b[n, k]

R = 1 is a scale of each row (activations: 1 x 128), R = 128 that of a square block (weights: 128 x 128), as
DeepSeek-V3 and Qwen3-FP8 have them (arXiv 2412.19437, 3.3). K may end within a group. Kernels take the scales
after the operands:

    out; a; b; a_scale; b_scale; x0, x1, …
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import transpose
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec

GROUP = 128     # of K that have one scale


@dataclass(frozen=True)
class BlockScales:
    """float32 scales of blocks of `rows` x `GROUP`: that of block (i, g) lies `offset` + i · `mn` + g · `k`
    elements after the beginning of its buffer."""
    rows: int
    mn: int
    k: int = 1
    offset: int = 0

    def __str__(self) -> str: return f"{self.rows}x{GROUP}"


@dataclass(frozen=True)
class ScaledGemmSpec(GemmSpec):
    """A matmul with scales of groups. Raises `SpecError` for what cannot be."""
    a_scale: BlockScales = field(default=BlockScales(1, 1))
    b_scale: BlockScales = field(default=BlockScales(1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a.dtype not in FP8: raise SpecError(f"operands of {self.a.dtype} with scales", "8-bit floats")
        if self.batch or self.parts > 1:
            raise SpecError(f"scales of a batch {self.batch}, of {self.parts} parts", "one matrix")
        for scale in (self.a_scale, self.b_scale):
            if min(scale.rows, scale.mn + 1, scale.k + 1) < 1:
                raise SpecError(f"scales {scale} at {scale.mn}, {scale.k}", "rows ≥ 1, strides ≥ 0")

    @property
    def groups(self) -> int:
        """Scales along K."""
        return -(-self.k // GROUP)

    def swap_operands(self) -> ScaledGemmSpec:
        """The same matmul by (b aᵀ)ᵀ."""
        out = replace(self.out, m=self.out.n, n=self.out.m)
        return replace(self, m=self.n, n=self.m, a=self.b, b=self.a, out=out,
                       epilogue=transpose(self.epilogue), a_scale=self.b_scale, b_scale=self.a_scale)

    def __str__(self) -> str: return f"{super().__str__()}, scales {self.a_scale}, {self.b_scale}"
