"""Attention over latents in pages: multi-head latent attention (MLA), absorbed.

Protocol. A latent cache has one vector for each token, of which all query heads compute keys and values
(DeepSeek-V2, arXiv 2405.04434): the rotated key that they share, then the latent. Head h has the keys
W_K[h] latent and the values W_V[h] latent, so that with queries multiplied by W_K[h]ᵀ beforehand

    s[i, c]   = scale · (q_rope[i] · rope[c] + (W_K[h]ᵀ q[i]) · latent[c])
    out[i]    = W_V[h] Σ_c p[i, c] latent[c]

attention never computes keys or values. `latent_attention(q, pages, table, lengths)` is what lies between
the two matrices: paged attention (paged.py) of one key head whose values are the last elements of its keys.
"""
from __future__ import annotations

from tinygrad import Tensor

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.decode.paged import check_shape, paged_attention


def latent_attention(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, *, value_dim: int,
                     scale: float | None = None) -> Tensor:
    """softmax(scale · q kᵀ) v of the newest S_q rows of each request, v the last `value_dim` elements of k:
    [B, S_q, H, value_dim] in q's dtype.

    q [B, S_q, H, D] absorbed; pages [P, page_size, 1, D]; table int32 [B, pages]; lengths int32 [B], with the
    new rows. `scale` is 1/√D by default. Raises `SpecError`."""
    check_shape("pages", pages, "P, page_size, 1, D", (None, None, 1, None))
    width = int(pages.shape[-1])
    if type(value_dim) is not int or not 0 < value_dim <= width:
        raise SpecError(f"value_dim={value_dim}", f"1 to {width}, the elements of a token")
    return paged_attention(q, pages, pages[..., width - value_dim:], table, lengths, scale=scale)
