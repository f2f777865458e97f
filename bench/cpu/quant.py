"""Matmuls with quantised matrices on the CPU beside bfloat16's of the same shape, in one interleaved run.

    python bench/cpu/quant.py [--rows 1 16 256] [--types Q4_0 Q4_K …] [--repeat 15] [--as-stored] [--floats]

Every side is a TinyJit that is replayed, of bfloat16 activations and of so many matrices that they come from
memory, as in a model; figures are of one. Sides take turns, so that what else the machine does meets all.
Figures are medians of the turns, ratios those of each turn's pair. Bandwidth counts the matrix's bytes as
they are stored. Matrices are `prepare_matrix` for the CPU, or with --as-stored in the layout of checkpoints.
Activations are quantised to int8 where codes are integers, but not with --floats. "W8A8" multiplies int8
codes of rows, "W8A8 rounded" inputs that were rounded to them.
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.kernel_times import Run, capture, time_call
from bench.lib.measure import each, save, spread, table
from tinygrad_nv.cpu.target import host
from tinygrad_nv.functional import prepare_matrix, quant_matmul, quantize, scaled_matmul
from tinygrad_nv.quant import types
from tinygrad_nv.quant.activations import round_activations
from tinygrad_nv.quant.floats import to_e4m3
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import QType, buffers

SHAPES = ((2048, 2048), (8192, 2048), (2048, 8192))     # outputs, inputs: layers of a model of 1B
TYPES = {name: getattr(types, name) for name in ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0")}
TYPES["int8 channel"] = types.INT8 @ types.per_channel_scale()
TYPES["awq"] = QType(types.UINT4, types.per_group_scale(128, dtypes.float16), zeros=True)
TYPES |= {"fp8 blocks": types.E4M3 @ types.per_block_scale(128, 128),
          "fp8 channel": types.E4M3 @ types.per_channel_scale(), "mxfp4": types.MXFP4, "nvfp4": types.NVFP4,
          "nf4": types.NF4 @ types.per_group_scale(64)}
TYPES |= {"W8A8": TYPES["int8 channel"], "W8A8 rounded": TYPES["int8 channel"]}
MATRICES_BYTES = 64 << 20       # twice the largest cache
FEW_ROWS = 16
T = TypeVar("T")
HEADER = ["", "rows", "GB/s", "GFLOP/s", "ms", "× bf16", "spread"]


def matrix(type: QType, n: int, k: int) -> QTensor:
    """Random codes, scales of one size."""
    rng, made = np.random.default_rng(n + k), {}
    for name, (shape, dtype) in buffers(type, n, k).items():
        raw = *shape, dtype.itemsize
        if name == "codes" and dtypes.is_float(dtype):
            made[name] = to_e4m3(rng.standard_normal(raw, np.float32) * 100)
        elif name == "zeros": made[name] = rng.integers(0, 16, raw, np.uint8)
        elif name in ("codes", "high"): made[name] = rng.integers(0, 256, raw, np.uint8)
        elif type.scale.e8m0: made[name] = rng.integers(117, 122, raw, np.uint8)
        elif dtype == dtypes.float16: made[name] = np.full(shape, 2 ** -8, np.float16)
        elif dtype == dtypes.float32: made[name] = np.full(shape, 2 ** -8, np.float32)
        else: made[name] = rng.integers(1, 30, raw, np.uint8)
    return QTensor.of(type, (n, k), made)


def copies(nbytes: int, rows: int) -> int:
    """Matrices of a side; of many rows, where reading them is little of the time, one."""
    return -(-MATRICES_BYTES // nbytes) if rows <= FEW_ROWS else 1


def layers(matrices: list[T], multiplied: Callable[[T], Tensor]) -> Run:
    """A captured step that multiplies x with each of some matrices."""
    def step() -> Tensor:
        out = [multiplied(w) for w in matrices]
        Tensor.realize(*out)
        return out[-1]
    return capture(step)


def multiply(name: str, x: Tensor, w: QTensor, floats: bool) -> Tensor:
    """x Wᵀ of a type by its name."""
    if name == "W8A8":
        codes, scales = quantize(x, "int8", types.Scale(1, 0))
        return scaled_matmul(codes, scales, w)
    if name == "W8A8 rounded": return quant_matmul(round_activations(x, Activations("int8",
                                                                                    types.Scale(1, 0))), w)
    return quant_matmul(x, w, int8=not floats)


def measure(n: int, k: int, rows: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One shape: bfloat16 and all types in turns."""
    numbers = np.random.default_rng(rows).standard_normal((rows, k), np.float32)
    x = Tensor(numbers).cast(dtypes.bfloat16).realize()
    first = Tensor(np.ones((n, k), np.float32)).cast(dtypes.bfloat16).realize()
    dense = [first, *(first.clone().realize() for _ in range(copies(first.nbytes(), rows) - 1))]
    nbytes, sides = {"bf16": first.nbytes()}, {"bf16": (layers(dense, lambda w: x @ w.T), len(dense))}
    for name in arguments.types:
        one = matrix(TYPES[name], n, k)
        made = [one, *(matrix(TYPES[name], n, k) for _ in range(copies(one.nbytes, rows) - 1))]
        if not arguments.as_stored: made = [prepare_matrix(w) for w in made]
        step = layers(made, partial(multiply, name, x, floats=arguments.floats))
        sides[name], nbytes[name] = (step, len(made)), one.nbytes
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeat):
        for name, (run, count) in sides.items(): seconds[name].append(time_call(run) / count)
    return {"n": n, "k": k, "rows": rows, "bytes": nbytes, "seconds": seconds}


def lines(done: dict[str, Any]) -> list[list[str]]:
    """Lines of the table."""
    out, flops = [], 2 * done["n"] * done["k"] * done["rows"]
    for name, seconds in done["seconds"].items():
        ratios = [b / a for a, b in zip(seconds, done["seconds"]["bf16"], strict=True)]
        time = median(seconds)
        rates = f"{done['bytes'][name] / time / 1e9:.1f}", f"{flops / time / 1e9:.0f}"
        out.append([f"{done['n']} x {done['k']} {name}", str(done["rows"]), *rates, f"{time * 1e3:.3f}",
                    f"{median(ratios):.2f}", spread(ratios)])
    return out


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--repeat", type=int, default=15, help="turns of each side (default 15)")
    parser.add_argument("--as-stored", action="store_true", help="matrices in the layout of checkpoints")
    parser.add_argument("--floats", action="store_true", help="activations are not quantised")
    parser.add_argument("--save", action="store_true", help="keep the results in bench/results")
    arguments = parser.parse_args()
    with Context(DEV="CPU"):
        results = [measure(n, k, rows, arguments)
                   for (n, k), rows in each([(shape, rows) for shape in SHAPES for rows in arguments.rows])]
    here = host()
    print(f"{here.isa}, {here.threads} threads")
    print(table(HEADER, [line for done in results for line in lines(done)]))
    if arguments.save:
        save("cpu_quant", {"isa": str(here.isa), "threads": here.threads, "as_stored": arguments.as_stored,
                           "floats": arguments.floats, "results": results})


if __name__ == "__main__": main()
