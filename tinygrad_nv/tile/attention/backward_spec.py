"""Specs of the backward pass of an attention: dq, dk and dv from the gradient of its result.

Protocol. `forward` says what was computed (spec.py: sum, s, l, p; `out` there is not read). For each
element of the batch, with l and delta given, both float32 [*batch, s_q], dense:

    delta[r]   = Σ_d grad[r, d] out[r, d]                                 given
    p[r, c]    = exp(s[r, c] − l[r]), 0 where the band hides c from r, or s is −inf
    dp[r, c]   = Σ_d grad[r, d] v[c, d]                                   float32
    ds[r, c]   = p[r, c] (dp[r, c] − delta[r]) ∂score/∂sum [r, c]
    dv[c, d]   = Σ_r p[r, c] grad[r, d]                                   p rounded to v's dtype
    dk[c, d]   = Σ_r ds[r, c] q[r, d]                                     ds rounded to q's dtype
    dq[r, d]   = Σ_c ds[r, c] k[c, d]

(FlashAttention-2, arXiv 2307.08691, algorithm 2.) dv and dk sum over the query heads of their key head as
well; they are rounded to their dtype. Rows that see nothing have l = −inf, and no share in anything.

Dropout of the forward pass (`kept`) is done again: dv is made of keep · 256 / kept · p, and dp is multiplied
by keep · 256 / kept.

dq is summed in float32, by blocks of keys, in memory that is zero before the launch: dense [*batch, s_q, d].
`deterministic` sums it in one order, whatever is done first.

Only s_q and s_kv may be symbolic, start too.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.spec import OPERANDS, RESULTS, SCALED, AttentionSpec, Rows
from tinygrad_nv.tile.expression import short


@dataclass(frozen=True)
class BackwardSpec:
    """A backward pass. `dk` and `dv` have stride 0 along the query heads of a key head."""
    forward: AttentionSpec
    grad: Rows
    dk: Rows
    dv: Rows
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.forward.is_ragged:
            raise SpecError("the backward pass of a ragged batch", "sequences of one length")
        if self.forward.q.dtype == SCALED:
            raise SpecError(f"the backward pass of {short(SCALED)}", "of bf16, f16 or f32")
        if self.grad.dtype != self.forward.v.dtype:
            raise SpecError(f"a gradient of {short(self.grad.dtype)}",
                            f"that of v: {short(self.forward.v.dtype)}")
        for name, one in (("dk", self.dk), ("dv", self.dv)):
            if one.dtype not in RESULTS: raise SpecError(f"{name} of {one.dtype}", "a float of 16 or 32 bits")
            if one.batch[2]:
                raise SpecError(f"{name} that differs between the query heads of a key head",
                                "stride 0 along them")
        if self.forward.score.dtype != dtypes.float32:
            raise SpecError(f"scores of {self.forward.score.dtype}", "float32")

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return self.forward.integers

    @property
    def flops(self) -> int:
        """Multiplications and additions of the five products, of the pairs that see each other."""
        one = self.forward
        return 2 * one.matrices * one.pairs * (3 * one.d + 2 * one.d_v)

    @property
    def dq_bytes(self) -> int:
        """Bytes of dq in float32, of the most rows."""
        return 4 * self.forward.matrices * self.forward.s_q * self.forward.d

    def __str__(self) -> str:
        return f"backward of {self.forward}" + (", deterministic" if self.deterministic else "")


def dtype_problems(spec: BackwardSpec) -> list[str]:
    """Returns the problems of operands that tensor cores have no instructions for."""
    dtype = spec.forward.q.dtype
    return [] if dtype in OPERANDS else [f"the backward pass of {short(dtype)}, not of "
                                         f"{' or '.join(map(short, OPERANDS))}"]
