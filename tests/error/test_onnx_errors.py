"""What is said of ONNX models that cannot be read or run, of inputs that do not fit, and of functions and
models that cannot be exported."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.errors import ModelError, NVError, OnnxError, TransformError
from tinygrad_nv.onnx import OnnxRunner, export, export_model


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with Context(DEV="CPU"): yield


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "own" : 3]> {text}')


ADD = model("g (float[n, 3] x, float[n, 3] y) => (float[n, 3] z) { z = Add(x, y) }")
X = np.zeros((2, 3), dtype=np.float32)


@pytest.mark.parametrize(("name", "error"), [("onnx", "OnnxError"), ("torch", "TorchError"),
                                             ("jax", "TransformError")])
def test_the_package_is_missing(name, error):
    text = f"from importlib import util; util.find_spec = lambda name: None; import tinygrad_nv.{name}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert f"{error}: the package {name} is not installed" in done.stderr
    assert f"pip install 'tinygrad-nv[{name}]'" in done.stderr


# **** files ****

def test_no_file(tmp_path: Path):
    with pytest.raises(OnnxError, match=r"no file at .*lost\.onnx"): OnnxRunner(tmp_path / "lost.onnx")


@pytest.mark.parametrize("damage", [lambda x: b"not a model", lambda x: x[:len(x) // 2], lambda x: b""])
def test_a_damaged_file(damage: Callable[[bytes], bytes], tmp_path: Path):
    for source in (damage(ADD.SerializeToString()), tmp_path / "m.onnx"):
        if isinstance(source, Path): source.write_bytes(damage(ADD.SerializeToString()))
        with pytest.raises(OnnxError) as caught: OnnxRunner(source)
        assert "no ONNX model" in str(caught.value) or "onnx's checker refuses" in str(caught.value)


def test_many_damaged_files():
    """Any byte may be another: the model is refused in words, or still one."""
    whole, random = bytearray(ADD.SerializeToString()), np.random.default_rng(0)
    for _ in range(300):
        made = bytearray(whole)
        for place in random.integers(0, len(made), 3): made[place] = random.integers(256)
        try: OnnxRunner(bytes(made))
        except NVError: continue


def test_a_model_that_the_checker_refuses():
    made = onnx.ModelProto.FromString(ADD.SerializeToString())
    made.graph.node[0].input[0] = "nothing"
    with pytest.raises(OnnxError, match="onnx's checker refuses"): OnnxRunner(made)


def test_a_later_version():
    made = onnx.ModelProto.FromString(ADD.SerializeToString())
    made.ir_version = 999
    with pytest.raises(OnnxError, match="a model of IR version up to"): OnnxRunner(made)


@pytest.mark.parametrize("location", ["lost.data", "../secret.data", "/etc/passwd"])
def test_external_data_that_is_not_beside_the_model(location: str, tmp_path: Path):
    made = model("g (float[2] x) => (float[2] y) { y = Add(x, w) }")
    weight = made.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[2])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    (tmp_path / "secret.data").write_bytes(bytes(8))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(OnnxError) as caught: OnnxRunner(tmp_path / "inner" / "m.onnx")
    assert "cannot be read" in str(caught.value) or "onnx's checker refuses" in str(caught.value)


# **** nodes ****

def test_an_unknown_op_is_named():
    made = model("g (float[2] x) => (float[2] y) { [n7] y = own.Frobnicate(x) }")
    with pytest.raises(OnnxError) as caught: OnnxRunner(made)({"x": np.zeros(2, np.float32)})
    assert "node 'n7' (op Frobnicate, domain own, opset 3): no function computes this op" in str(caught.value)


def test_an_error_inside_a_node_says_which():
    made = model("g (float[a, b] x, float[c, d] y) => (float[e, f] z) { [mm] z = MatMul(x, y) }")
    with pytest.raises(OnnxError, match=r"node 'mm' \(op MatMul, domain ai.onnx, opset 21\)"):
        OnnxRunner(made)({"x": X, "y": X})


def test_narrow_elements_are_cast_first():
    made = helper.make_model(helper.make_graph(
        [helper.make_node("Abs", ["x"], ["y"], name="n")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT8E4M3FN, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT8E4M3FN, [2])]),
        opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    dtype = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
    with pytest.raises(OnnxError, match="elements of type FLOAT8E4M3FN\n  expected: a Cast before it"):
        OnnxRunner(made)({"x": np.zeros(2, dtype)})


# **** inputs ****

@pytest.mark.parametrize(("inputs", "words"), [
    ({"x": X}, "no input 'y'"),
    ({"x": X, "y": X, "q": X}, "the model has no input 'q'\n  expected: inputs x, y"),
    ({"x": X, "y": X[:, :2]}, r"input 'y' of shape \(2, 2\)\n  expected: \(2, 3\)"),
    ({"x": X, "y": X[:1]}, r"input 'y' of shape \(1, 3\)\n  expected: \(2, 3\)"),
    ({"x": X[0], "y": X}, r"input 'x' of shape \(3,\)\n  expected: \(n, 3\)"),
    ({"x": X.astype(np.float64), "y": X}, "input 'x' of float64\n  expected: float"),
    ({"x": Tensor(X).half(), "y": X}, "input 'x' of dtypes.half")])
def test_inputs_that_do_not_fit(inputs: dict[str, Any], words: str):
    with pytest.raises(OnnxError, match=words): OnnxRunner(ADD)(inputs)


# **** export ****

@pytest.mark.parametrize(("fn", "kind", "words"), [
    (lambda x: x.numpy().sum(), TransformError, "a value is read in a function under export"),
    (lambda x: 3, OnnxError, "the result 'output' is a int"),
    (lambda x: x.bitcast("int32"), OnnxError, "the function has a BITCAST"),
    (lambda x: x.contiguous().assign(x + 1), OnnxError, "the function has a AFTER")])
def test_functions_that_cannot_be_exported(fn: Callable[[Tensor], Any], kind: type[NVError], words: str,
                                           tmp_path: Path):
    with pytest.raises(kind, match=words): export(fn, [Tensor(X)], tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_arguments_of_export(tmp_path: Path):
    with pytest.raises(OnnxError, match="opset 13\n  expected: 21 to"):
        export(lambda x: x, [Tensor(X)], tmp_path / "m.onnx", opset=13)
    with pytest.raises(OnnxError, match="the input 'input' is a int"):
        export(lambda x: x, [3], tmp_path / "m.onnx")     # type: ignore[list-item]
    with pytest.raises(OnnxError, match="2 names for 1 results"):
        export(lambda x: x, [Tensor(X)], tmp_path / "m.onnx", output_names=["a", "b"])


def test_models_that_cannot_be_exported(make_model: Callable[..., Path], tmp_path: Path):
    with pytest.raises(OnnxError, match="dtype 'int8'\n  expected: float32 or float16"):
        export_model(tmp_path, tmp_path / "m.onnx", dtype="int8")
    mixture = make_model("MixtralForCausalLM", num_local_experts=2)
    with pytest.raises(OnnxError, match="a MixtralForCausalLM with a mixture of experts"):
        export_model(mixture, tmp_path / "m.onnx")
    with pytest.raises(ModelError): export_model(tmp_path, tmp_path / "m.onnx")
