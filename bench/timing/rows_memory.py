"""Rows of timing/table.py that memory bounds: few-row matmuls, norms, elements, sampling, embeddings,
appends with rotation, and paged decode attention, beside Triton's kernels of memory_peers.py.

Bytes are those that a kernel must read and write once; results may stay in L2, so that a share of HBM's
bandwidth above 1 is possible. Selection is by bisection in Triton, to 32 bits of a threshold; ours finds the
exact one. Decode attention has 8 key heads of 4 query heads each, d 128, bf16, pages of 16 tokens, wherever
keys and values take 80 GB at most.
"""
from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from bench.lib import memory_peers as kernels
from bench.lib.specs import BF16, F32, argmax, decode, elements, layer, matmul, rms, softmax
from bench.timing.rows import Checkouts, Launches, Peer, Row
from bench.timing.triton_times import Array, Given, predict
from tinygrad_nv.tile.decode.spec import Pages
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads, Rope
from tinygrad_nv.tile.sampling.spec import NUMBERS, ChoiceSpec, FilterSpec, Number

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
VOCABULARY, HIDDEN, ROWS = 128256, 4096, 16
# columns, K of a step, splits, warps
ONE = ((4, 1024, 1, 4), (8, 512, 1, 4), (16, 256, 1, 4), (16, 512, 2, 4), (32, 256, 4, 8))
SOME = ((16, 256, 1, 4), (32, 128, 1, 4), (32, 128, 4, 4), (64, 128, 4, 8))
STAGES = 4
HEADS, GROUP, D, PAGE = 8, 4, 128, 16
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192, 32768, 131072)
TOKEN_BYTES = 4 * HEADS * D     # keys and values
MOST_BYTES = 80e9
# keys of a step, warps, stages of paged decode attention
TILES = ((64, 4, 2), (32, 4, 3))
CTAS, MOST_SPLITS = 132, 64
TARGETS = {True: 50.0, False: 0.9}      # of top-k, which is counted, and of top-p


def gemv(m: int, n: int, k: int, kernel: tuple[int, int, int, int], _: Checkouts) -> Launches:
    """With split K, a second launch adds the splits' parts."""
    columns, step, split, warps = kernel
    given: dict[str, Given] = {"out": Array("bf16", (m, n)), "w": Array("bf16", (n, k)), "K": k,
                               "x": Array("bf16", (m, k)), "parts": Array("fp32", (split, m, n))}
    fixed = {"SPLIT_K": k // split, "N": n, "BN": columns, "BK": step, "SPLIT": split}
    fn = kernels.gemv if m == 1 else kernels.gemv_dot
    if m > 1: fixed["M"] = m
    first = predict(fn, given, (-(-n // columns), split), fixed, num_warps=warps, num_stages=STAGES)
    if split == 1: return [first]
    parts = {name: given[name] for name in ("out", "parts")}
    return [first, predict(kernels.join_splits, parts, (m * n // 256,),
                           {"COUNT": m * n, "SPLIT": split, "BLOCK": 256}, num_warps=4)]


def row_by_row(fn: Any, m: int, n: int, weights: str, warps: int, _: Checkouts) -> Launches:
    """A norm, a row in a program."""
    given = {name: Array("bf16", (m, n)) for name in ("out", "x")} | {w: Array("bf16", (n,)) for w in weights}
    return [predict(fn, given, (m,), {"N": n}, num_warps=warps)]


def softmaxes(m: int, n: int, warps: int, each: int, stages: int, _: Checkouts) -> Launches:
    """Persistent programs, so many on an SM."""
    ctas = min(m, 132 * each)
    fixed = {"N": n, "CTAS": ctas, "STAGES": stages}
    given: dict[str, Given] = {"out": Array("bf16", (m, n)), "x": Array("bf16", (m, n)), "ROWS": m}
    return [predict(kernels.softmax, given, (ctas,), fixed, num_warps=warps)]


def silu_and_mul(m: int, n: int, block: int, warps: int, _: Checkouts) -> Launches:
    given = {"out": Array("bf16", (m, n)), "x": Array("bf16", (m, 2 * n))}
    return [predict(kernels.silu_and_mul, given, (m, n // block), {"N": n, "BLOCK": block},
                    num_warps=warps)]


def words(values: np.ndarray) -> Array:
    """float32 that Triton's kernels are given."""
    return Array("fp32", values.shape, (), values.reshape(-1).view(np.int32))


@lru_cache
def logits() -> tuple[np.ndarray, np.ndarray]:
    """Logits as a model's, few of which stand out, and their probabilities."""
    some = np.random.default_rng(0)
    made = some.normal(0, 2.5, (ROWS, VOCABULARY)).astype(np.float32)
    made[:, some.integers(0, VOCABULARY, 64)] += 10
    each = np.exp(made - made.max(-1, keepdims=True))
    return made, each / each.sum(-1, keepdims=True)


def numbers(**values: float) -> np.ndarray:
    """Returns the numbers of each row."""
    made = np.zeros((ROWS, NUMBERS), np.float32)
    for name, value in values.items(): made[:, Number[name]] = value
    return made


def largest(m: int, draw: bool, cut: int, warps: int, _: Checkouts) -> Launches:
    """Chunks of rows, then the best of them."""
    n, block = VOCABULARY, 256 * warps
    given: dict[str, Any] = {"values": Array("fp32", (m, cut)), "places": Array("i32", (m, cut)),
                             "x": words(logits()[0][:m]), "N": n}
    if draw: given |= {"temperatures": words(np.ones(m, np.float32)), "seeds": Array("i32", (m,))}
    fn = kernels.draw_parts if draw else kernels.largest_parts
    first = predict(fn, given, (m, cut), {"CHUNK": -(-n // (cut * block)) * block, "BLOCK": block,
                                          "CUT": cut}, num_warps=warps)
    rest = {"out": Array("i32", (m,)), "values": given["values"], "places": given["places"]}
    return [first, predict(kernels.largest, rest, (m,), {"CUT": cut}, num_warps=1)]


def filter_logits(counted: bool, warps: int, _: Checkouts) -> Launches:
    x, weights = logits()
    given: dict[str, Given] = {"out": Array("fp32", x.shape), "x": words(x), "N": VOCABULARY,
                               "targets": words(np.full(ROWS, TARGETS[counted], np.float32)),
                               "weights": words(weights)}
    return [predict(kernels.filter_logits, given, (ROWS,),
                    {"BLOCK": 256 * warps, "COUNTED": counted, "ROUNDS": 32}, num_warps=warps)]


def appending(batch: int, pages: int, heads: int = 8, group: int = 4, d: int = 128, dtype: DType = F32,
              **rope: bool) -> AppendSpec:
    """A token of each sequence, of rows q | k | v, to pages of 16 tokens."""
    row = (group + 2) * heads * d
    stored = Pages(BF16, 16 * heads * d, heads * d, d)
    q, k, v = (Heads(BF16, row, row, d, at * heads * d) for at in (0, group, group + 1))
    return AppendSpec(batch, 1, heads, d, d, 16, pages, batch * pages, k, v, stored, stored,
                      Rope(dtype, d // 2, **rope), q, heads * group)


def append_kv(batch: int, pages: int, warps: int, heads: int, group: int, d: int, _: Checkouts) -> Launches:
    """A program for each head."""
    cache, q = Array("bf16", (batch * pages, 16, heads, d)), Array("bf16", (batch, heads * group, d))
    new, angles = Array("bf16", (batch, heads, d)), Array("fp32", (16 * pages, d // 2))
    given = {"q_out": q, "k_pages": cache, "v_pages": cache, "q": q, "k": new, "v": new, "cos": angles,
             "sin": angles, "table": Array("i32", (batch, pages), (), range(batch * pages)),
             "lengths": Array("i32", (batch,), (), [16 * pages])}
    fixed = {"PAGES": pages, "Q_HEADS": heads * group, "HEADS": heads, "PAGE": 16, "HALF": d // 2}
    return [predict(kernels.rope_append, given, (batch, heads * (group + 2)), fixed, num_warps=warps)]


def gather_rows(tokens: int, hidden: int, block: int, warps: int, _: Checkouts) -> Launches:
    given = {"out": Array("bf16", (tokens, hidden)), "table": Array("bf16", (VOCABULARY, hidden)),
             "tokens": Array("i32", (tokens,), (), range(VOCABULARY))}
    return [predict(kernels.gather_rows, given, (tokens, hidden // block), {"N": hidden, "BLOCK": block},
                    num_warps=warps)]


def rows() -> Iterator[Row]:
    """By family."""
    yield from few_rows()
    yield from norms()
    yield from sampling()
    yield from tables()
    yield from decode_rows()


def few_rows() -> Iterator[Row]:
    """GEMV."""
    for m, n, k in [*((m, n, k) for n, k in SHAPES for m in (1, 2, 4, 8)), (1, VOCABULARY, HIDDEN)]:
        peers = [Peer(f"Triton {c}x{step}, split {split}, {warps} warps",
                      partial(gemv, m, n, k, (c, step, split, warps)))
                 for c, step, split, warps in (ONE if m == 1 else SOME)]
        yield Row("GEMV bf16", f"{m} x {n} x {k}", matmul(m, n, k), tuple(peers),
                  nbytes=2 * (n * k + m * (n + k)))


def norms() -> Iterator[Row]:
    """Norms and elements."""
    for m in (4096, ROWS):
        nbytes = 4 * m * HIDDEN
        for name, spec, fn, weights in (("RMSNorm", rms, kernels.rms_norm, "w"),
                                        ("LayerNorm", layer, kernels.layer_norm, "wb")):
            peers = tuple(Peer(f"Triton, {warps} warps", partial(row_by_row, fn, m, HIDDEN, weights, warps))
                          for warps in (4, 8, 16))
            yield Row("norm", f"{name} {m} x {HIDDEN}", spec(m, HIDDEN), peers, nbytes=nbytes)
        peers = tuple(Peer(f"Triton, {warps} warps, {each} an SM, {stages} stages",
                           partial(softmaxes, m, HIDDEN, warps, each, stages))
                      for warps, each, stages in ((8, 8, 1), (8, 4, 2), (4, 8, 4)))
        yield Row("norm", f"softmax {m} x {HIDDEN}", softmax(m, HIDDEN), peers, nbytes=nbytes)
        peers = tuple(Peer(f"Triton {block}, {warps} warps", partial(silu_and_mul, m, 14336, block, warps))
                      for block, warps in ((512, 4), (1024, 4), (2048, 8)))
        yield Row("elements", f"silu(gate) · up {m} x 14336", elements(m, 14336), peers, nbytes=6 * m * 14336)


def sampling() -> Iterator[Row]:
    """Yields the rows of sampling from 16 rows."""
    nbytes, (x, weights) = 4 * ROWS * VOCABULARY, logits()
    for name, spec, draw in (("argmax", argmax(ROWS, VOCABULARY, F32), False),
                             ("draw", ChoiceSpec(ROWS, VOCABULARY), True)):
        peers = tuple(Peer(f"Triton, {cut} chunks, {warps} warps", partial(largest, ROWS, draw, cut, warps))
                      for cut, warps in ((8, 8), (16, 4), (16, 8), (32, 4)))
        given = {"logits": x, "numbers": numbers(temperature=1)} if draw else {"x0": x}
        yield Row("sampling", f"{name} {ROWS} x {VOCABULARY}", spec, peers, nbytes=nbytes, given=given)
    for number, counted in ((Number.top_k, True), (Number.top_p, False)):
        peers = tuple(Peer(f"Triton, bisection, {warps} warps", partial(filter_logits, counted, warps))
                      for warps in (8, 16, 32))
        given = {"logits": x, "weights": weights, "numbers": numbers(**{number.name: TARGETS[counted]})}
        yield Row("sampling", f"{number.name} {TARGETS[counted]:g} of {ROWS} x {VOCABULARY}",
                  FilterSpec(ROWS, VOCABULARY, number, counted), peers,
                  nbytes=(2 if counted else 3) * nbytes, given=given)


def tables() -> Iterator[Row]:
    """Appends and embeddings."""
    for batch in (1, ROWS, 256):
        spec = appending(batch, 64)
        peers = tuple(Peer(f"Triton, {warps} warps", partial(append_kv, batch, 64, warps, 8, 4, 128))
                      for warps in (1, 2))
        yield Row("append", f"RoPE and KV append, {batch} tokens", spec, peers, nbytes=4 * batch * 48 * 128)
    for tokens in (ROWS, 4096):
        table = EmbeddingSpec(VOCABULARY, HIDDEN, BF16, Tokens(dtypes.int32, (tokens,), (1,)))
        peers = tuple(Peer(f"Triton {block}, {warps} warps",
                           partial(gather_rows, tokens, HIDDEN, block, warps))
                      for block, warps in ((1024, 4), (2048, 4), (4096, 8)))
        yield Row("embedding", f"{tokens} tokens of {VOCABULARY} x {HIDDEN}", table, peers,
                  nbytes=4 * tokens * HIDDEN)


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
    return [first, predict(kernels.merge_splits, rest, (batch, queries),
                           {"HEADS": queries, "D": d, "BN": keys, "SPLITS": splits}, num_warps=4)]


def split_counts(batch: int, context: int, heads: int) -> list[int]:
    """One, two and four CTAs for each SM, and more where requests are long."""
    counts = {min(MOST_SPLITS, context // 128, 1 << (each * CTAS // (batch * heads)).bit_length())
              for each in (1, 2, 4)}
    return sorted(max(count, 1) for count in counts)


def decode_rows() -> Iterator[Row]:
    """Paged decode attention, by batch, then context."""
    for batch in BATCHES:
        for context in CONTEXTS:
            nbytes = batch * context * TOKEN_BYTES
            if nbytes > MOST_BYTES: continue
            peers = [Peer(f"Triton, {tile[0]} keys, {tile[1]} warps, {tile[2]} stages, {splits} splits",
                          partial(attend, batch, context, tile, splits, HEADS, GROUP, D))
                     for tile in TILES for splits in split_counts(batch, context, HEADS)]
            yield Row("paged decode", f"batch {batch}, {context} tokens",
                      decode(batch, HEADS, GROUP, pages=context // PAGE), tuple(peers), nbytes=nbytes)
