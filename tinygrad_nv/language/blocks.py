"""Pieces of a transformer block over Tensors.

Protocol: activations are (B, S, D); heads are (B·H, S, D_h), as flash attention in the tile language takes
them.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import SpecError


def matmul(x: Tensor, w: Tensor) -> Tensor:
    """x (…, K) times w (K, N): (…, N) in x's dtype, summed in float32."""
    if x.shape[-1] != w.shape[0]:
        raise SpecError(f"matmul of {x.shape} and {w.shape}",
                        "as many columns of the first as rows of the second")
    wide = dtypes.is_float(x.dtype) and x.dtype.itemsize < 4
    made: Tensor = x.matmul(w.cast(x.dtype), dtype=dtypes.float32 if wide else None).cast(x.dtype)
    return made


def split_qkv(qkv: Tensor, *, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (B·H, S, D_h) each, of a projection (B, S, 3·H·D_h) that has them side by side."""
    b, s, width = qkv.shape
    if width % (3 * heads):
        raise SpecError(f"a projection of width {width} in {heads} heads", f"a multiple of 3 · {heads}")
    parts = qkv.reshape(b, s, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    made = parts.reshape(3, b * heads, s, width // (3 * heads))
    return made[0], made[1], made[2]


def merge_heads(x: Tensor, *, heads: int) -> Tensor:
    """Heads (B·H, S, D_h) side by side: (B, S, H·D_h)."""
    rows, s, d = x.shape
    if rows % heads: raise SpecError(f"{rows} matrices in {heads} heads", f"a multiple of {heads}")
    made: Tensor = x.reshape(rows // heads, heads, s, d).permute(0, 2, 1, 3).reshape(rows // heads, s,
                                                                                     heads * d)
    return made


def residual(x: Tensor, y: Tensor, *, dropout: float = 0.0) -> Tensor:
    """x + y, elements of y dropped with a probability in training."""
    return x + (y.dropout(dropout) if dropout else y).cast(x.dtype)


def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """x in another's dtype."""
    made: Tensor = x.cast(like.dtype)
    return made
