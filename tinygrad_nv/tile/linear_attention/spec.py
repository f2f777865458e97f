"""Linear attention with a state for each sequence. A spec does not know its target.

Protocol: a head's state S, float32 (d_k, d_v), is read and changed by its tokens in their order, with a decay
g ≤ 0, the logarithm of what a token leaves of the state, and a rate β of tokens of the delta rule:

    S  ← exp(g) S                                   a number a head, or one for each of the d_k rows
    v' = β (v − kᵀ S)   with the delta rule         v' = v   without
    S  ← S + k v'ᵀ
    out = scale · qᵀ S

(Gated DeltaNet, arXiv 2412.06464; Kimi Linear's KDA with decays of rows, arXiv 2510.26692; Mamba-2 without
the delta rule, where q is C, k is B and v is Δt x, arXiv 2405.21060; lightning attention, arXiv 2401.04658,
with constant decays.) Key heads are shared by equally many heads, one after the other.

`sequences` are as in tile/sequences.py.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.sequences import check, describe


@dataclass(frozen=True)
class Heads:
    """Element d of head h of token t lies at offset + row · t + head · h + d."""
    dtype: DType
    row: int
    head: int
    offset: int = 0


@dataclass(frozen=True)
class LinearAttentionSpec:
    """`sequences` over `tokens` tokens, each of `heads` heads with `key_heads` of q and k; states in `pages`.
    `delta`: the delta rule; `channels`: a decay for each row of the state. `single`: no sequence has more
    than a token, and that of sequence s is s. Raises `SpecError`."""
    tokens: int
    sequences: int
    heads: int
    key_heads: int
    d_k: int
    d_v: int
    pages: int
    q: Heads
    k: Heads
    v: Heads
    scale: float = 1.0
    delta: bool = True
    channels: bool = False
    single: bool = False

    def __post_init__(self) -> None:
        check(self, ("heads", "key_heads", "d_k", "d_v"), (self.q.dtype, self.k.dtype, self.v.dtype))
        if self.heads % self.key_heads:
            raise SpecError(f"{self.heads} heads with {self.key_heads} of keys", "a multiple of these")
        if self.q.dtype != self.k.dtype:
            raise SpecError(f"q of {short(self.q.dtype)}, k of {short(self.k.dtype)}", "one dtype")

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written: tokens, and each sequence's states."""
        rows = self.key_heads * self.d_k * (self.q.dtype.itemsize + self.k.dtype.itemsize)
        rows += self.heads * (2 * self.d_v * self.v.dtype.itemsize + 4 * self.delta)
        rows += 4 * self.heads * (self.d_k if self.channels else 1)
        return self.tokens * rows + 8 * self.sequences * self.heads * self.d_k * self.d_v

    @property
    def flops(self) -> int:
        """Operations of the recurrence: two each for a state's decay, what it predicts, its change and its
        result."""
        return 2 * (3 + self.delta) * self.tokens * self.heads * self.d_k * self.d_v

    def __str__(self) -> str:
        rule = "delta rule" if self.delta else "sums"
        heads = f"{self.heads}/{self.key_heads} heads of {self.d_k}x{self.d_v}"
        return (f"{describe(self)}, {heads}, {rule}{', decays of channels' * self.channels}, "
                f"{short(self.v.dtype)}")
