"""Rows of timing/table.py of paged decode attention, beside Triton's of decode_peers.py: 8 key heads of 4
query heads each, d 128, bf16, pages of 16 tokens, wherever keys and values take 80 GB at most."""
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from bench.lib import decode_peers as kernels
from bench.lib.specs import decode
from bench.timing.rows import Checkouts, Launches, Peer, Row
from bench.timing.triton_times import Array, predict

HEADS, GROUP, D, PAGE = 8, 4, 128, 16
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192, 32768, 131072)
TOKEN_BYTES = 4 * HEADS * D     # keys and values
MOST_BYTES = 80e9
# keys of a step, warps, stages
TILES = ((64, 4, 2), (32, 4, 3))
CTAS, MOST_SPLITS = 132, 64


def attend(batch: int, context: int, tile: tuple[int, int, int], splits: int, heads: int, group: int,
           d: int, _: Checkouts) -> Launches:
    """Both stages."""
    (keys, warps, stages), pages, queries = tile, context // PAGE, heads * group
    cache = Array("bf16", (batch * pages, PAGE, heads, d))
    parts = Array("fp32", (batch, queries, splits, d))
    lse = Array("fp32", (batch, queries, splits))
    lengths, q = Array("i32", (batch,), (), [context]), Array("bf16", (batch, queries, d))
    given: dict[str, Any] = {
        "parts": parts, "lse": lse, "q": q, "keys": cache, "values": cache, "lengths": lengths,
        "table": Array("i32", (batch, pages), (), range(batch * pages)), "scale": d ** -0.5 * 1.4427}
    fixed = {"PAGES": pages, "HEADS": heads, "GROUP": group, "D": d, "PAGE": PAGE, "BN": keys,
             "SPLITS": splits}
    first = predict(kernels.split_keys, given, (batch, heads, splits), fixed, num_warps=warps,
                    num_stages=stages)
    rest = {"out": q, "parts": parts, "lse": lse, "lengths": lengths}
    return [first, predict(kernels.merged, rest, (batch, queries),
                           {"HEADS": queries, "D": d, "BN": keys, "SPLITS": splits}, num_warps=4)]


def split_counts(batch: int, context: int, heads: int) -> list[int]:
    """One, two and four CTAs for each SM, and more where requests are long."""
    counts = {min(MOST_SPLITS, context // 128, 1 << (each * CTAS // (batch * heads)).bit_length())
              for each in (1, 2, 4)}
    return sorted(max(count, 1) for count in counts)


def rows() -> Iterator[Row]:
    """By batch, then context."""
    for batch in BATCHES:
        for context in CONTEXTS:
            nbytes = batch * context * TOKEN_BYTES
            if nbytes > MOST_BYTES: continue
            peers = [Peer(f"Triton, {tile[0]} keys, {tile[1]} warps, {tile[2]} stages, {splits} splits",
                          partial(attend, batch, context, tile, splits, HEADS, GROUP, D))
                     for tile in TILES for splits in split_counts(batch, context, HEADS)]
            yield Row("paged decode", f"batch {batch}, {context} tokens",
                      decode(batch, HEADS, GROUP, pages=context // PAGE), tuple(peers), nbytes=nbytes)
