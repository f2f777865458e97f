"""One step over many sequences, each with keys and values in pages, or packed without a cache.

Protocol: a step has T tokens. A `PagedBatch` assigns them to sequences: `SequenceGroup`s, one after the
other, of B sequences with equally many new tokens. A group's tokens are the newest of sequences that have
`lengths` tokens, in the pages of `table`. Norms and matmuls run over all tokens together; keys and values are
appended, and attention is computed, group by group. A sequence of length 0 is padding: it neither writes nor
attends.

Pages of a 16-bit dtype serve a float32 model: its queries are rounded, too. 8-bit pages have scales, one for
each page and KV head (patterns/kv_append/named.py).

Embedding models have no cache. In a `PackedBatch` sequence b has rows starts[b] … starts[b + 1] − 1 of the T;
rows after the last sequence's are padding, which attends to nothing. No extent depends on the lengths, which
are read from memory: one captured step serves every batch of at most T tokens.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.kvcache.store import LayerPages
from tinygrad_nv.quant.floats import narrow_bfloat16
from tinygrad_nv.runtime.memory import write

from .layer_config import Temperature
from .rope import RopeConfig, tables

RopeTables: TypeAlias = tuple[Tensor, Tensor]   # cosines and sines of all positions


@dataclass(frozen=True)
class AttentionKind:
    """The kind of a layer's attention: which of the rope tables rotates (None: none), adjacent elements if
    `interleaved`; the sliding window, or the size of a chunk; the factor of scores, and their cap;"""
    rope: int | None
    window: int | None
    scale: float
    softcap: float | None
    chunked: bool = False
    sinks: Tensor | None = None
    interleaved: bool = False
    temperature: Temperature | None = None


def append(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None,
             lengths: Tensor, rope: RopeTables | None, k_scale: Tensor | None = None,
             v_scale: Tensor | None = None, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`kv_append` of k and v, rotated if there is a rope: keys, values, and q, rotated likewise."""
    if rope is None:
        made = F.kv_append(keys, values, k, v, table, lengths, k_scale=k_scale, v_scale=v_scale)
        return made[0], made[1], q
    keys, values, q = F.kv_append(keys, values, k, v, table, lengths, cos=rope[0], sin=rope[1], q=q,
                                k_scale=k_scale, v_scale=v_scale, interleaved=interleaved,
                                rounded=not interleaved)
    return keys, values, q


@dataclass(frozen=True)
class SequenceGroup:
    """`tokens_per_sequence` new tokens of each of B sequences: `table` int32 [B, pages], `lengths` int32 [B]
    including the new tokens. `states`, int32 [S, 6], are their sequences for layers that have states, whose
    tokens are counted from the group's first (tile/sequences.py)."""
    tokens_per_sequence: int
    table: Tensor
    lengths: Tensor
    states: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all its sequences."""
        return self.tokens_per_sequence * int(self.lengths.shape[0])

    @property
    def places(self) -> Tensor:
        """Position of each token: [B, tokens_per_sequence, 1, 1]."""
        each = self.tokens_per_sequence
        places = self.lengths.reshape(-1, 1) - each + Tensor.arange(each)
        return places.reshape(-1, each, 1, 1)


@dataclass(frozen=True)
class PagedBatch:
    """The sequences of a step. `ropes` are tables of all positions that block tables reach. With
    `token_ropes`, cosines and sines (T, 1, dim/2) of each token and rope, queries and keys are rotated before
    they come here: a token's place in its sequence is not what rotates it. States that layers have `written`
    are realized with the step's results."""
    groups: tuple[SequenceGroup, ...]
    ropes: tuple[RopeTables, ...]
    token_ropes: tuple[RopeTables, ...] | None = None
    written: list[Tensor] = field(default_factory=list, compare=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pages: LayerPages, how: AttentionKind) -> Tensor:
        """Appends k and v (1, T, H_kv, D) to the pages, and returns attention of q (1, T, H, D)
        over them: (1, T, H·D)."""
        # new Tensors over the same storage, so that reads depend on the appends
        assert pages.values is not None
        keys, values = Tensor(pages.keys.uop), Tensor(pages.values.uop)
        rope = None if how.rope is None else self.ropes[how.rope]
        queries, first = [], 0
        for group in self.groups:
            end, each = first + group.num_tokens, group.tokens_per_sequence
            own_q, own_k, own_v = (x[0, first:end].reshape(-1, each, *x.shape[2:]) for x in (q, k, v))
            if how.temperature is not None: own_q = how.temperature.apply(own_q, group.places)
            keys, values, rotated = append(keys, values, own_q, own_k, own_v, group.table,
                                             group.lengths, rope, pages.k_scale, pages.v_scale,
                                             how.interleaved)
            queries.append(rotated)
            first = end
        out = []
        for group, rotated in zip(self.groups, queries, strict=True):
            if pages.k_scale is None: rotated = rotated.cast(keys.dtype)
            attended = F.paged_attention(rotated, keys, values, group.table, group.lengths, scale=how.scale,
                                       window=how.window, softcap=how.softcap, k_scale=pages.k_scale,
                                       v_scale=pages.v_scale, chunked=how.chunked, sinks=how.sinks)
            out.append(attended.cast(q.dtype).reshape(group.num_tokens, -1))
        joined = out[0] if len(out) == 1 else out[0].cat(*out[1:])
        return joined.unsqueeze(0).contiguous()


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


def rope_tables(ropes: tuple[RopeConfig, ...], rows: int, positions: int, dtype: DType,
                device: str | None) -> tuple[RopeTables, ...]:
    """Cosines and sines of each rope, (rows, dim/2), rounded to `dtype`, for sequences of up to `positions`
    tokens."""
    def table(values: np.ndarray) -> Tensor:
        made = Tensor.empty(*values.shape, dtype=dtype, device=device)
        write(made, 0, np.ascontiguousarray(round_to(values, dtype)).reshape(-1).view(np.uint8).data)
        return made
    return tuple((table(cos), table(sin)) for cos, sin in (tables(rope, rows, positions) for rope in ropes))


def round_to(values: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 rounded to nearest, as tinygrad casts; bfloat16 as its bits. (Casting on the device would
    schedule and compile kernels, a tenth of a second of each start.)"""
    if dtype is dtypes.bfloat16: return narrow_bfloat16(values)
    return values.astype({dtypes.float32: np.float32, dtypes.float16: np.float16}[dtype])
