"""Attention of packed rows on the CPU, forward and backward: documents, a mask, and torch's SDPA with one.

    python bench/cpu/packed_attention.py [--rounds 7] [--tokens 1024]

One row of 4 heads over 2 key heads of 64, float32, causal, of documents of one length (and of 5 times 100
tokens, the rest padding): `documents` is `document_attention`, `mask` is `scaled_dot_product_attention` with
the mask of documents, as packed rows had it before; torch's takes the same mask. They take turns; the figure
is the median of `--rounds` after two that warm up. Writes bench/results/packed_attention.json.
"""
from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tinygrad import Tensor, TinyJit

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import processor, save, spread, table
from tinygrad_nv.functional import document_attention, scaled_dot_product_attention
from tinygrad_nv.models.dense import Documents

HEADS, KV_HEADS, D, WARM = 4, 2, 64, 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    tokens, rows, lines = arguments.tokens, [], []
    packed = [[n] * (tokens // n) for n in (tokens, tokens // 2, tokens // 8, 32, 8)]
    for lengths in (*packed, [tokens // 10] * 5):
        found = measure(steps(lengths, tokens), arguments.rounds)
        rows.append({"documents": len(lengths), "tokens of each": lengths[0], "seconds": found})
        ours = found["documents"]
        lines.append((f"{len(lengths)} of {lengths[0]}",
                      *(f"{1e3 * statistics.median(each):.1f}" for each in found.values()),
                      *(spread([b / a for a, b in zip(ours, found[name], strict=True)])
                        for name in ("mask", "torch"))))
    header = ("documents", "documents, ms", "mask, ms", "torch, ms", "over mask", "over torch")
    print(table(header, lines))
    save("packed_attention", {"machine": processor(), "tokens": tokens, "rows": rows})


def steps(lengths: list[int], tokens: int) -> dict[str, Step]:
    """A step of each side: the result and the three gradients."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((1, heads, tokens, D), np.float32)
              for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    rest = tokens - sum(lengths)
    positions = np.concatenate([*map(np.arange, lengths), np.zeros(rest, np.int64)])[None].astype(np.int32)
    segments = np.append(np.repeat(np.arange(len(lengths)) + 1, lengths), np.zeros(rest, int))[None]
    documents = Documents(*(Tensor(x.astype(np.int32)).realize() for x in (positions, segments)))
    first, end = (x.realize() for x in documents.bounds())
    seen = documents.mask(None, False).realize()
    return {"documents": capture(arrays, lambda q, k, v: document_attention(q, k, v, first, end)),
            "mask": capture(arrays, partial(scaled_dot_product_attention, attn_mask=seen, enable_gqa=True)),
            "torch": theirs(arrays, torch.from_numpy(seen.numpy()))}


def capture(arrays: list[np.ndarray], attention: Attention) -> Step:
    """Ours, captured once."""
    given = [Tensor(x).realize() for x in arrays]

    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        out = attention(q, k, v)
        return [each.realize() for each in (out, *out.gradient(q, k, v, gradient=grad))]
    return lambda: step(*given)


def theirs(arrays: list[np.ndarray], seen: torch.Tensor) -> Step:
    """torch's."""
    *operands, grad = map(torch.from_numpy, arrays)
    for each in operands: each.requires_grad_()

    def step() -> object:
        out = torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=seen, enable_gqa=True)
        return torch.autograd.grad(out, operands, grad)
    return step


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM + rounds):
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            if number >= WARM: found[name].append(time.perf_counter() - begun)
    return found


if __name__ == "__main__": main()
