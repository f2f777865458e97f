"""What a runner takes and gives, and how nodes are computed: on the host, by definition, in other graphs."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, reference
from tinygrad import Tensor, TinyJit

from tinygrad_nv import GlobalCounters, explain
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx import OnnxRunner
from tinygrad_nv.onnx.elements import (
    MINIFLOATS,
    NARROW,
    dtype_of,
    kind_of,
    name_of,
    round_to_minifloat,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("cpu_device")


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form."""
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> {text}')
    weights = [onnx.numpy_helper.from_array(each, name) for name, each in constants.items()]
    made.graph.initializer.extend(weights)
    return made


SUM = "g (float[n, 3] x, float[n, 3] y) => (float[n, 3] z) { z = Add(x, y) }"


@pytest.mark.parametrize("source", ["path", "bytes", "proto"])
def test_where_a_model_comes_from(source: str, tmp_path: Path):
    proto = model(SUM)
    onnx.save(proto, tmp_path / "m.onnx")
    sources = {"path": tmp_path / "m.onnx", "bytes": proto.SerializeToString(), "proto": proto}
    runner = OnnxRunner(sources[source])
    assert (runner.inputs, runner.outputs) == (("x", "y"), ("z",))
    found = runner({"x": np.ones((2, 3), np.float32), "y": Tensor.ones(2, 3)})
    np.testing.assert_array_equal(found["z"].numpy(), np.full((2, 3), 2.0))


def test_shape_arithmetic_runs_no_kernel():
    """The chain that exporters write for x.view(x.shape[0], -1, 2)."""
    runner = OnnxRunner(model("""g (float[n, k] x) => (float[a, b, c] y) {
        s = Shape(x)  i = Constant<value: tensor = int64 {0}>()  n = Gather(s, i)
        axes = Constant<value_ints = [0]>()  row = Unsqueeze(n, axes)
        rest = Constant<value_ints = [-1]>()  two = Constant<value_ints = [2]>()
        shape = Concat<axis = 0>(row, rest, two)  y = Reshape(x, shape) }"""), captures=0)
    x = Tensor.arange(24).reshape(4, 6).float().contiguous().realize()
    before = GlobalCounters.kernel_count
    made = runner({"x": x})["y"]
    assert made.shape == (4, 3, 2)
    assert explain(made).kernels == []
    assert GlobalCounters.kernel_count == before


def test_a_graph_sees_names_around_it():
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] a) { a = Add(x, x) },
                    else_branch = e () => (float[2] b) { b = Neg(x) }> }"""
    runner, x = OnnxRunner(model(text)), np.array([1, 2], dtype=np.float32)
    assert runner({"c": np.array(True), "x": x})["y"].tolist() == [2, 4]
    assert runner({"c": np.array(False), "x": x})["y"].tolist() == [-1, -2]


def test_functions_of_the_model():
    made = model("g (float[2] x) => (float[2] y) { y = own.twice(x) }")
    made.opset_import.append(helper.make_opsetid("own", 1))
    body = helper.make_node("Add", ["a", "a"], ["b"])
    made.functions.append(helper.make_function("own", "twice", ["a"], ["b"], [body],
                                               [helper.make_opsetid("", 21)]))
    assert OnnxRunner(made)({"x": np.array([1, 2], dtype=np.float32)})["y"].tolist() == [2, 4]


def test_a_captured_call():
    weight = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    runner = OnnxRunner(model("g (float[2, 3] x) => (float[2, 3] y) { y = MatMul(x, w) }", w=weight))
    step = TinyJit(lambda x: runner({"x": x})["y"].realize())
    for i in range(4):
        x = Tensor(np.full((2, 3), i, dtype=np.float32)).realize()
        np.testing.assert_allclose(step(x).numpy(), x.numpy() @ weight, rtol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", MINIFLOATS, ids=lambda kind: TensorProto.DataType.Name(kind))
@pytest.mark.parametrize("saturate", [True, False])
def test_floats_of_few_bits_are_those_of_ml_dtypes(kind: int, saturate: bool):
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    every = every[np.isfinite(every) & (np.abs(every) < 1e9)]
    limit = float(ml_dtypes.finfo(dtype).max)
    wanted = (np.clip(every, -limit, limit) if saturate else every).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(round_to_minifloat(Tensor(every), kind, saturate).numpy(), wanted)


def test_sequences_and_strings():
    text = "g (string[n] s, string[n] t) => (string[n] u) { u = StringConcat(s, t) }"
    assert OnnxRunner(model(text))({"s": ["a", "b"], "t": ["c", "d"]})["u"].tolist() == ["ac", "bd"]
    text = "g (float[2] x, float[2] y) => (seq(float[2]) s) { s = SequenceConstruct(x, y) }"
    given: dict[str, Any] = {"x": np.zeros(2, np.float32), "y": np.ones(2, np.float32)}
    assert [each.tolist() for each in OnnxRunner(model(text))(given)["s"]] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(("kind", "first", "last", "step"), [
    ("double", 0.1, 2.0, 0.3), ("double", 1e9, 1e9 + 2, 0.25), ("float", 0, 1, 0.1), ("float", 1, 1, 1),
    ("int64", 2**53, 2**53 + 3, 1), ("int64", -(2**62), -(2**62) + 5, 3)])
def test_a_range_has_the_digits_of_its_type(kind: str, first: float, last: float, step: float):
    dtype = {"double": np.float64, "float": np.float32, "int64": np.int64}[kind]
    text = f"g ({kind} a, {kind} b, {kind} c) => ({kind}[n] y) {{ y = Range(a, b, c) }}"
    given = {name: np.array(each, dtype) for name, each in zip("abc", (first, last, step), strict=True)}
    made = OnnxRunner(model(text))(given)["y"].numpy()
    # as one addition and one multiplication in float64 have them
    wanted = given["a"].item() + np.arange(int(np.ceil((last - first) / step))) * given["c"].item()
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, wanted.astype(dtype))


@pytest.mark.parametrize("kind", NARROW, ids=name_of)
def test_narrow_inputs_as_tensors(kind: int):
    """They are the numbers of the type in a wider Tensor, as results are."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if kind == TensorProto.FLOAT8E8M0: numbers = [0.5, 2.0, 1.0]
    else: numbers = [0.5, 1.5, 3.0] if kind in MINIFLOATS else [0, 1, 1]
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
             helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
             helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", kind, [3])],
                              [info("f", TensorProto.FLOAT, [3]), info("y", kind, [3])])
    runner = OnnxRunner(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13))
    array = np.array(numbers).astype(dtype)
    for given in (array, Tensor(numbers).cast(dtype_of(kind))):
        made = runner.values({"x": given})
        assert kind_of(made["y"]) == kind
        assert made["f"].tolist() == numbers        # type: ignore[union-attr]
        assert runner({"x": given})["y"].tolist() == numbers
        assert to_numpy(made["y"]).dtype == dtype


def test_a_float8_of_tinygrad_and_a_zero_point_of_one():
    kind = TensorProto.FLOAT8E5M2
    nodes = [helper.make_node("DequantizeLinear", ["x", "s", "z"], ["y"])]
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(kind))
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", kind, [2])],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
                              [onnx.numpy_helper.from_array(np.array(0.5, np.float32), "s"),
                               onnx.numpy_helper.from_array(zero, "z")])
    runner = OnnxRunner(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    assert runner({"x": Tensor([0.5, 1.25]).cast("fp8e5m2")})["y"].tolist() == [0.25, 0.625]
    assert runner({"x": Tensor([0.5, 1.25])})["y"].tolist() == [0.25, 0.625]


def test_an_initializer_that_is_an_input_is_a_default():
    made = model("g (float[2] x, float[2] w) => (float[2] y) { y = Mul(x, w) }", w=np.full(2, 3, np.float32))
    runner, x = OnnxRunner(made), np.array([1, 2], np.float32)
    assert runner.inputs == ("x",)
    assert runner({"x": x})["y"].tolist() == [3, 6]
    assert runner({"x": x, "w": np.array([5, 7], np.float32)})["y"].tolist() == [5, 14]
    assert runner({"x": x})["y"].tolist() == [3, 6]
    made.ir_version = 3     # where every initializer had to be an input, and was a constant
    with pytest.raises(OnnxError, match="the model has no input 'w'"): OnnxRunner(made)({"x": x, "w": x})


@pytest.mark.parametrize("op", ["Relu", "Atan", "Softplus", "Elu", "Mish", "HardSwish", "Shrink"])
def test_infinity_and_nan(op: str):
    made = model(f"g (float[n] x) => (float[n] y) {{ y = {op}(x) }}")
    x = np.array([np.nan, np.inf, -1e-20, 1e-20], np.float32)
    with np.errstate(all="ignore"): wanted = reference.ReferenceEvaluator(made).run(None, {"x": x})[0]
    np.testing.assert_allclose(OnnxRunner(made)({"x": x})["y"].numpy(), wanted, rtol=1e-6)


def test_a_loop_of_no_iteration():
    text = """g (int64 n, float[2] x) => (float[2] y, float[k, 2] s) {
        c = Constant<value: tensor = bool {1}>()
        y, s = Loop(n, c, x) <body = b (int64 i, bool c0, float[2] v) => (bool c1, float[2] w, float[2] o) {
            c1 = Identity(c0) w = Add(v, v) o = Identity(w) }> }"""
    runner, x = OnnxRunner(model(text)), np.array([1, 2], np.float32)
    assert runner({"n": np.array(2), "x": x})["s"].tolist() == [[2, 4], [4, 8]]
    none = runner({"n": np.array(0), "x": x})
    assert none["y"].tolist() == [1, 2]
    assert none["s"].shape == (0, 2)


def test_a_box_whose_score_is_the_threshold_is_dropped():
    boxes = np.array([[[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]], np.float32)
    made = model("""g (float[1, 3, 4] b, float[1, 1, 3] s) => (int64[n, 3] y) {
        y = NonMaxSuppression(b, s, most, overlap, least) }""", most=np.array([3]),
                 overlap=np.array([0.5], np.float32), least=np.array([0.5], np.float32))
    found = OnnxRunner(made)({"b": boxes, "s": np.array([[[0.25, 0.5, 0.75]]], np.float32)})["y"]
    assert found.tolist() == [[0, 0, 2]]
