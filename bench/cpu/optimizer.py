"""AdamW of a 37M model in float32 on the CPU: ours beside torch's fused one, turn about in one process.

    python bench/cpu/optimizer.py [steps]

Both clip by the global norm, ours in the captured step, torch with clip_grad_norm_; and both without.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.runtime.cpu.threads import threads
from tinygrad_nv.train.optimizers import StateOptions, adamw

HIDDEN, INNER, LAYERS, VOCABULARY = 512, 1536, 8, 16384


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a LLaMA with stacked projections."""
    made: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        made |= {f"{i}.qkv.weight": (3 * HIDDEN, HIDDEN), f"{i}.o.weight": (HIDDEN, HIDDEN),
                 f"{i}.gate_up.weight": (2 * INNER, HIDDEN), f"{i}.down.weight": (HIDDEN, INNER),
                 f"{i}.norm.weight": (HIDDEN,), f"{i}.post_norm.weight": (HIDDEN,)}
    return made | {"norm.weight": (HIDDEN,)}


def ours(clip: float | None) -> Callable[[], None]:
    """A captured step."""
    random = np.random.default_rng(0)
    held = {name: Tensor(random.standard_normal(shape).astype(np.float32)).contiguous().realize()
            for name, shape in shapes().items()}
    given = [Tensor(random.standard_normal(x.shape).astype(np.float32)).realize() for x in held.values()]
    options = StateOptions(max_grad_norm=clip, skip_nonfinite=clip is not None)
    optimizer = adamw(held, 1e-4, options=options)
    step = TinyJit(lambda *g: Tensor.realize(*optimizer.schedule_step(dict(zip(held, g, strict=True)))))
    return lambda: step(*given)


def theirs(clip: float | None) -> Callable[[], None]:
    """A step of torch's fused AdamW."""
    random = np.random.default_rng(0)
    held = [torch.nn.Parameter(torch.from_numpy(random.standard_normal(shape).astype(np.float32)))
            for shape in shapes().values()]
    for each in held: each.grad = torch.from_numpy(random.standard_normal(each.shape).astype(np.float32))
    optimizer = torch.optim.AdamW(held, 1e-4, fused=True)

    def step() -> None:
        if clip is not None: torch.nn.utils.clip_grad_norm_(held, clip)
        optimizer.step()
    return step


def main() -> None:
    """Medians of steps that take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("steps", nargs="?", type=int, default=15, help="of each side (default 15)")
    steps = parser.parse_args().steps
    torch.set_num_threads(threads())
    count = sum(int(np.prod(shape)) for shape in shapes().values())
    print(f"{count / 1e6:.1f}M parameters, float32, {threads()} threads")
    for clip in (None, 1.0):
        made = {"tinygrad_nv": ours(clip), "torch fused": theirs(clip)}
        taken: dict[str, list[float]] = {name: [] for name in made}
        for i in range(steps + 4):
            for name, step in made.items():
                begun = time.perf_counter()
                step()
                if i >= 4: taken[name].append(time.perf_counter() - begun)
        middle = {name: statistics.median(each) for name, each in taken.items()}
        rates = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in middle.items())
        ratio = middle["torch fused"] / middle["tinygrad_nv"]
        print(f"{'clipped' if clip else 'not clipped'}: {rates}, {ratio:.2f} times as fast as torch")


if __name__ == "__main__": main()
