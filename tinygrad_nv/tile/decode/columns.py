"""Values that are wider than a CTA's registers, those of latents (MLA), divided among CTAs.

A warp keeps the sums of its 16 rows in registers: 256 columns take 128 of each lane. Wider values of one key
head are to the kernel several key heads with the same keys, which have so many columns of values each. Each
computes all scores, so that with 576 elements of keys and 512 of values 2 · (576 + 256) numbers of a key are
multiplied instead of 576 + 512; what is read twice is in L2 the second time.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tinygrad_nv.tile.attention.spec import MOST_HEAD
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import Position, walk


@lru_cache(1024)
def divide_columns(spec: DecodeSpec) -> DecodeSpec:
    """The spec that CTAs have; the same where values are narrow enough, or cannot be divided."""
    count = -(-spec.d_v // MOST_HEAD)
    if count == 1 or spec.heads > 1 or spec.sinks or spec.d_v % count or Position(1) in walk(spec.score):
        return spec
    width, (request, _, query), (to, _, of) = spec.d_v // count, spec.q.batch, spec.out.batch
    k_scale, v_scale = (None if each is None else replace(each, head=0)
                        for each in (spec.k_scale, spec.v_scale))
    return replace(spec, heads=count, d_v=width, q=replace(spec.q, batch=(request, 0, query)),
                   k=replace(spec.k, head=0), v=replace(spec.v, head=width),
                   out=replace(spec.out, batch=(to, width, of)), k_scale=k_scale, v_scale=v_scale)
