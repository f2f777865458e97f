"""Cost of sentinels: steps with and without, one after the other, on the CPU.

    python bench/cpu/sentinels.py [--rounds 7]

A decoder of 4 layers, width 512, in float32: a training step (forward, backward, SGD) of 4 x 128 tokens, a
forward pass of those, and of one token, each captured by TinyJit. Rounds alternate between both; medians are
compared, of time and of the cores' work, which other programs disturb less. Prints one JSON object a line.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from tinygrad import Tensor, TinyJit

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv import layer
from tinygrad_nv.numerics.verify import sentinels

WIDTH, HEADS, LAYERS = 512, 8, 4


def weights() -> list[dict[str, Tensor]]:
    """Returns the weights of each layer, as they are drawn."""
    random = np.random.default_rng(0)
    def draw(rows: int, columns: int) -> Tensor:
        return Tensor((random.standard_normal((rows, columns)) * 0.02).astype(np.float32)).realize()
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
              "down": (4 * WIDTH, WIDTH)}
    return [{name: draw(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]


def forward(x: Tensor, layers: list[dict[str, Tensor]]) -> Tensor:
    """The decoder."""
    batch, tokens, _ = x.shape
    for i, w in enumerate(layers):
        with layer(f"layers.{i}"):
            heads = (x.layernorm() @ w["qkv"]).reshape(batch, tokens, 3, HEADS, WIDTH // HEADS)
            q, k, v = (heads[:, :, part].transpose(1, 2) for part in range(3))
            seen = q.scaled_dot_product_attention(k, v, is_causal=True).transpose(1, 2)
            x = x + seen.reshape(batch, tokens, WIDTH) @ w["out"]
            x = x + (x.layernorm() @ w["up"]).gelu() @ w["down"]
    return x


def steps() -> dict[str, tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Returns the steps that are timed, with their inputs."""
    layers = weights()
    every = [each for w in layers for each in w.values()]

    def train(x: Tensor) -> Tensor:
        loss = forward(x, layers).square().mean()
        for each, slope in zip(every, loss.gradient(*every), strict=True): each.assign(each - 1e-3 * slope)
        Tensor.realize(loss, *every)
        return loss
    def infer(x: Tensor) -> Tensor: return forward(x, layers).realize()
    many, one = (Tensor(np.random.default_rng(1).standard_normal((*rows, WIDTH)).astype(np.float32)).realize()
                 for rows in ((4, 128), (1, 1)))
    return {"train 4x128": (TinyJit(train), many), "forward 4x128": (TinyJit(infer), many),
            "forward 1x1": (TinyJit(infer), one)}


def time_step(step: Callable[[Tensor], Tensor], x: Tensor, guarded: bool) -> tuple[float, float]:
    """Seconds of a step and of all cores' work for it, the second in its block: the first scans what it has
    not seen yet twice."""
    with sentinels() if guarded else nullcontext():
        step(x).numpy()
        begun, worked = time.perf_counter(), time.process_time()
        step(x).numpy()
        return time.perf_counter() - begun, time.process_time() - worked


def main() -> None:
    """Prints the medians and what sentinels add."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for name, (step, x) in steps().items():
        for guarded in (False, False, False, True): time_step(step, x, guarded)
        pairs = [(*time_step(step, x, False), *time_step(step, x, True)) for _ in range(rounds)]
        plain, work, guarded, more = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        print(json.dumps({"step": name, "plain_ms": round(plain, 2), "guarded_ms": round(guarded, 2),
                          "added_percent": round(100 * (guarded / plain - 1), 1),
                          "added_work_percent": round(100 * (more / work - 1), 1)}), flush=True)


if __name__ == "__main__": main()
