"""Captured calls of ONNX models beside onnxruntime on one core, in turn: medians, and the first call.

    DEV=CPU python bench/onnx_models.py vad.onnx --set sr=16000 --dim sequence=576
    DEV=CPU python bench/onnx_models.py det.onnx --shape x=1x3x160x160

Protocol: inputs are random (cli/onnx.py), those of --set numbers, those of --shape of that shape. Both run
with one thread; a call gives numpy arrays. Prints the largest difference of the outputs, too.
"""
from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

os.environ["NUM_CPU_THREADS"] = "1"     # read when tinygrad is imported

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from onnx import helper

from tinygrad_nv.onnx import OnnxRunner


def inputs_of(runner: OnnxRunner, shapes: dict[str, str], numbers: dict[str, str],
              dims: dict[str, str]) -> dict[str, np.ndarray]:
    """Random inputs of a model."""
    made, random = {}, np.random.default_rng(0)
    for name in runner.inputs:
        kind = runner.graph.types[name].tensor_type
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = [int(n) for n in shapes[name].split("x")] if name in shapes else \
            [each.dim_value if each.dim_value > 0 else int(dims.get(each.dim_param, 1))
             for each in kind.shape.dim]
        if name in numbers: made[name] = np.full(shape, float(numbers[name])).astype(dtype)
        elif dtype.kind == "f": made[name] = (random.standard_normal(shape) / 10).astype(dtype)
        else: made[name] = random.integers(0, 100, shape).astype(dtype)
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    for option in ("--set", "--dim", "--shape"): parser.add_argument(option, action="append", default=[])
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args()
    numbers, dims, shapes = (dict(each.split("=") for each in given)
                             for given in (arguments.set, arguments.dim, arguments.shape))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session, runner = onnxruntime.InferenceSession(arguments.model, options), OnnxRunner(arguments.model)
    given: dict[str, Any] = inputs_of(runner, shapes, numbers, dims)
    begun = time.perf_counter()
    found = [each.numpy() for each in runner(given).values()]
    first = time.perf_counter() - begun
    wanted = session.run(None, given)
    calls: dict[str, Callable[[], Any]] = {
        "tinygrad_nv": lambda: [each.numpy() for each in runner(given).values()],
        "onnxruntime": lambda: session.run(None, given)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.calls):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begun)
    ours, theirs = (median(each) * 1e6 for each in times.values())
    difference = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    print(f"first call {first:.1f} s; tinygrad_nv {ours:.0f} µs, onnxruntime {theirs:.0f} µs, "
          f"{ours / theirs:.2f} of it; outputs differ by {difference:.1e}")


if __name__ == "__main__": main()
