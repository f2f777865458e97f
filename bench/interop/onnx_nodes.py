"""onnx's node tests on this package: how many pass, by op, and which do not.

    DEV=CPU python bench/interop/onnx_nodes.py                 # all, a few minutes
    DEV=CPU python bench/interop/onnx_nodes.py attention lstm  # those with these words in their names
    DEV=EMU python bench/interop/onnx_nodes.py --every 8       # a sample

Protocol: the package `onnx` makes the cases (model, inputs, outputs, tolerances) in this process. An output
must have the type of elements, the shape and, within the case's tolerances, the values that the case has.
`onnx_node_failures.json` has the cases that do not pass, with a reason each; tests/unit/onnx/test_contrib.py
fails for a case that fails and is not listed, and for a listed one that passes.
"""
from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))


KNOWN = Path(__file__).parent / "onnx_node_failures.json"


@cache
def cases() -> list[Any]:
    """onnx's cases of kind node, by name."""
    from onnx.backend.test.loader import load_model_tests
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # they are made of numbers that overflow
        return sorted(load_model_tests(kind="node"), key=lambda each: str(each.name))


@cache
def load_known(device: str) -> dict[str, str]:
    """The cases that do not pass on a device, with reasons: those that pass on none, and its own."""
    table = json.loads(KNOWN.read_text())
    return {**table["every device"], **table.get(device, {})}


def op_of(case: Any) -> str:
    """The op that a case is about."""
    first = case.model.graph.node[0].op_type
    return str(case.name).removeprefix("test_").split("_")[0] if case.name.endswith("_expanded") else first


def failure(case: Any) -> str:
    """Runs a case; why it fails, "" if it passes."""
    from tinygrad_nv.onnx import OnnxRunner
    from tinygrad_nv.onnx.elements import to_numpy
    try:
        for inputs, expected in case.data_sets:
            runner = OnnxRunner(case.model)
            names = [each.name for each in case.model.graph.input]
            given = dict(zip(names, map(_array, inputs), strict=False))
            for made, wanted in zip(runner.values(given).values(), expected, strict=True):
                _compare(to_numpy(made), _array(wanted), case.rtol, case.atol)
    except Exception as error:  # a failure of any kind is what is counted
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def _array(x: Any) -> Any:
    """A tensor of a case as numpy has it."""
    from onnx import TensorProto, numpy_helper
    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else x


def _compare(made: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Raises `AssertionError` where an output differs."""
    if isinstance(wanted, list):
        assert isinstance(made, list), "no sequence"
        assert len(made) == len(wanted), f"a sequence of {len(made)}, not {len(wanted)}"
        for a, b in zip(made, wanted, strict=True): _compare(a, b, rtol, atol)
        return
    if wanted is None:
        assert made is None
        return
    made, wanted = np.asarray(made), np.asarray(wanted)
    assert made.shape == wanted.shape, f"shape {made.shape}, not {wanted.shape}"
    if wanted.dtype.kind in "OUS":
        assert made.tolist() == wanted.tolist()
        return
    assert made.dtype == wanted.dtype, f"{made.dtype}, not {wanted.dtype}"
    if wanted.dtype.kind == "V": made, wanted = made.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_allclose(made, wanted, rtol=rtol, atol=atol)


def main() -> int:
    """Prints the pass rate by op, and the failures; exits with 1 where the list is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--every", type=int, default=1, help="every nth case")
    parser.add_argument("--json", type=Path, help="write the failures here")
    arguments = parser.parse_args()
    chosen = [each for each in cases()
              if not arguments.words or any(word in each.name for word in arguments.words)][::arguments.every]
    failures, passed, number = {}, Counter[str](), Counter[str]()
    started = time.perf_counter()
    for i, case in enumerate(chosen):
        number[op_of(case)] += 1
        why = failure(case)
        if why:
            failures[case.name] = why
            print(f"{case.name}: {why}")
        else: passed[op_of(case)] += 1
        if i % 50 == 0:
            gc.collect()
            print(f"{i} of {len(chosen)}, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    for name in sorted(number):
        if passed[name] < number[name]: print(f"{name:30} {passed[name]:4} of {number[name]:4}")
    print(f"{sum(passed.values())} of {len(chosen)} pass ({sum(passed.values()) / len(chosen):.2%}), "
          f"{len(number)} ops, {time.perf_counter() - started:.0f} s")
    if arguments.json: arguments.json.write_text(json.dumps(failures, indent=1))
    from tinygrad import Device
    listed = load_known(Device.DEFAULT)
    wrong = [name for name in failures if name not in listed]
    stale = [each.name for each in chosen if each.name in listed and each.name not in failures]
    if wrong: print(f"not in {KNOWN.name}: {', '.join(wrong)}")
    if stale: print(f"pass, but are in {KNOWN.name}: {', '.join(stale)}")
    return 1 if wrong or stale else 0


if __name__ == "__main__":
    import tinygrad_nv  # noqa: F401  (its compiler serves tinygrad)
    sys.exit(main())
