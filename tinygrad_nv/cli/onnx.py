"""`tinygrad-nv onnx run MODEL` and `tinygrad-nv onnx export MODEL_DIR`.

Protocol: `run` takes inputs from .npy files, or makes random ones for all that are not given; prints a line
for each output on stdout, and with --explain the kernels on stderr. `export` writes a decoder with its keys
and values as inputs and outputs (onnx/exporting/llama.py), and prints the path.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.errors import RequestError
from tinygrad_nv.files import require_npy

if TYPE_CHECKING:   # loads tinygrad
    from tinygrad_nv.onnx.runner import OnnxRunner


RANDOM_ELEMENTS = 1 << 28   # limit: elements of a random input of onnx run


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str) -> None:
    """Adds `onnx`; `directory` is the help of a model directory."""
    onnx = commands.add_parser("onnx", help="run an ONNX model, or export a model as one")
    kinds = onnx.add_subparsers(required=True, metavar="COMMAND")
    run = kinds.add_parser("run", help="run an ONNX model")
    run.add_argument("model", type=Path, metavar="MODEL", help="an .onnx file")
    run.add_argument("--input", action="append", default=[], type=_pair, metavar="NAME=FILE",
                     help="an input from a .npy file; may be repeated")
    run.add_argument("--random", action="store_true", help="random numbers for inputs that are not given: "
                     "floats of a normal distribution, integers 0 and 1")
    run.add_argument("--dim", action="append", default=[], type=_pair, metavar="NAME=N",
                     help="the extent of a free dimension of random inputs (default 1); may be repeated")
    run.add_argument("--out", type=Path, metavar="DIR", help="write each output to DIR/NAME.npy")
    run.add_argument("--explain", action="store_true", help="print which kernels run, and why, to stderr")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    run.set_defaults(run=_run)
    export = kinds.add_parser("export", help="write a decoder as an ONNX model")
    export.add_argument("model", metavar="MODEL", help=directory)
    export.add_argument("-o", "--out", type=Path, required=True, metavar="FILE",
                        help="the .onnx file to write")
    export.add_argument("--opset", type=int, default=21, help="the version of operators (default 21)")
    export.add_argument("--dtype", default="float32", help="float32, float16 (default float32)")
    export.add_argument("--external-data", action=argparse.BooleanOptionalAction,
                        help="weights in FILE.data (default: where they exceed 2 GiB)")
    export.set_defaults(run=_export)


def _pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, _, value = text.partition("=")
    if not name or not value: raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _run(arguments: argparse.Namespace) -> int:
    from tinygrad import Tensor

    from tinygrad_nv import explain
    from tinygrad_nv.onnx.runner import OnnxRunner
    runner = OnnxRunner(arguments.model)
    inputs = _inputs(runner, arguments)
    started = time.perf_counter()
    made = runner(inputs)
    tensors = [each for each in made.values() if isinstance(each, Tensor)]
    if arguments.explain: print(explain(*tensors), file=sys.stderr)
    arrays = {name: _array(each) for name, each in made.items()}
    seconds = time.perf_counter() - started
    if arguments.out is not None: _write(arguments.out, arrays)
    described = {name: _describe(each) for name, each in arrays.items()}
    if arguments.json: print(json.dumps({"outputs": described, "seconds": seconds}))
    else:
        for name, each in described.items(): print(f"{name}: {each['dtype']} {each['shape']}{_range(each)}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from tinygrad_nv.cli.model_path import find_model
    from tinygrad_nv.onnx.exporting.llama import export_model
    print(export_model(find_model(arguments.model), arguments.out, arguments.opset, arguments.dtype,
                       arguments.external_data))
    return 0


# **** inputs ****

def _inputs(runner: OnnxRunner, arguments: argparse.Namespace) -> dict[str, Any]:
    """The files that are given, and random numbers for the other inputs. Raises `RequestError`."""
    given = {name: _load_array(name, Path(path)) for name, path in arguments.input}
    missing = [name for name in runner.inputs if name not in given]
    if missing and not arguments.random:
        raise RequestError(f"no input {missing[0]!r}", f"--input NAME=FILE for {', '.join(runner.inputs)}",
                           "add it, or --random")
    dims = {name: _extent(name, value) for name, value in arguments.dim}
    return {**given, **{name: _random(runner, name, dims) for name in missing}}


def _load_array(name: str, path: Path) -> Any:
    """Loads the array in a .npy file, never a pickle."""
    import numpy as np
    try:
        require_npy(path)
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise RequestError(f"the input {name!r} cannot be read from {path}: {error}",
                           "a .npy file of numbers", "write it with numpy.save") from error


def _extent(name: str, value: str) -> int:
    if value.isascii() and value.isdigit() and len(value) < 19: return int(value)
    raise RequestError(f"--dim {name[:80]}={value[:80]}", f"a whole number, 0 to {10**18 - 1}")


def _random(runner: OnnxRunner, name: str, dims: Mapping[str, int]) -> Any:
    """Random numbers of an input's type and shape."""
    import numpy as np
    from onnx import helper

    from tinygrad_nv.onnx.elements import PLAIN, name_of
    kind = runner.graph.types[name].tensor_type
    if not kind.elem_type:
        raise RequestError(f"the input {name!r} is no tensor", "--input for it", "call it from Python")
    shape = [each.dim_value if each.dim_value > 0 else dims.get(each.dim_param, 1)
             for each in kind.shape.dim]
    if (size := math.prod(shape)) > RANDOM_ELEMENTS:
        raise RequestError(f"the input {name!r} of shape {shape}, of {size} elements",
                           f"{RANDOM_ELEMENTS} at most of random numbers", "lower --dim, or give --input")
    if kind.elem_type not in PLAIN:
        raise RequestError(f"the input {name!r} of elements {name_of(kind.elem_type)}", "numbers",
                           "--input for it")
    dtype, generator = helper.tensor_dtype_to_np_dtype(kind.elem_type), np.random.default_rng(0)
    numbers = generator.integers(0, 2, shape) if dtype.kind in "iub" else generator.standard_normal(shape)
    return numbers.astype(dtype)


# **** outputs ****

def _array(x: Any) -> Any:
    """An output as numpy has it; a sequence as a list."""
    return [_array(each) for each in x] if isinstance(x, list) else x.numpy() if hasattr(x, "numpy") else x


def _write(directory: Path, arrays: Mapping[str, Any]) -> None:
    """Writes outputs; a sequence's tensors are numbered."""
    import numpy as np
    directory.mkdir(parents=True, exist_ok=True)
    for name, each in arrays.items():
        parts: list[tuple[str, Any]] = [(f"{name}.{i}", x) for i, x in enumerate(each)] \
            if isinstance(each, list) else [(name, each)]
        for file, x in parts: np.save(directory / f"{_file_name(file)}.npy", x, allow_pickle=False)


def _file_name(name: str) -> str:
    return "".join(each if each.isalnum() or each in "._-" else "_" for each in name)


def _describe(x: Any) -> dict[str, Any]:
    """Returns type, shape and range of an output."""
    if isinstance(x, list): return {"dtype": "sequence", "shape": [len(x)]}
    made: dict[str, Any] = {"dtype": str(x.dtype), "shape": list(x.shape)}
    if x.size and x.dtype.kind in "fiu":
        reduced: dict[str, Callable[[], Any]] = {"min": x.min, "max": x.max, "mean": x.mean}
        made |= {name: float(each()) for name, each in reduced.items()}
    return made


def _range(described: Mapping[str, Any]) -> str:
    """The range in words."""
    if "min" not in described: return ""
    return ", " + ", ".join(f"{name} {described[name]:.6g}" for name in ("min", "max", "mean"))
