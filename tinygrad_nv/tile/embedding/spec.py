"""Rows of a table by number, and the table's gradient. A spec does not know its target.

Protocol: tokens number the rows of weight (V, H), those from −V to −1 from its end; other numbers are of no
row. `tokens` are where they lie: extents, the first of which may be the most there can be, and strides.

    out[t, :]    = weight[tokens[t], :]                       0 where there is no such row
    dweight[v, :] = Σ grad[t, :] over t with tokens[t] = v     0 where there is none

Sums are of float32, in the order of tokens, and rounded to the weight's dtype once. A GPU adds up the tokens
of a row by segments of `SEGMENT`, then these sums, then the tokens after the last segment; a CPU adds one
token after the other. The order depends on nothing else.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S

FLOATS = (dtypes.float32, *FLOAT16S)
# codes and scales of quantised tables are copied, too, and words of any rows
TABLES = (*FLOATS, dtypes.uint8, dtypes.int8, dtypes.uint16, dtypes.uint32)
TOKENS = (dtypes.int32, dtypes.int64)
SEGMENT = 32    # tokens of a row that a GPU adds up apart


@dataclass(frozen=True)
class Tokens:
    """Numbers of rows: token (i, j, …) lies at offset + Σ strides · (i, j, …)."""
    dtype: DType
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def count(self) -> int:
        """How many there are at most."""
        return prod(self.extents)


@dataclass(frozen=True)
class EmbeddingSpec:
    """Rows of a table (V, H). `symbolic`: how many tokens there are is the kernel's last integer; they have
    one extent then. Raises `SpecError` for what cannot be."""
    rows: int
    width: int
    dtype: DType
    tokens: Tokens
    symbolic: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.width, *self.tokens.extents) < 1:
            raise SpecError(f"{self.rows}x{self.width}, tokens {self.tokens.extents}", "extents ≥ 1")
        tables = FLOATS if isinstance(self, EmbeddingGradientSpec) else TABLES
        for dtype, allowed in ((self.dtype, tables), (self.tokens.dtype, TOKENS)):
            if dtype not in allowed: raise SpecError(dtype.name, ", ".join(each.name for each in allowed))
        if self.symbolic and len(self.tokens.extents) != 1:
            raise SpecError(f"a symbolic number of tokens {self.tokens.extents}", "one dimension of tokens")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return (self.tokens.count,) if self.symbolic else ()

    def __str__(self) -> str:
        most = "≤" if self.symbolic else ""
        return f"{most}{self.tokens.count} of {self.rows}x{self.width} {short(self.dtype)}"


@dataclass(frozen=True)
class EmbeddingGradientSpec(EmbeddingSpec):
    """The gradient of a table: of `tokens` rows of the result's gradient."""

    def __str__(self) -> str: return f"gradient {super().__str__()}"
