"""What is computed, in types: a matrix product and what follows it. A spec does not know its target.

Protocol: patterns make a spec from a subgraph, templates make a kernel from a spec and a `Schedule`. Specs
are frozen and hashable; two kernels are the same when spec, schedule and architecture are. Extents and
strides are in elements, sizes in bytes say so.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError

FLOATS = (dtypes.float16, dtypes.bfloat16)
Activation = Literal["", "relu", "gelu_tanh", "quick_gelu", "silu"]
Vector = Literal["", "row", "column"]


@dataclass(frozen=True)
class Operand:
    """A matrix in memory by its strides: `mn` along the dimension it shares with the result, `k` along the
    one that is summed, `batch` between matrices (0: all the same)."""
    dtype: DType
    mn: int
    k: int
    batch: int = 0

    @property
    def major(self) -> Literal["K", "MN", ""]:
        """The dimension in which elements lie side by side; "" when there is none."""
        return "K" if self.k == 1 else "MN" if self.mn == 1 else ""

    @property
    def aligned_bytes(self) -> int:
        """The largest power of two, up to 16, that every row's address is a multiple of (a base aligned to
        16 bytes assumed)."""
        size, pitch = self.dtype.itemsize, self.mn if self.major == "K" else self.k
        return min(16, *(_power_of_two(stride * size) for stride in (pitch, self.batch)))


def _power_of_two(nbytes: int) -> int: return nbytes & -nbytes if nbytes else 16


@dataclass(frozen=True)
class Epilogue:
    """What happens to the sums before they are stored, in this order: times `scale`, plus a bias along rows
    (one for each row) or columns, the activation, plus a residual in the result's place. Bias and residual
    are further parameters of the kernel, in this order, of the result's dtype."""
    scale: float = 1.0
    bias: Vector = ""
    activation: Activation = ""
    residual: bool = False


@dataclass(frozen=True)
class GemmSpec:
    """out[b, m, n] = epilogue(Σ_k a[b, m, k] · bᵀ[b, n, k]), summed in float32. `rows` and `batch` are
    strides of the result, whose columns lie side by side. Raises `SpecError` for what cannot be."""
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out: DType
    rows: int
    batch: int = 1
    batch_stride: int = 0
    epilogue: Epilogue = Epilogue()

    def __post_init__(self) -> None:
        for name, extent in (("m", self.m), ("n", self.n), ("k", self.k), ("batch", self.batch)):
            if extent < 1: raise SpecError(f"{name}={extent}", "an extent ≥ 1",
                                           "leave empty products to tinygrad")
        if self.rows < self.n and self.m > 1:
            raise SpecError(f"rows of the result {self.rows} elements apart, {self.n} long",
                            "rows that lie apart")
        if self.a.dtype != self.b.dtype:
            raise SpecError(f"{self.a.dtype} times {self.b.dtype}", "one dtype for both operands", "cast one")

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k
