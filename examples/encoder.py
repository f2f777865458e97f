"""A two-block encoder written with the tile language's standard library: it learns to turn a sequence round.

    python examples/encoder.py                       trains in float32, then infers with int8 matrices
    python examples/encoder.py --device EMU --steps 2 --batch 2    the same kernels as PTX, on the emulated
    GPU

Every matrix product of inference is `matmul_qint8`, attention is `flash_attention_2` with its own gradient,
norms are `efficient_layernorm`, the update is `fused_adam`.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from tinygrad_nv import TinyJit, dtypes, stdlib
from tinygrad_nv.language import Tensor, device, f32, int32

VOCAB, LENGTH, WIDTH, HEADS, BLOCKS = 16, 12, 32, 4, 2
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Quantised:
    """A matrix (N, K) as int8 with a scale for each row."""
    codes: Tensor
    scale: Tensor


def weights(seed: int) -> Weights:
    """Random matrices (N, K), gains of 1, shifts of 0."""
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> Tensor: return Tensor(rng.normal(0, k**-0.5, (n, k)).astype(np.float32))
    made = {"tokens": matrix(VOCAB, WIDTH), "positions": matrix(LENGTH, WIDTH), "head": matrix(VOCAB, WIDTH),
            "norm": Tensor.ones(WIDTH), "norm_shift": Tensor.zeros(WIDTH)}
    for block in range(BLOCKS):
        for name, n, k in (("qkv", 3 * WIDTH, WIDTH), ("out", WIDTH, WIDTH), ("up", 4 * WIDTH, WIDTH),
                           ("down", WIDTH, 4 * WIDTH)):
            made[f"{block}.{name}"] = matrix(n, k)
        for name in ("norm1", "norm2"):
            made[f"{block}.{name}"], made[f"{block}.{name}_shift"] = Tensor.ones(WIDTH), Tensor.zeros(WIDTH)
    return {name: each.contiguous().realize() for name, each in made.items()}


def linear(x: Tensor, w: Tensor | Quantised) -> Tensor:
    """x (…, K) times a matrix (N, K), in floats or from int8."""
    if isinstance(w, Quantised): return stdlib.matmul_qint8(x, w.codes, w.scale)
    return x @ w.T


def encoder_block(x: Tensor["B", "S", "D", f32], w: dict[str, Tensor], block: int, *,
                  heads: int) -> Tensor["B", "S", "D", f32]:
    """Attention over all positions, then the two matrices of a feed-forward network."""
    b, s, d = x.shape

    def norm(x: Tensor, name: str) -> Tensor:
        return stdlib.efficient_layernorm(x, w[f"{block}.{name}"], w[f"{block}.{name}_shift"])
    qkv = linear(norm(x, "norm1"), w[f"{block}.qkv"]).reshape(b, s, 3, heads, d // heads).permute(2, 0, 3, 1,
                                                                                                  4)
    y = stdlib.flash_attention_2(*(qkv[i].contiguous() for i in range(3)))
    x = x + linear(y.permute(0, 2, 1, 3).reshape(b, s, d), w[f"{block}.out"])
    return x + linear(linear(norm(x, "norm2"), w[f"{block}.up"]).gelu(), w[f"{block}.down"])


def encoder(tokens: Tensor["B", "S", int32], w: dict[str, Tensor]) -> Tensor["B", "S", "V", f32]:
    """Logits of a token for each position."""
    x = w["tokens"][tokens] + w["positions"]
    for block in range(BLOCKS): x = encoder_block(x, w, block, heads=HEADS)
    return linear(stdlib.efficient_layernorm(x, w["norm"], w["norm_shift"]), w["head"])


def batch(rng: np.random.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Sequences, and the same from the end to the beginning."""
    tokens = rng.integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)
    return Tensor(tokens).realize(), Tensor(tokens[:, ::-1].copy()).realize()


def train(w: Weights, steps: int, rows: int, rate: float = 3e-3) -> float:
    """Trains the weights in place: the last loss. The step is captured once."""
    moments = {name: (Tensor.zeros_like(each).contiguous().realize(),
                      Tensor.zeros_like(each).contiguous().realize()) for name, each in w.items()}
    count = Tensor([0.0]).contiguous().realize()

    @TinyJit
    def step(tokens: Tensor, wanted: Tensor) -> Tensor:
        loss = encoder(tokens, w).log_softmax().gather(2, wanted.unsqueeze(2)).mean() * -1
        gradients = loss.gradient(*w.values())
        count.assign(count + 1)
        for (name, old), grad in zip(w.items(), gradients, strict=True):
            new = stdlib.fused_adam(old, grad, *moments[name], lr=rate, step=count)
            for target, value in zip((old, *moments[name]), new, strict=True): target.assign(value)
        every = [each for pair in moments.values() for each in pair]
        return loss.realize(*w.values(), *every, count)

    rng, loss = np.random.default_rng(0), float("nan")
    for number in range(1, steps + 1):
        loss = step(*batch(rng, rows)).item()
        if number % 50 == 0 or number == steps: print(f"step {number:4d}  loss {loss:.4f}", file=sys.stderr)
    return loss


def quantised(w: Weights) -> dict[str, Tensor | Quantised]:
    """Matrices of products as int8."""
    def one(name: str, each: Tensor) -> Tensor | Quantised:
        if each.ndim != 2 or name in ("tokens", "positions"): return each
        return Quantised(*(part.contiguous().realize() for part in stdlib.quantise_int8(each)))
    return {name: one(name, each) for name, each in w.items()}


def accuracy(w: dict[str, Tensor | Quantised], rows: int = 64) -> float:
    """The share of tokens that are right, of new sequences."""
    tokens, wanted = batch(np.random.default_rng(1), rows)
    found = encoder(tokens, w).argmax(2).cast(dtypes.int32)  # type: ignore[arg-type]
    return (found == wanted).float().mean().item()


def main() -> None:
    """Trains, quantises, infers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    with device(given.device):
        w = weights(0)
        loss = train(w, given.steps, given.batch)
        rows = 64 if given.device == "CPU" else given.batch
        found = [accuracy(each, rows) for each in (w, quantised(w))]
        print(f"loss {loss:.4f}  right: float32 {found[0]:.1%}, int8 {found[1]:.1%}")


if __name__ == "__main__": main()
