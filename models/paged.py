"""One step over many sequences, each with keys and values in pages.

Protocol: a step has T tokens. A `PagedBatch` assigns them to sequences: `SequenceGroup`s, one after the
other, of B sequences with equally many new tokens. A group's tokens are the newest of sequences that have
`lengths` tokens, in the pages of `table`. Norms and matmuls run over all tokens together; keys and values are
appended, and attention is computed, group by group. A sequence of length 0 is padding: it neither writes nor
attends.

Pages of a 16-bit dtype serve a float32 model: its queries are rounded, too. 8-bit pages have scales, one for
each page and KV head (patterns/kv_append/named.py).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.functional import kv_append, paged_attention
from tinygrad_nv.kvcache.store import LayerPages


@dataclass(frozen=True)
class SequenceGroup:
    """`tokens_per_sequence` new tokens of each of B sequences: `table` int32 [B, pages], `lengths` int32 [B]
    including the new tokens."""
    tokens_per_sequence: int
    table: Tensor
    lengths: Tensor

    @property
    def num_tokens(self) -> int:
        """New tokens of all its sequences."""
        return self.tokens_per_sequence * int(self.lengths.shape[0])


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of a step. `rope` are the tables of all positions that block tables reach."""
    groups: tuple[SequenceGroup, ...]
    rope: tuple[Tensor, Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, window: int | None) -> Tensor:
        """Appends k and v (1, T, H_kv, D), rotated, to the pages, and returns attention of q (1, T, H, D)
        over them: (1, T, H·D)."""
        # new Tensors over the same storage, so that reads depend on the appends
        keys, values = Tensor(pages.keys.uop), Tensor(pages.values.uop)
        cos, sin = self.rope
        queries, first = [], 0
        for group in self.groups:
            end, each = first + group.num_tokens, group.tokens_per_sequence
            own = [x[0, first:end].reshape(-1, each, *x.shape[2:]) for x in (q, k, v)]
            keys, values, rotated = kv_append(
                keys, values, own[1], own[2], group.table, group.lengths, cos=cos, sin=sin, q=own[0],
                k_scale=pages.k_scale, v_scale=pages.v_scale, rounded=True)
            queries.append(rotated)
            first = end
        out = []
        for group, rotated in zip(self.groups, queries, strict=True):
            if pages.k_scale is None: rotated = rotated.cast(keys.dtype)
            attended = paged_attention(rotated, keys, values, group.table, group.lengths, window=window,
                                       k_scale=pages.k_scale, v_scale=pages.v_scale)
            out.append(attended.cast(q.dtype).reshape(group.num_tokens, -1))
        joined = out[0] if len(out) == 1 else out[0].cat(*out[1:])
        return joined.unsqueeze(0).contiguous()
