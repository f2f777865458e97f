"""What is said of ONNX models that cannot be read or run, of inputs that do not fit, and of functions and
models that cannot be exported."""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.errors import ModelError, NVError, OnnxError, TransformError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.onnx import OnnxRunner, export, export_model, limits
from tinygrad_nv.onnx.exporting.llama import require_written
from tinygrad_nv.quantize.network import require_computed


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


# **** models that ask for too much ****

BODY = "(int64 i, bool k, float[n, 3] s) => (bool k2, float[m, 3] s2)"
OWN = '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>'
FUNCTION = '<domain: "own", opset_import: ["" : 21, "own" : 1]> {} (x) => (y) {{ {} }}\n'


def loop(trips: str, body: str) -> str:
    return f"""c = Constant<value = bool {{1}}>() n = Constant<value = int64 {{1000000000}}>()
               y = Loop ({trips}, c, x) <body = b {BODY} {{ {body} }}>"""


@pytest.mark.parametrize(("nodes", "words"), [
    (loop("n", "k2 = Identity(k) s2 = Neg(s)"), "1000000000 iterations of 3 steps"),
    (loop("", "k2 = Constant<value = bool {1}>() s2 = Neg(s)"), "a loop without an end"),
    (loop("n", "m = Constant<value = int64 {1000000000000}>() k2 = Less(i, m) s2 = Identity(s)"),
     "a loop whose condition is true after 64 iterations"),
    (loop("n", "k2 = Less(i, n) s2 = Concat<axis = 0>(s, s)"), "a result of shape .*, of 1610612736 bytes"),
    ("n = Constant<value = int64[1] {1000000000000}>() y = ConstantOfShape(n)", "of 4000000000000 bytes"),
    ("n = Constant<value = int64[1] {1000000}>() b = ConstantOfShape(n) y, z = Scan<num_scan_inputs = 1, "
     "body = b (float[2, 3] s, float v) => (float[2, 3] t, float o) { t = Add(s, v) o = Neg(v) }>(x, b)",
     "1000000 iterations of 3 steps"),
    ("a = Constant<value = float {0}>() b = Constant<value = float {1e12}>() "
     "d = Constant<value = float {1}>() y = Range(a, b, d)", "op Range, .*: a result of shape"),
    ("y = RandomNormal<shape = [1000000, 1000000]>()", "NV_ONNX_GIB"),
    ("n = Constant<value = int64 {1000000000000}>() y = HannWindow(n)", "op HannWindow"),
    ("a = Constant<value_string = \"" + "ab" * 5000 + "\">() " + " ".join(
        f"{chr(98 + i)} = StringConcat({chr(97 + i)}, {chr(97 + i)})"
        for i in range(20)) + " y = Identity(x)",
     "strings of .* characters")])
def test_models_that_ask_for_too_much(nodes: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "WHILE_ITERATIONS", 64)
    made = model(f"g (float[2, 3] x) => (float[n, 3] y) {{ {nodes} }}")
    with pytest.raises(OnnxError, match=words): OnnxRunner(made)({"x": X})


@pytest.mark.parametrize(("functions", "words"), [
    ([("f0", "y = Neg(x)"), *((f"f{i}", f"t = own.f{i - 1}(x) y = own.f{i - 1}(t)") for i in range(1, 60)),
      ("f", "y = own.f59(x)")], "nodes with functions inlined\n  expected: 32768 at most"),
    ([("f", "y = own.f(x)")], "the function 'own.f' calls itself"),
    ([("f", "y = own.g(x)"), ("g", "c = Constant<value = bool {1}>() y = If(c)<then_branch = a () => (z) "
                                   "{ z = own.f(x) }, else_branch = b () => (w) { w = Neg(x) }>")],
     "calls itself"),
    ([("f", "y = Neg(x)"), ("f", "y = own.f(x)")], "two functions 'own.f'")])
def test_functions_without_an_end(functions: list[tuple[str, str]], words: str):
    text = "".join(FUNCTION.format(*each) for each in functions)
    made = onnx.parser.parse_model(f"{OWN} g (float[2, 3] x) => (float[2, 3] y) {{ y = own.f(x) }} {text}")
    with pytest.raises(OnnxError, match=words): OnnxRunner(made)


def test_limits_are_far_above_honest_models(monkeypatch: pytest.MonkeyPatch):
    """Loops with an end, functions that are called, and a limit that is set."""
    text = FUNCTION.format("f", "y = Neg(x)")
    body = "q = Constant<value = int64 {9}> () k2 = Less(i, q) s2 = own.f(s)"
    made = onnx.parser.parse_model(
        f"{OWN} g (float[2, 3] x) => (float[n, 3] y) {{ {loop('n', body)} }} {text}")
    assert OnnxRunner(made)({"x": X + 1})["y"].tolist() == [[1.0] * 3] * 2     # ten times negated
    monkeypatch.setenv("NV_ONNX_NODES", "20")
    with pytest.raises(OnnxError, match="more than 20 nodes are evaluated"): OnnxRunner(made)({"x": X})


# **** tensors ****

def weighted(**fields: Any) -> onnx.ModelProto:
    made = model("g (float[2, 3] x) => (float[2, 3] y) <float[2, 3] w = {1, 2, 3, 4, 5, 6}> "
                 "{ y = Add(x, w) }")
    for name, value in fields.items(): setattr(made.graph.initializer[0], name, value)
    return made


def sparse(indices: Any, values: Any = (1.0, 2.0), dims: tuple[int, ...] = (2, 3),
           attribute: bool = False) -> onnx.ModelProto:
    made = model("g (float[2, 3] x) => (float[2, 3] y) { y = Add(x, w) }")
    kept = helper.make_sparse_tensor(numpy_helper.from_array(np.array(values, np.float32), "w"),
                                     numpy_helper.from_array(np.array(indices, np.int64), "i"), dims)
    if not attribute: made.graph.sparse_initializer.append(kept)
    else: made.graph.node.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=kept))
    return made


@pytest.mark.parametrize("made", [
    weighted(data_type=99), weighted(data_type=-1), *(sparse(**each) for each in (
        {"indices": [1, 600]}, {"indices": [-1, 4]}, {"indices": [[0, 1], [1, 9]]}, {"indices": [4, 1]},
        {"indices": [1, 4], "dims": (10**6, 10**6)}, {"indices": [1, 2, 3]},
        {"indices": [1, 600], "attribute": True},
        {"indices": [1, 4], "dims": (10**6, 10**6), "attribute": True}))])
def test_tensors_that_are_none(made: onnx.ModelProto):
    with pytest.raises(OnnxError): OnnxRunner(made)


def test_text_that_is_not_utf8():
    made = model('g (float[2] x) => (float[2] y) { s = Constant<value_string = "a">() y = Neg(x) }')
    made.graph.node[0].attribute[0].s = b"\xff"
    with pytest.raises(OnnxError, match="attribute 'value_string': bytes that are not UTF-8"):
        OnnxRunner(made)


@pytest.mark.parametrize("attribute", [False, True])
def test_external_data_of_sparse_constants_is_beside_the_model(attribute: bool, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch):
    """It is read from the model's directory, not from the working directory."""
    made = sparse([1, 4], attribute=attribute)
    kept = made.graph.node[0].attribute[0].sparse_tensor if attribute else made.graph.sparse_initializer[0]
    kept.values.ClearField("raw_data")
    kept.values.data_location = TensorProto.EXTERNAL
    kept.values.external_data.add(key="location", value="w.bin")
    (tmp_path / "there").mkdir()
    (tmp_path / "w.bin").write_bytes(np.float32([7, 8]).tobytes())
    (tmp_path / "there" / "w.bin").write_bytes(np.float32([3, 4]).tobytes())
    (tmp_path / "there" / "m.onnx").write_bytes(made.SerializeToString())
    monkeypatch.chdir(tmp_path)
    assert OnnxRunner(tmp_path / "there" / "m.onnx")({"x": X})["y"].tolist() == [[0, 3, 0], [0, 4, 0]]
    with pytest.raises(OnnxError, match="given without its path"): OnnxRunner(made)
    kept.values.external_data[0].value = "../w.bin"
    (tmp_path / "there" / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(OnnxError): OnnxRunner(tmp_path / "there" / "m.onnx")


# **** limits of all together, and of what is honest ****

def test_results_may_be_pairs_of_what_is_given(monkeypatch: pytest.MonkeyPatch):
    """Distances of 100,000 points are 40 GB: as much as half of the free memory is no absurd size."""
    monkeypatch.setattr(limits, "free_memory", lambda: 100 << 30)
    points = limits.Budget(given=100_000 * 3 * 4)
    points.check_bytes((100_000, 100_000), 4)
    with pytest.raises(OnnxError, match="of 80000000000 bytes\n  expected: 53687091200 bytes for 1200000"):
        points.check_bytes((100_000, 100_000), 8)
    with pytest.raises(OnnxError, match="expected: 1073741824 bytes for 48 bytes"):
        limits.Budget(given=48).check_bytes((1 << 29,), 4)


def test_many_large_results(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 4 << 30)
    each = "a{0} = Constant<value = int64[1] {{200000000}}>() y{0} = ConstantOfShape(a{0}) "
    text = ", ".join(f"float[n{i}] y{i}" for i in range(4))
    made = model(f"g () => ({text}) {{ {''.join(each.format(i) for i in range(4))} }}")
    with pytest.raises(OnnxError, match="4 results of 3200000000 bytes together\n  expected: 2147483648"):
        OnnxRunner(made)({})


def test_many_sparse_constants():
    made = sparse([1, 4])
    for i in range(3):
        kept = made.graph.sparse_initializer.add()
        kept.CopyFrom(made.graph.sparse_initializer[0])
        kept.values.name, kept.dims[:] = f"w{i}", [1 << 14, 1 << 13]
    with pytest.raises(OnnxError, match="of 1073741848 bytes"): OnnxRunner(made)


@pytest.mark.parametrize(("kind", "count", "words"), [
    ("initializer", 32769, "32769 initializers"), ("value_info", 32769, "32769 types of values"),
    ("output", 32769, "32769 outputs|32770 outputs"), ("sparse_initializer", 32769, "sparse initializers"),
    ("operands", 300_000, "more than 32768 nodes")])
def test_many_of_a_kind(kind: str, count: int, words: str):
    made = model("g (float[2, 3] x) => (float[2, 3] y) { y = Sum(x, x) }")
    if kind == "operands": made.graph.node[0].input.extend(["x"] * count)
    else:
        for _ in range(count): getattr(made.graph, kind).add()
    with pytest.raises(OnnxError, match=words): OnnxRunner(made)


def test_external_data_is_what_the_shape_says(tmp_path: Path):
    """A file has more than a tensor of it: without a length, too, and a hole costs nothing to write."""
    made = weighted()
    weight = made.graph.initializer[0]
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    weight.external_data.add(key="offset", value="4")
    with (tmp_path / "w.bin").open("wb") as file:
        file.write(np.arange(7, dtype=np.float32).tobytes())
        file.truncate(1 << 40)
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    assert OnnxRunner(path)({"x": X})["y"].tolist() == [[1, 2, 3], [4, 5, 6]]
    weight.external_data.add(key="length", value=str(1 << 39))
    path.write_bytes(made.SerializeToString())
    with pytest.raises(OnnxError, match="549755813888 bytes in another file\n  expected: 24 bytes"):
        OnnxRunner(path)
    del weight.external_data[2:]
    weight.dims[:] = [1 << 38]
    path.write_bytes(made.SerializeToString())
    with pytest.raises(OnnxError, match="constants of 1099511627776 bytes"): OnnxRunner(path)


@pytest.mark.parametrize("suffix", ["json", "textproto", "onnxtxt", "onnx"])
@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff\xfe{}", b"{ir_version: ", b"9" * 5000])
def test_files_of_each_format_that_are_none(tmp_path: Path, suffix: str, data: bytes) -> None:
    (file := tmp_path / f"m.{suffix}").write_bytes(data)
    with pytest.raises(OnnxError, match="no ONNX model"): OnnxRunner(file)


def test_an_activation_that_only_the_model_has():
    """Neither export nor calibration takes it for GELU."""
    config = replace(read_config(DEFAULT_MODEL), activation="relu2")
    with pytest.raises(OnnxError, match="with the activation relu2"): require_written(config)
    with pytest.raises(ModelError, match="with silu or gelu or gelu_tanh"): require_computed(config)
