"""Attentions of 8 bits with scales, for tests of flash_wgmma.

Protocol: `attention8(…)` is attention_case's `attention` of e4m3 operands, `block` the rows that share a
scale of q, of k and of v: 0 for all rows of a head, −1 for all there is.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import arguments, attention, near, rows, run
from tests.support.tile.flash_case import W
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, RowScales
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

E4M3 = dtypes.fp8e4m3
SMALL8 = W.block(128, 64)


def scales_of(batch: tuple[int, int, int], count: int, block: int, queries: bool) -> RowScales:
    """Dense scales, three elements into their storage; keys and values have one for a group."""
    if block < 0: return RowScales()
    blocks = -(-count // block) if block else 1
    _, heads, group = batch
    inner = blocks * (group if queries else 1)
    return RowScales(block or count, 1 if block else 0, (inner * heads, inner, blocks if queries else 0), 3)


def attention8(s_q: int, s_kv: int, d: int = 64, block: tuple[int, int, int] = (0, 0, 0), d_v: int = 0,
               order: str = "bhr", **others: Any) -> AttentionSpec:
    """An attention of dense operands."""
    like = attention(s_q, s_kv, d, d_v=d_v or d, order=order, **others)
    k, v = (rows(E4M3, (*like.batch[:2], 0, s_kv), width, order) for width in (d, d_v or d))
    q, k_scale, v_scale = (scales_of(like.batch, count, each, name == "q") for name, count, each in
                           zip("qkv", (s_q, s_kv, s_kv), block, strict=True))
    return replace(like, q=rows(E4M3, (*like.batch, s_q), d, order), k=k, v=v, scales=(q, k_scale, v_scale))


def close8(spec: AttentionSpec, schedule: FlashWgmma = SMALL8, seed: int = 0, scale: float = 1.0,
           sm_count: int = 132, **extents: int) -> None:
    """Asserts that a random attention is near the exact one."""
    given = arguments(spec, seed, scale)
    made = TABLE.build(spec, schedule, GPU("sm_90a", sm_count))
    near(spec, given, run(made, spec, given, "sm_90a", seed, **extents), **extents)
