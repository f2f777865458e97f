"""A model's multi-head latent attention."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A token's keys and values are
    computed of its latent, `rank` elements; `rope` elements of key and query are rotated, by pairs 2i and
    2i + 1 where `interleaved`, `nope` are not. Values have `value` elements. Queries are computed of
    `q_rank` elements, or at once (0). `bias` is that of projections to ranks."""
    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True
    bias: bool = False

    @property
    def width(self) -> int:
        """Elements of a token in the cache."""
        return self.rope + self.rank

    @property
    def head(self) -> int:
        """Elements of a head's query."""
        return self.nope + self.rope

    def parameters(self, hidden: int, heads: int) -> int:
        """Returns the number of parameters of one layer, without its output projection."""
        made = (hidden + self.bias) * self.width + self.rank * (1 + heads * (self.nope + self.value))
        if not self.q_rank: return made + hidden * heads * self.head
        return made + self.q_rank * (hidden + self.bias + 1 + heads * self.head)
