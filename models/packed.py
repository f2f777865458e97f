"""One step over sequences that lie one after the other, without a cache: what embedding models compute.

Protocol: a step has T tokens. Sequence b has rows starts[b] … starts[b + 1] − 1 of them; rows after the last
sequence's are padding, which attends to nothing. No extent depends on the lengths, which are read from
memory: one captured step serves every batch of at most T tokens.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv import functional as F

from .paged import AttentionKind, RopeTables


@dataclass(frozen=True)
class PackedBatch:
    """`starts` int32 [sequences + 1] and `positions` int32 [T] in memory; no sequence has more than `longest`
    tokens. `ropes` are cosines and sines of each token, (T, 1, dim/2). `distances`, float32 (H, 2 L − 1) for
    an L of at least `longest`, are added to scores by how far a key is from its row."""
    starts: Tensor
    positions: Tensor
    longest: int
    causal: bool
    ropes: tuple[RopeTables, ...] = ()
    distances: Tensor | None = None

    @staticmethod
    def of(starts: Tensor, positions: Tensor, longest: int, tables: tuple[RopeTables, ...], causal: bool,
           distances: Tensor | None = None) -> PackedBatch:
        """A batch with the rows of rope tables of its tokens."""
        ropes = tuple((F.embedding(cos, positions).unsqueeze(1), F.embedding(sin, positions).unsqueeze(1))
                      for cos, sin in tables)
        return PackedBatch(starts, positions, longest, causal, ropes, distances)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionKind) -> Tensor:
        """Attention of q (T, H, D) over k, v (T, H_kv, D), rotated already: (T, H·D)."""
        made = F.varlen_attention(q, k, v, self.starts, self.starts, self.longest, self.longest,
                                causal=self.causal, window=how.window, scale=how.scale, softcap=how.softcap,
                                distances=self.distances)
        return made.reshape(q.shape[0], -1).contiguous()
