"""Matmuls of rows with the matrix of their group, in types. A spec does not know its target.

Protocol: of x [sources, K], w [E, N, K] and offsets [E + 1], all contiguous; rows offsets[e] … offsets[e + 1]
− 1 are group e. Of row i, slot = order[i] where there is an order:

    y = x[source(i)] W_eᵀ + bias_e              sums of float32; source(i) is slot // gather, or i without
    y = act(y[: N / 2]) · y[N / 2 :]            with `activation`, of gate | up
    out[place(i)] = y · weights[slot]           with `weighted`; rounded once; place(i) is slot with `scatter`

Rows that no group has are zeros in the reference and on CPUs, and may hold anything where a GPU's kernel
runs. A kernel reads the matrices of groups that have rows, and no other.

`ScaledGroupedGemmSpec` is the same of 8-bit floats with float32 scales of groups of `GROUP` of K, as in
scaled_gemm/spec.py: scale_x [sources, K / GROUP] of each row, scale_w [E, N / GROUP, K / GROUP] of square
blocks, whose numbers of groups are rounded up. Kernels take them after w.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "swiglu_clamped")
ALPHA, LIMIT = 1.702, 7.0   # of gpt-oss's gate, and where gate and up are cut
FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
GROUP = 128     # of K, and of rows of a matrix, that have one scale


@dataclass(frozen=True)
class GroupedGemmSpec:
    """`groups` matrices (n, k) and `rows` rows of `sources` of x. x, w, bias and results have one dtype,
    weights are float32. Raises `SpecError` for what cannot be."""
    groups: int
    rows: int
    n: int
    k: int
    dtype: DType = dtypes.float32
    sources: int = 0        # 0: as many as rows
    gather: int = 0
    scatter: bool = False
    activation: str = ""
    weighted: bool = False
    biased: bool = False
    OPERANDS: ClassVar[tuple[DType, ...]] = FLOATS
    scaled: ClassVar[bool] = False      # whether operands have scales
    transposed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if min(self.groups, self.rows, self.n, self.k) < 1 or min(self.gather, self.sources) < 0:
            raise SpecError(f"{self.rows}x{self.n}x{self.k} in {self.groups} groups", "extents ≥ 1")
        if self.dtype not in self.OPERANDS:
            raise SpecError(f"elements of {short(self.dtype)}", ", ".join(map(short, self.OPERANDS)))
        if self.activation not in ACTIVATIONS or (self.activation and self.n % 2):
            raise SpecError(f"activation={self.activation!r} of {self.n} columns",
                            f"one of {', '.join(ACTIVATIONS[1:])}, of gate and up")
        if self.gather and self.rows > self.gather * self.x_rows:
            raise SpecError(f"gather={self.gather}, {self.rows} rows of {self.x_rows}",
                            "as many rows, at most")
        if not self.gather and self.x_rows != self.rows:
            raise SpecError(f"an order of {self.rows} for {self.x_rows} rows", "gather, or as many")

    @property
    def out(self) -> DType:
        """Dtype of results and of bias."""
        return self.dtype

    @property
    def matrix(self) -> DType:
        """Dtype of w."""
        return self.dtype

    @property
    def x_rows(self) -> int:
        """Rows of x."""
        return self.sources or self.rows

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // self.halves

    @property
    def halves(self) -> int:
        """2 where columns of a matrix are gate | up."""
        return 2 if self.activation else 1

    @property
    def has_order(self) -> bool:
        """Whether there is an order."""
        return bool(self.gather or self.scatter or self.weighted)

    @property
    def flops(self) -> int:
        """Operations of all rows."""
        return 2 * self.rows * self.n * self.k

    @property
    def active_bytes(self) -> int:
        """Bytes of the matrices that are read at most."""
        return min(self.groups, self.rows) * self.n * self.k * self.matrix.itemsize

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return ()

    def __str__(self) -> str:
        more = [*[self.activation] * bool(self.activation), *["bias"] * self.biased,
                *[f"rows // {self.gather}"] * bool(self.gather), *["weighted"] * self.weighted,
                *["scattered"] * self.scatter]
        return f"{self.rows}x{self.n}x{self.k} of {self.groups} groups {short(self.dtype)}" + \
            "".join(f", {each}" for each in more)


@dataclass(frozen=True)
class ScaledGroupedGemmSpec(GroupedGemmSpec):
    """8-bit floats with scales of groups of K; results and bias are of `result`."""
    dtype: DType = dtypes.fp8e4m3
    result: DType = dtypes.bfloat16
    OPERANDS: ClassVar[tuple[DType, ...]] = (dtypes.fp8e4m3,)
    scaled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.result not in FLOATS: raise SpecError(f"results of {short(self.result)}", "floats")

    @property
    def out(self) -> DType: return self.result

    @property
    def k_groups(self) -> int:
        """Scales along K."""
        return -(-self.k // GROUP)

    @property
    def n_groups(self) -> int:
        """Scales along a matrix's rows."""
        return -(-self.n // GROUP)

    def __str__(self) -> str: return f"{super().__str__()}, scales 1x{GROUP}, {GROUP}x{GROUP}"


@dataclass(frozen=True)
class TransposedGroupedSpec(GroupedGemmSpec):
    """Grouped matmul of w [E, K, N]: x W_e, as the gradients of rows are."""
    transposed: ClassVar[bool] = True

    def __str__(self) -> str: return f"{super().__str__()}, transposed"


@dataclass(frozen=True)
class MixedGroupedSpec(GroupedGemmSpec):
    """Grouped matmul of float32 rows and a w of 16-bit floats, which are widened."""
    half: DType = dtypes.float16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != dtypes.float32 or self.half not in FLOATS[1:]:
            raise SpecError(f"rows of {short(self.dtype)}, matrices of {short(self.half)}",
                            "f32, and f16 or bf16")

    @property
    def matrix(self) -> DType: return self.half

    def __str__(self) -> str: return f"{super().__str__()}, matrices {short(self.half)}"
