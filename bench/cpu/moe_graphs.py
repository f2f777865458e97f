"""A layer of experts as tinygrad's llm writes it, with kernels of ours and without, and its training step.

    python bench/cpu/moe_graphs.py [--tokens 1 32 128] [--repeat 5] [--step 512]

"gathered" is tinygrad's spelling: gate, up and down, each a batched matmul with gathered matrices. Both sides
are a TinyJit that is replayed, by turns; results must agree. The step is that of `dispatch`: the gradients of
tokens and weights, ours alone.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from tinygrad import Tensor, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.kernel_times import Run, capture, time_rested
from bench.lib.measure import spread, table
from tinygrad_nv import disabled
from tinygrad_nv.cpu.target import host
from tinygrad_nv.functional import Experts, dispatch

EXPERTS, K, HIDDEN, INNER = 32, 4, 512, 256
HEADER = ["", "ours, ms", "tinygrad, ms", "times", "ours", "tinygrad"]


@dataclass(frozen=True)
class Layer:
    """Tokens, the weights of a layer, and an expert for each slot."""
    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    chosen: Tensor
    weights: Tensor


def layer(tokens: int) -> Layer:
    """Random ones, float32."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        made = random.normal(size=shape) / shape[-1] ** 0.5
        return Tensor(made.astype(np.float32), device="CPU").realize()
    experts = random.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :K].astype(np.int32)
    wide = (EXPERTS, INNER, HIDDEN)
    return Layer(normal(tokens, HIDDEN), normal(*wide), normal(*wide), normal(EXPERTS, HIDDEN, INNER),
                 Tensor(experts, device="CPU").realize(), normal(tokens, K))


def gather_weights(one: Layer) -> Tensor:
    """Computes the layer as tinygrad's llm has it."""
    def multiply(x: Tensor, w: Tensor) -> Tensor:
        return (x.unsqueeze(-2) @ w[one.chosen].transpose(-1, -2)).contiguous().squeeze(-2)
    h = one.x.unsqueeze(1)
    inner = (multiply(h, one.gate).silu() * multiply(h, one.up)).contiguous()
    return (multiply(inner, one.down) * one.weights.unsqueeze(-1)).sum(1)


def step(tokens: int) -> Run:
    """A training step of a layer."""
    one, router = layer(tokens), Tensor.randn(EXPERTS, HIDDEN, device="CPU", dtype=dtypes.float32).realize()
    experts = Experts(router, one.gate.cat(one.up, dim=1).contiguous().realize(), one.down)
    given = one.x, experts.router, experts.gate_up, experts.down

    def run() -> Tensor:
        made = dispatch(one.x, experts, f"top{K}").square().sum().gradient(*given)
        Tensor.realize(*made)
        return made[0]
    return capture(run)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeat", type=int, default=5, help="turns of each side (default 5)")
    parser.add_argument("--step", type=int, default=512, help="tokens of the training step; 0: none")
    arguments = parser.parse_args()
    here, rows = host(), []
    for tokens in arguments.tokens:
        one = layer(tokens)
        ours = capture(partial(gather_weights, one))
        with disabled(): theirs = capture(partial(gather_weights, one))
        a, b = ours().numpy(), theirs().numpy()
        assert np.abs(a - b).max() <= 2e-5 * np.abs(b).max(), tokens
        turns = [[1e3 * time_rested(run, 1) for run in (ours, theirs)] for _ in range(arguments.repeat)]
        mine, plain = ([turn[i] for turn in turns] for i in (0, 1))
        rows.append([f"{tokens} tokens", f"{median(mine):.2f}", f"{median(plain):.2f}",
                     f"{median(plain) / median(mine):.1f}", spread(mine), spread(plain)])
    print(f"{here.isa}, {here.threads} threads; {K} of {EXPERTS} experts, {HIDDEN} x {INNER}, float32")
    print(table(HEADER, rows))
    if arguments.step:
        run = step(arguments.step)
        taken = [1e3 * time_rested(run, 1) for _ in range(arguments.repeat)]
        print(f"training step, {arguments.step} tokens: {median(taken):.1f} ms ({spread(taken)})")


if __name__ == "__main__": main()
