"""A step of the UNet beside torch's: float32 on CPUs, networks of random weights, one interleaved run.

    python bench/cpu/diffusion.py [--size 256] [--threads 2] [--out bench/results/diffusion.json]

Both run the UNet of Stable Diffusion 1.5, or one of its proportions with `--channels`, on the same latents,
twice an image (with guidance), on as many threads, one after the other in turn; the median of each is kept.
diffusers' network is as it comes: eager, with scaled_dot_product_attention, channels first. `--parts` times
single convolutions, group norm and attention as well.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from tinygrad import Device, Tensor, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

import tinygrad_nv
from tinygrad_nv.functional import convolution, group_norm, scaled_dot_product_attention
from tinygrad_nv.graphs.inputs import Input
from tinygrad_nv.graphs.pool import GraphPool
from tinygrad_nv.models.diffusion import config, weights
from tinygrad_nv.models.diffusion.unet import UNet

Call = Callable[[], Any]
WORDS = 77


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="pixels along a side")
    parser.add_argument("--channels", type=int, default=320, help="of the largest images (the model: 320)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", action="store_true", help="single layers too")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    tinygrad_nv.enable()
    side = a.size // 8
    made = {"step": step(a.channels, side, a.rounds)}
    if a.parts: made |= {name: time_both(*pair, rounds=5) for name, pair in parts(a.channels, side).items()}
    for name, each in made.items():
        print(f"{name:24} tinygrad_nv {each['ours_ms']:9.1f} ms   torch {each['torch_ms']:9.1f} ms   "
              f"{each['ratio']:.2f} x torch   (CPU: {each['ours_cpu_ms']:.1f}, {each['torch_cpu_ms']:.1f} "
              f"ms, {each['cpu_ratio']:.2f} x)", flush=True)
    if a.out is not None:
        told = {"size": a.size, "channels": a.channels, "threads": a.threads, "torch": torch.__version__,
                "dtype": "float32", "results": made}
        a.out.write_text(json.dumps(told, indent=1) + "\n")


def time_both(ours: Call, theirs: Call, rounds: int) -> dict[str, float]:
    """Medians of calls in turn, after one of each: of wall time, and of the time of all threads, which says
    more where other processes are at work."""
    took: tuple[list[tuple[float, float]], list[tuple[float, float]]] = [], []
    for i in range(rounds + 1):
        for call, times in zip((ours, theirs), took, strict=True):
            begun, used = time.perf_counter(), time.process_time()
            call()
            if i: times.append((time.perf_counter() - begun, time.process_time() - used))
    (mine, my_cpu), (other, its_cpu) = ([statistics.median(each) * 1e3 for each in zip(*times, strict=True)]
                                        for times in took)
    return {"ours_ms": round(mine, 2), "torch_ms": round(other, 2), "ratio": round(other / mine, 3),
            "ours_cpu_ms": round(my_cpu, 2), "torch_cpu_ms": round(its_cpu, 2),
            "cpu_ratio": round(its_cpu / my_cpu, 3)}


def step(channels: int, side: int, rounds: int) -> dict[str, float]:
    """The whole UNet, over two conditions of one image."""
    torch.manual_seed(0)
    c, context = channels, max(32, channels * 768 // 320)
    network: Any = UNet2DConditionModel(
        block_out_channels=(c, 2 * c, 4 * c, 4 * c), cross_attention_dim=context, norm_num_groups=32,
        sample_size=side)
    theirs = network.eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        mine = UNet(config.read_unet(Path(folder)))
        weights.load(mine, Path(folder))
    x, text = torch.randn(2, 4, side, side), torch.randn(2, WORDS, context)
    inputs = {"x": Input((side, side, 4), dtypes.float32), "t": Input((), dtypes.float32),
              "text": Input((WORDS, context), dtypes.float32)}
    pool = GraphPool(lambda x, t, text: mine(x, t, text), inputs, (2,))
    given = {"x": np.ascontiguousarray(x.numpy().transpose(0, 2, 3, 1)), "text": text.numpy(),
             "t": np.full(2, 500, np.float32)}
    times = torch.tensor([500, 500])

    def ours() -> np.ndarray:
        made = pool(**given)
        assert isinstance(made, Tensor)
        return made.numpy()

    def other() -> torch.Tensor:
        with torch.no_grad(): return theirs(x, times, text).sample
    away = np.abs(ours().transpose(0, 3, 1, 2) - other().numpy()).max()
    return {**time_both(ours, other, rounds), "max_difference": float(away)}


def parts(channels: int, side: int) -> dict[str, tuple[Call, Call]]:
    """Single layers of each size of image: ours, and torch's."""
    made: dict[str, tuple[Call, Call]] = {}
    for factor, times in ((1, 1), (2, 2), (4, 4), (8, 4)):
        s, c = side // factor, channels * times
        made[f"conv 3x3 {s}x{s}x{c}"] = _conv(s, c)
        made[f"group norm {s}x{s}x{c}"] = _norm(s, c)
        made[f"attention {s * s}x{c}"] = _attention(s * s, c)
    return made


def _capture(fn: Callable[..., Tensor], *given: np.ndarray) -> Call:
    inputs = {f"x{i}": Input(each.shape[1:], dtypes.float32) for i, each in enumerate(given)}
    pool = GraphPool(fn, inputs, (2,))
    named = {f"x{i}": Tensor(each).realize() for i, each in enumerate(given)}

    def call() -> None:
        pool(**named)
        Device["CPU"].synchronize()
    return call


def _conv(s: int, c: int) -> tuple[Call, Call]:
    x, w, b = torch.randn(2, c, s, s), torch.randn(c, c, 3, 3), torch.randn(c)
    filters, bias = Tensor(w.permute(0, 2, 3, 1).numpy().copy()).realize(), Tensor(b.numpy()).realize()
    return (_capture(lambda x0: convolution(x0, filters, bias, padding=(1,) * 4),
                     x.permute(0, 2, 3, 1).contiguous().numpy()), lambda: torch.conv2d(x, w, b, padding=1))


def _norm(s: int, c: int) -> tuple[Call, Call]:
    x, w, b = torch.randn(2, c, s, s), torch.randn(c), torch.randn(c)
    weight, bias = (Tensor(each.numpy()).realize() for each in (w, b))
    return (_capture(lambda x0: group_norm(x0, 32, weight, bias, 1e-5, "silu"),
                     x.permute(0, 2, 3, 1).contiguous().numpy()),
            lambda: torch.nn.functional.silu(torch.group_norm(x, 32, w, b, 1e-5)))


def _attention(t: int, c: int) -> tuple[Call, Call]:
    x = [torch.randn(2, 8, t, c // 8) for _ in range(3)]
    given = (each.numpy() for each in x)
    return (_capture(lambda x0, x1, x2: scaled_dot_product_attention(x0, x1, x2), *given),
            lambda: torch.nn.functional.scaled_dot_product_attention(*x))


if __name__ == "__main__":
    with torch.no_grad(): main()
