"""Quantised models as onnxruntime's tools write them: the values of onnxruntime, by kernels for quantised
matrices."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from tinygrad.helpers import Context

from tinygrad_nv import explain
from tinygrad_nv.onnx import OnnxRunner

RNG = np.random.default_rng(8)
K, N = 128, 96


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with Context(DEV="CPU"): yield


class _Samples(quantization.CalibrationDataReader):
    def __init__(self) -> None: self.left = [{"x": rows()} for _ in range(4)]

    def get_next(self) -> dict[str, np.ndarray] | None: return self.left.pop() if self.left else None


def rows() -> np.ndarray: return RNG.standard_normal((5, K), dtype=np.float32)


def floats(path: Path) -> Path:
    """x W + b → Relu → V, of random weights."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 128] x) => (float[n, 128] y) {
        a = MatMul(x, w)  s = Add(a, b)  r = Relu(s)  y = Gemm<transB = 1>(r, v, c) }"""
    made = onnx.parser.parse_model(text)
    weights = {"w": (K, N), "b": (N,), "v": (K, N), "c": (K,)}
    made.graph.initializer.extend(
        numpy_helper.from_array((RNG.standard_normal(shape) / 8).astype(np.float32), name)
        for name, shape in weights.items())
    onnx.save(made, path)
    return path


def checked(path: Path, matmuls: int, atol: float) -> list[str | None]:
    """Compares with onnxruntime, and counts kernels for quantised matrices."""
    x = rows()
    options = onnxruntime.SessionOptions()
    # its own rewrites of QDQ round otherwise
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"x": x})
    made = OnnxRunner(path)({"x": x})["y"]
    templates = [each.template for each in explain(made).kernels]
    np.testing.assert_allclose(made.numpy(), wanted[0], atol=atol)
    assert sum(each is not None and ("quant" in each or "codes" in each) for each in templates) == matmuls
    return templates


@pytest.mark.sampled(1)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_qdq(per_channel: bool, kind: str, tmp_path: Path):
    quantization.quantize_static(floats(tmp_path / "m.onnx"), tmp_path / "q.onnx", _Samples(),
                                 quant_format=quantization.QuantFormat.QDQ, per_channel=per_channel,
                                 activation_type=quantization.QuantType.QUInt8,
                                 weight_type=quantization.QuantType[kind])
    ops = [each.op_type for each in onnx.load(tmp_path / "q.onnx").graph.node]
    assert "DequantizeLinear" in ops
    # a step of activations: where a sum lies between two of them, either is right
    checked(tmp_path / "q.onnx", 2, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["QInt8", "QUInt8"])
def test_dynamic_quantisation(kind: str, tmp_path: Path):
    """DynamicQuantizeLinear and MatMulInteger."""
    quantization.quantize_dynamic(floats(tmp_path / "m.onnx"), tmp_path / "q.onnx",
                                  weight_type=quantization.QuantType[kind], op_types_to_quantize=["MatMul"])
    ops = [each.op_type for each in onnx.load(tmp_path / "q.onnx").graph.node]
    assert "MatMulInteger" in ops
    checked(tmp_path / "q.onnx", 2, 0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [96, 1500])
@pytest.mark.parametrize(("a", "b"), [("uint8", "int8"), ("int8", "uint8"), ("uint8", "uint8")])
def test_integers_are_exact(k: int, a: str, b: str):
    """At the ends of their range, and beyond what float32 adds up exactly."""
    low, high = {"int8": (-128, 128), "uint8": (0, 256)}[a]
    x = RNG.choice(np.array([low, high - 1, high - 2]), (3, k)).astype(a)
    w = RNG.choice(np.array([-128, 127, 126]), (k, 5)) + (128 if b == "uint8" else 0)
    constants = {"w": w.astype(b), "z": np.array(low + 3, dtype=a), "v": np.array(9, dtype=b)}
    made = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]> g ({a}[3, {k}] x) =>
        (int32[3, 5] y) {{ y = MatMulInteger(x, w, z, v) }}""")
    made.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in constants.items())
    found = OnnxRunner(made)({"x": x})["y"]
    wanted = (x.astype(np.int64) - low - 3) @ (w.astype(np.int64) - int(constants["v"]))
    assert any("codes" in str(each.template) for each in explain(found).kernels)
    np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "zero"), [("INT4", True), ("UINT4", True), ("INT4", False),
                                            ("UINT8", True)])
def test_blocks_of_weights(kind: str, zero: bool, tmp_path: Path):
    number, block = TensorProto.DataType.Value(kind), 32
    low, high = (-8, 8) if kind == "INT4" else (0, 16) if kind == "UINT4" else (0, 256)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    arrays = {"w": RNG.integers(low, high, (K, N)).astype(dtype),
              "s": (RNG.random((K // block, N)) / 50 + 0.01).astype(np.float32)}
    if zero: arrays["z"] = RNG.integers(low, high, (K // block, N)).astype(dtype)
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[n, {K}] x) => (float[n, {N}] y) {{
        f = DequantizeLinear<axis = 0, block_size = {block}>(w, s{", z" if zero else ""})
        y = MatMul(x, f) }}"""
    made = onnx.parser.parse_model(text)
    made.graph.initializer.extend(numpy_helper.from_array(each, name) for name, each in arrays.items())
    onnx.save(made, tmp_path / "m.onnx")
    checked(tmp_path / "m.onnx", 1, 1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("bits", "zeros"), [(4, False), (4, True), (8, False)])
def test_matmul_n_bits(bits: int, zeros: bool, tmp_path: Path):
    block, blocks = 32, K // 32
    inputs = {"w": RNG.integers(0, 256, (N, blocks, block * bits // 8)).astype(np.uint8),
              "s": (RNG.random(N * blocks) / 50 + 0.01).astype(np.float32)}
    if zeros: inputs["z"] = RNG.integers(0, 256, N * blocks * bits // 8).astype(np.uint8)
    attributes: dict[str, Any] = {"K": K, "N": N, "bits": bits, "block_size": block}
    node = helper.make_node("MatMulNBits", ["x", *inputs], ["y"], domain="com.microsoft", **attributes)
    made = helper.make_model(helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", N])],
        [numpy_helper.from_array(each, name) for name, each in inputs.items()]),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    onnx.save(made, tmp_path / "m.onnx")
    checked(tmp_path / "m.onnx", 1, 1e-3)


@pytest.mark.parametrize(("bits", "zero"), [(4, np.uint8), (8, None), (4, np.float32), (2, np.uint8)])
def test_weights_that_are_inputs(bits: int, zero: type[np.generic] | None):
    """Each call multiplies by its own matrix."""
    blocks, size = K // 32, 32 * bits // 8
    shapes: dict[str, list[Any]] = {"x": ["n", K], "w": [N, blocks, size], "s": [N, blocks]}
    kinds = {"x": TensorProto.FLOAT, "w": TensorProto.UINT8, "s": TensorProto.FLOAT}
    if zero is not None:
        shapes["z"] = [N, blocks if zero is np.float32 else -(-blocks * bits // 8)]
        kinds["z"] = helper.np_dtype_to_tensor_dtype(np.dtype(zero))
    attributes: dict[str, Any] = {"K": K, "N": N, "bits": bits, "block_size": 32}
    made = helper.make_model(helper.make_graph(
        [helper.make_node("MatMulNBits", list(shapes), ["y"], domain="com.microsoft", **attributes)], "g",
        [helper.make_tensor_value_info(name, kinds[name], shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", N])]),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    runner = OnnxRunner(made)
    for _ in range(2):
        inputs = {"x": rows(), "w": RNG.integers(0, 256, shapes["w"]).astype(np.uint8),
                  "s": RNG.random(shapes["s"], dtype=np.float32)}
        if zero is not None: inputs["z"] = RNG.integers(0, 4, shapes["z"]).astype(zero)
        np.testing.assert_allclose(runner(inputs)["y"].numpy(), session.run(None, inputs)[0], atol=2e-3)
