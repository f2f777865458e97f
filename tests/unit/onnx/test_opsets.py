"""Ops that older opsets define otherwise, and those that tinygrad computes otherwise, against onnxruntime."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tinygrad_nv.onnx import OnnxRunner

RNG = np.random.default_rng(0)
MICROSOFT = "com.microsoft"
pytestmark = pytest.mark.usefixtures("cpu_device")


def floats(*shape: int) -> np.ndarray: return RNG.standard_normal(shape).astype(np.float32)


X = floats(2, 3, 4, 5)
IMAGE = floats(1, 2, 7, 8)
WIDE = np.array([[89, 90, 100, -3], [-np.inf] * 4, [1, np.inf, 2, 3], [np.nan, 1, 2, 3]], np.float32)
GRID = (RNG.random((1, 3, 4, 2)) * 2.6 - 1.3).astype(np.float32)
PLACES = np.array([[[[0, 3], [9, 10]], [[16, 18], [26, 31]]], [[[32, 35], [40, 46]], [[48, 50], [56, 63]]]])
SMALL = np.array([[0, 255, 3, 0], [7, 7, 1, 255]], np.uint8)
Case = tuple[str, int, Sequence[Any], int, dict[str, Any]]


def i64(*values: int) -> np.ndarray: return np.array(values, np.int64)


CASES: list[Case] = [
    # softmaxes over all dimensions from the axis on, before opset 13
    ("Softmax", 11, [X], 1, {}), ("Softmax", 1, [X], 1, {"axis": 2}), ("Softmax", 13, [X], 1, {"axis": 1}),
    ("LogSoftmax", 12, [X], 1, {"axis": 0}), ("LogSoftmax", 11, [X], 1, {"axis": -2}),
    ("Hardmax", 11, [X], 1, {}), ("Hardmax", 13, [X], 1, {}),
    # reductions
    ("ReduceLogSumExp", 13, [WIDE], 1, {"axes": [1], "keepdims": 0}),
    ("ReduceLogSumExp", 18, [WIDE, i64(-1)], 1, {}), ("ReduceLogSumExp", 1, [X], 1, {}),
    ("ReduceMean", 18, [i64(1, 2, 4, 8), i64(0)], 1, {}), ("ReduceMean", 13, [-i64(1, 2, 4, 8)], 1, {}),
    ("ArgMin", 13, [SMALL], 1, {"axis": 1}), ("ArgMin", 13, [SMALL], 1, {"axis": 1, "select_last_index": 1}),
    ("TopK", 1, [floats(3, 8)], 2, {"k": 3}), ("TopK", 9, [floats(3, 8)], 2, {"k": 2, "axis": 0}),
    ("TopK", 10, [floats(3, 8), i64(4)], 2, {}), ("GatherElements", 11, [X[0, 0], np.array([[0, -1], [2,
     1]])], 1, {}),
    # norms
    ("GroupNormalization", 18, [floats(2, 6, 3), floats(3), floats(3)], 1, {"num_groups": 3}),
    ("GroupNormalization", 21, [floats(2, 6, 3), floats(6), floats(6)], 1, {"num_groups": 3}),
    ("LayerNormalization", 17, [X, floats(4, 5)], 3, {"axis": 2}),
    ("BatchNormalization", 7, [X, *(np.abs(floats(3, 4, 5)) for _ in range(4))], 1, {"spatial": 0}),
    ("BatchNormalization", 14, [X, *(np.abs(floats(3)) for _ in range(4))], 3, {"training_mode": 1,
     "momentum": .7}),
    # windows
    ("MaxPool", 12, [X], 2, {"kernel_shape": [2, 2]}),
    ("MaxPool", 8, [X], 2, {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "storage_order": 1}),
    ("MaxPool", 11, [floats(2, 2, 4, 5, 3)], 2, {"kernel_shape": [2, 2, 2], "strides": [1, 2, 1],
     "storage_order": 1}),
    ("MaxPool", 10, [X], 2, {"kernel_shape": [2, 2], "dilations": [2, 2], "ceil_mode": 1, "strides": [2, 2]}),
    ("MaxUnpool", 11, [floats(2, 2, 2, 2), PLACES], 1, {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("LpPool", 18, [IMAGE], 1, {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1],
     "ceil_mode": 1}),
    ("GlobalLpPool", 2, [X], 1, {"p": 3}),
    ("ConvTranspose", 11, [IMAGE, floats(2, 3, 3, 3)], 1, {"strides": [2, 2], "auto_pad": "VALID"}),
    ("GridSample", 16, [IMAGE, GRID], 1, {"mode": "bicubic", "padding_mode": "border"}),
    # extents
    ("Resize", 10, [X, np.array([1, 1, .6, 2.6], np.float32)], 1, {"mode": "nearest"}),
    ("Resize", 10, [X, np.array([1, 1, 1.5, .5], np.float32)], 1, {"mode": "linear"}),
    ("Resize", 13, [IMAGE, None, np.array([1, 1, 1.7, .6], np.float32)], 1,
     {"nearest_mode": "round_prefer_ceil"}),
    ("Upsample", 7, [X], 1, {"scales": [1., 1., 2.6, 2.], "mode": "linear"}),
    ("Upsample", 9, [X, np.array([1, 1, 2.6, 2], np.float32)], 1, {}),
    ("Slice", 13, [X, i64(1), i64(2)], 1, {}), ("Slice", 9, [X], 1, {"starts": [0, 1], "ends": [1, 2]}),
    ("Slice", 13, [np.arange(20), i64(-1), i64(-21), i64(0), i64(-3)], 1, {}),
    ("Split", 18, [floats(7, 2)], 3, {"num_outputs": 3}), ("Split", 18, [floats(10, 2)], 4,
     {"num_outputs": 4}),
    ("Pad", 19, [floats(5), i64(7, 9)], 1, {"mode": "wrap"}), ("Pad", 2, [X[0, 0]], 1, {"pads": [1, 0, -1,
     2], "value": 2.}),
    # powers of integers
    ("Pow", 13, [np.array([2, 3, 7], np.int32), np.array([30, 19, 11], np.int32)], 1, {}),
    ("Pow", 13, [np.array([3, 10, -2], np.int32), np.array([.5, 2, 3], np.float32)], 1, {})]


def model(op: str, opset: int, inputs: Sequence[Any], outputs: int, attributes: dict[str, Any],
          domain: str = "") -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one node; its inputs after the first are constants. And what it is called with."""
    names = ["" if each is None else f"i{k}" for k, each in enumerate(inputs)]
    node = helper.make_node(op, names, [f"o{k}" for k in range(outputs)], domain=domain, **attributes)
    x = inputs[0]
    first = helper.make_tensor_value_info("i0", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    constants = [onnx.numpy_helper.from_array(each, name)
                 for name, each in zip(names[1:], inputs[1:], strict=True) if each is not None]
    graph = helper.make_graph([node], "g", [first], [helper.make_empty_tensor_value_info(each)
                                                     for each in node.output], constants)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), {"i0": x}


def compared(made: onnx.ModelProto, given: dict[str, np.ndarray], tolerance: float) -> None:
    """The outputs beside those of onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    found = OnnxRunner(made, captures=0)(given)
    for each, wanted in zip(found.values(), session.run(None, given), strict=True):
        array = each.numpy() if hasattr(each, "numpy") else each
        assert array.dtype == wanted.dtype
        np.testing.assert_allclose(array, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda each: f"{each[0]}-{each[1]}")
def test_an_op_of_an_opset(case: Case):
    op, opset, inputs, outputs, attributes = case
    # sums of at most 60 terms of about 1, whose order differs
    compared(*model(op, opset, inputs, outputs, attributes), tolerance=60 * 2 ** -23)


@pytest.mark.parametrize(("k", "n", "size", "bits"), [(33, 8, 16, 4), (95, 24, 64, 4), (127, 9, 16, 8)])
def test_matmul_n_bits_of_odd_rows(k: int, n: int, size: int, bits: int):
    blocks = -(-k // size)
    data = RNG.integers(0, 256, (n, blocks, size * bits // 8)).astype(np.uint8)
    scales = np.abs(floats(n * blocks))
    points = RNG.integers(0, 256, n * -(-blocks * bits // 8)).astype(np.uint8)
    for zeros in ([], [points]):
        made = model("MatMulNBits", 14, [floats(3, k), data, scales / 10, *zeros], 1,
                     {"K": k, "N": n, "bits": bits, "block_size": size}, MICROSOFT)
        compared(*made, tolerance=k * 256 * 2 ** -23)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("columns", [1, 32])
def test_dynamic_quantize_lstm(dtype: type, columns: int):
    low = 0 if dtype == np.uint8 else -100
    w, r = (RNG.integers(low, low + 200, (1, n, 32)).astype(dtype) for n in (6, 8))
    scale = (RNG.random((1, columns) if columns > 1 else 1) * .01 + .005).astype(np.float32)
    zero = np.full(scale.shape, low + 100, dtype)
    inputs = [floats(5, 2, 6), w, r, floats(1, 64), None, floats(1, 2, 8), floats(1, 2, 8), None,
              scale, zero, scale, zero]
    # one step of x, of a range of 6, times a weight of 1.5, times the slope of a sigmoid
    made = model("DynamicQuantizeLSTM", 14, inputs, 3, {"hidden_size": 8}, MICROSOFT)
    compared(*made, tolerance=6 / 255 * 1.5 / 4 * 2)


def test_types_of_rms_normalization():
    """That of the scale; the statistics in the type that stash_type names."""
    x, scale = floats(2, 8) * 300, floats(8)
    for dtype, stash in ((np.float16, TensorProto.FLOAT), (np.float64, TensorProto.DOUBLE)):
        given = x.astype(dtype)
        made, inputs = model("RMSNormalization", 23, [given, scale.astype(dtype)], 1, {"stash_type": stash})
        found = OnnxRunner(made, captures=0)(inputs)["o0"].numpy()
        wide = given.astype(np.float64)
        wanted = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5) * scale
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, rtol=4 * max(np.finfo(dtype).eps, 2 ** -52), atol=1e-7)


def test_broadcasting_before_opset_7():
    for op, function in (("Add", np.add), ("Sub", np.subtract), ("Div", np.divide), ("Less", np.less)):
        y = floats(3, 4)
        made, given = model(op, 6, [X, y], 1, {"broadcast": 1, "axis": 1})
        found = OnnxRunner(made, captures=0)(given)["o0"].numpy()
        np.testing.assert_allclose(found, function(X, y[..., None]), rtol=1e-6)


def test_pads_that_are_computed():
    """As exporters write torch's pad: a chain over arrays of two dimensions, none of it on the device."""
    made = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 16]>
        g (float[1, 6] x) => (float[a, b] y) {
        given = Constant<value_ints = [2, 1]>() n = Constant<value_ints = [2]>()
        zeros = ConstantOfShape<value = int64[1] {0}>(n) all = Concat<axis = 0>(given, zeros)
        pair = Constant<value_ints = [-1, 2]>() rows = Reshape(all, pair)
        m = Constant<value_ints = [-1]>() end = Constant<value_ints = [-9223372036854775807]>()
        first = Constant<value_ints = [0]>() back = Slice(rows, m, end, first, m)
        turned = Transpose<perm = [1, 0]>(back) flat = Reshape(turned, m) pads = Cast<to = 7>(flat)
        y = Pad<mode = "reflect">(x, pads) }""")
    runner, x = OnnxRunner(made), floats(1, 6)
    assert runner({"x": x})["y"].tolist() == np.pad(x, ((0, 0), (2, 1)), mode="reflect").tolist()
    assert len(runner._captured) == 1
