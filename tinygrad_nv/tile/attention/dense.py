"""Attentions of dense operands, by a few words: what `tinygrad-nv tune` asks for.

Protocol: `dense(2, 16, 4096, 128, causal=True)` is of q, k, v and a result [batch, heads, rows, d], or with
`layout="BSHD"` [batch, rows, heads, d], and a score of 1/√d; `gradient(spec)` is its backward pass.
"""
from __future__ import annotations

import math
from dataclasses import replace

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, Rows
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.dense import TYPES

WORDS = {name: TYPES[name] for name in ("bf16", "f16", "f32")}
LAYOUTS = ("BHSD", "BSHD")


def dense(batch: int, heads: int, rows: int, d: int, dtype: str = "bf16", kv_heads: int = 0, keys: int = 0,
          causal: bool = False, layout: str = "BHSD") -> AttentionSpec:
    """An attention; of 0 key heads there are as many as heads, of 0 keys as many as rows. Raises `SpecError`
    for words it does not know, and heads that do not divide evenly."""
    kv_heads, keys = kv_heads or heads, keys or rows
    for what, word, known in (("operands of dtype", dtype, WORDS), ("layout", layout, LAYOUTS)):
        if word not in known: raise SpecError(f"{what} {word!r}", f"one of {', '.join(known)}")
    if heads % kv_heads: raise SpecError(f"{heads} heads of {kv_heads} key heads", "whole times as many")
    if causal and keys < rows: raise SpecError(f"{rows} rows of {keys} keys", "at least as many keys")
    group, bshd = heads // kv_heads, layout == "BSHD"

    def rows_of(extent: int, many: int, of_query: bool) -> Rows:
        head, row = (d, many * d) if bshd else (extent * d, d)
        return Rows(WORDS[dtype], row, (many * extent * d, group * head, head) if of_query else
                    (many * extent * d, head, 0))
    q, k = rows_of(rows, heads, True), rows_of(keys, kv_heads, False)
    return AttentionSpec(rows, keys, d, d, q, k, k, q, (batch, kv_heads, group), Sum() * (1 / math.sqrt(d)),
                         Band(None, 0) if causal else FULL, keys - rows if causal else 0)


def gradient(spec: AttentionSpec) -> BackwardSpec:
    """The backward pass, of results that lie as the operands do."""
    return BackwardSpec(replace(spec, lse=True), spec.out, spec.k, spec.v)
