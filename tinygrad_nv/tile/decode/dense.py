"""Decode attentions over a paged cache, by a few words: what `tinygrad-nv tune` asks for.

Protocol: `dense(16, 32, 4096, 128, kv_heads=8)` is one row of each of 16 requests with up to 4096 tokens in
pages [pages, page_size, heads, d], and a score of 1/√d.
"""
from __future__ import annotations

import math

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.decode.spec import DecodeSpec, Pages, Scales
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.dense import TYPES

WORDS = {name: TYPES[name] for name in ("bf16", "f16")}
KV_WORDS = {**WORDS, **{name: TYPES[name] for name in ("e4m3", "e5m2", "s8")}}


def dense(batch: int, heads: int, tokens: int, d: int, dtype: str = "bf16", kv_heads: int = 0,
          kv_dtype: str = "", page_size: int = 16) -> DecodeSpec:
    """A decode attention; of 0 key heads there are as many as heads. Raises `SpecError` for words it does not
    know, and heads that do not divide evenly."""
    kv_heads, kv_dtype = kv_heads or heads, kv_dtype or dtype
    for what, word, known in (("q of dtype", dtype, WORDS), ("pages of dtype", kv_dtype, KV_WORDS)):
        if word not in known: raise SpecError(f"{what} {word!r}", f"one of {', '.join(known)}")
    if heads % kv_heads: raise SpecError(f"{heads} heads of {kv_heads} key heads", "whole times as many")
    group, kind = heads // kv_heads, KV_WORDS[kv_dtype]
    q = Rows(WORDS[dtype], heads * d, (heads * d, group * d, d))
    pages = Pages(kind, page_size * kv_heads * d, kv_heads * d, d)
    scales = Scales(kv_heads, 1) if kind.itemsize == 1 else None
    return DecodeSpec(batch, kv_heads, group, 1, d, d, page_size, -(-tokens // page_size), q, pages, pages, q,
                      scales, scales, score=Sum() * (1 / math.sqrt(d)))
