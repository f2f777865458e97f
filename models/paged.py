"""Rows of many sequences in one step, each over keys and values in pages.

Protocol: a step has T rows, and a `PagedPlace` says whose they are: `Part`s, one after the other, of B
sequences with as many rows each. A part's rows are the newest of sequences that have `lengths` tokens, in the
pages of `table`. All rows go through norms and products together; keys and values are appended, and attention
is computed, part by part. A sequence of length 0 fills a part up: it writes and sees nothing.

Pages of half floats serve a float32 model: its queries are rounded too. Those of 8 bits have scales, one for
each page and key head (patterns/kv_append/named.py).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.functional import kv_append, paged_attention


@dataclass(frozen=True)
class LayerPages:
    """A layer's keys and values: [P, page_size, H_kv, D] each, and float32 scales [P, H_kv] of those of 8
    bits."""
    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class PagedCache:
    """The pages of every layer."""
    layers: tuple[LayerPages, ...]


@dataclass(frozen=True)
class Part:
    """`rows` rows of each of B sequences: `table` int32 [B, pages], `lengths` int32 [B] with these rows."""
    rows: int
    table: Tensor
    lengths: Tensor

    @property
    def total(self) -> int:
        """Rows of all its sequences."""
        return self.rows * int(self.lengths.shape[0])


@dataclass(frozen=True)
class PagedPlace:
    """Where the rows of a step stand. `rope` are the tables of all places that block tables reach."""
    parts: tuple[Part, ...]
    rope: tuple[Tensor, Tensor]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, window: int | None) -> Tensor:
        """Appends k and v (1, T, H_kv, D), rotated, to the pages; attention of q (1, T, H, D) over them:
        (1, T, H·D)."""
        # other Tensors of the same storage: what is appended is read through the results alone
        keys, values = Tensor(pages.keys.uop), Tensor(pages.values.uop)
        cos, sin = self.rope
        queries, first = [], 0
        for part in self.parts:
            mine = [x[0, first:first + part.total].reshape(-1, part.rows, *x.shape[2:]) for x in (q, k, v)]
            keys, values, rotated = kv_append(
                keys, values, mine[1], mine[2], part.table, part.lengths, cos=cos, sin=sin, q=mine[0],
                k_scale=pages.k_scale, v_scale=pages.v_scale, rounded=True)
            queries.append(rotated)
            first += part.total
        out = []
        for part, rotated in zip(self.parts, queries, strict=True):
            if pages.k_scale is None: rotated = rotated.cast(keys.dtype)
            seen = paged_attention(rotated, keys, values, part.table, part.lengths, window=window,
                                   k_scale=pages.k_scale, v_scale=pages.v_scale)
            out.append(seen.cast(q.dtype).reshape(part.total, -1))
        whole = out[0] if len(out) == 1 else out[0].cat(*out[1:])
        return whole.unsqueeze(0).contiguous()
