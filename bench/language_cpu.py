"""Kernels in the tile language beside our C templates, in one interleaved run on this CPU.

    python bench/language_cpu.py [--rounds 9] [--json]

Protocol: each round calls one after the other, captured by TinyJit; a row is the median of the rounds' ratios
template / language (above 1 the language is faster), with the least and the largest. The language's schedule
is the best of a few that are tried first, as `kernel.autotune` does.
"""
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import stdlib
from tinygrad_nv.cpu.target import host
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.stdlib import attention, norm, quantised
from tinygrad_nv.tile.language.schedule import TileSchedule

Run = Callable[[], Tensor]
RESULTS = Path(__file__).parent / "results" / "language_cpu.json"
BLOCKS = ((64, 64, 64), (128, 128, 128), (128, 256, 256), (256, 256, 256), (64, 256, 256))


def captured(fn: Callable[..., Tensor], *given: Tensor) -> Run:
    """A call of the function, captured."""
    made = TinyJit(lambda *each: fn(*each).realize())
    for _ in range(3): made(*given)
    return lambda: made(*given)


def seconds(run: Run) -> float:
    """Of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def best(kernel: Kernel, call: Callable[[Kernel], Callable[..., Tensor]], given: Sequence[Tensor],
         blocks: Sequence[tuple[int, int, int]]) -> Run:
    """The kernel with the schedule that is fastest."""
    runs = [captured(call(kernel.with_schedule(TileSchedule(block=each[:2], k=each[2]))),
                     *given) for each in blocks]
    return min(runs, key=lambda run: min(seconds(run) for _ in range(3)))


def numbers(*shape: int, dtype: DType = dtypes.float32) -> Tensor:
    """Random numbers, in memory."""
    made = Tensor(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    return made.cast(dtype).contiguous().realize()


def forward(kernel: Kernel) -> Callable[..., Tensor]:
    """The result of flash attention's kernel."""
    return lambda q, k, v: kernel(q, k, v, causal=True, scale=0.125)[0]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """tinygrad's attention, which our templates compute."""
    return q.scaled_dot_product_attention(k, v, is_causal=True)


def cases() -> dict[str, tuple[Run, Run]]:
    """The language's and the template's call by name."""
    from kernels_language import matmul
    made = {}
    for dtype in (dtypes.float32, dtypes.bfloat16):
        a, b = numbers(1024, 1024, dtype=dtype), numbers(1024, 1024, dtype=dtype)
        made[f"gemm 1024^3 {dtype.name}"] = (
            best(matmul, lambda one: one, (a, b), BLOCKS),
            captured(lambda a, b: a.matmul(b, dtype=dtypes.float32), a, b))
        q, k, v = (numbers(1, 8, 1024, 64, dtype=dtype) for _ in range(3))
        made[f"flash 8x1024x64 causal {dtype.name}"] = (
            best(attention.forward, forward, (q, k, v), BLOCKS[:3]), captured(causal, q, k, v))
    x, w, c = numbers(4096, 1024), numbers(1024), numbers(1024)
    made["layernorm 4096x1024"] = (captured(stdlib.efficient_layernorm, x, w, c),
                                   captured(lambda x, w, c: x.layernorm() * w + c, x, w, c))
    made["softmax 4096x1024"] = (captured(lambda x: norm.softmax_rows(x), x),
                                 captured(lambda x: x.softmax(), x))
    codes, scale = (each.contiguous().realize() for each in stdlib.quantised_int8(numbers(1024, 1024)))
    half = numbers(512, 1024, dtype=dtypes.bfloat16)
    made["int8 weights 512x1024x1024 bfloat16"] = (
        best(quantised.qint8_rows, lambda one: one, (half, codes, scale), BLOCKS),
        captured(lambda x, q, s: x.matmul(q.cast(x.dtype).T, dtype=dtypes.float32) * s, half, codes, scale))
    return made


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help=f"writes {RESULTS.name}, too")
    given = parser.parse_args()
    rows = []
    for name, (ours, template) in cases().items():
        pairs = [(seconds(ours), seconds(template)) for _ in range(given.rounds)]
        ratios = sorted(b / a for a, b in pairs)
        rows.append({"case": name, "language_ms": round(1e3 * min(a for a, _ in pairs), 3),
                     "template_ms": round(1e3 * min(b for _, b in pairs), 3),
                     "ratio": round(ratios[len(ratios) // 2], 3), "least": round(ratios[0], 3),
                     "largest": round(ratios[-1], 3)})
        row = rows[-1]
        print(f"{name:40s} {row['language_ms']:9.3f} ms  template {row['template_ms']:9.3f} ms  "
              f"ratio {row['ratio']:.2f} ({row['least']:.2f} to {row['largest']:.2f})", flush=True)
    if given.json:
        target = host()
        made = {"isa": str(target.isa), "threads": target.threads, "rows": rows}
        RESULTS.write_text(json.dumps(made, indent=1) + "\n")



if __name__ == "__main__": main()
