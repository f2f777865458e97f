"""Quantised models as onnxruntime's tools write them: the values of onnxruntime, by kernels for quantised
matrices."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import quantization

from tinygrad_nv import Tensor, explain
from tinygrad_nv.onnx import OnnxRunner

RNG = np.random.default_rng(8)
K, N = 128, 96
pytestmark = pytest.mark.usefixtures("cpu_device")


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


FORMS = {   # name: (weights w of constants q, s, z; dtype of q; shapes of q, s, z; whether kernels take it)
    "number": ("f = Cast<to = 1>(q)  w = Mul(f, s)", "int8", ((64, 64), (), ()), True),
    "columns": ("f = Cast<to = 1>(q)  w = Mul(s, f)", "int8", ((64, 64), (1, 64), ()), True),
    "vector": ("f = Cast<to = 1>(q)  w = Mul(f, s)", "uint8", ((64, 64), (64,), ()), True),
    "transposed": ("f = Cast<to = 1>(q)  v = Mul(f, s)  w = Transpose<perm = [1, 0]>(v)", "int8",
                   ((64, 64), (64, 1), ()), True),
    "zero point": ("f = Cast<to = 1>(q)  d = Sub(f, z)  w = Mul(d, s)", "uint8",
                   ((64, 64), (1, 64), (1, 64)), True),
    "whole zero point": ("i = Cast<to = 6>(q)  k = Cast<to = 6>(y)  d = Sub(i, k)  f = Cast<to = 1>(d)"
                         "  w = Mul(f, s)", "int8", ((64, 64), (), ()), True),
    "may wrap around": ("d = Sub(q, y)  f = Cast<to = 1>(d)  w = Mul(f, s)", "int8",
                        ((64, 64), (), ()), False),
    "rows": ("f = Cast<to = 1>(q)  w = Mul(f, s)", "int8", ((64, 64), (64, 1), ()), False),
    "QDQ of one": ("w = DequantizeLinear<axis = 1>(q, s, y)", "uint8", ((64, 64), (64,), (64,)), True),
    "QDQ transposed": ("v = DequantizeLinear<axis = 0>(q, s)  w = Transpose<perm = [1, 0]>(v)", "int8",
                       ((64, 64), (64,), ()), True),
    "half a zero": ("f = Cast<to = 1>(q)  d = Sub(f, z)  w = Mul(d, s)", "half", ((64, 64), (), ()), False)}


def test_weights_that_are_cast_and_scaled_are_quantised_matrices():
    """All forms in one model, each with a bias, and what only looks like one."""
    lines, constants = [], list[onnx.TensorProto]()
    for i, (text, kind, shapes, _) in enumerate(FORMS.values()):
        dtype = np.uint8 if kind == "uint8" else np.int8
        q, half = RNG.integers(-50 * (dtype == np.int8), 120, shapes[0]), 0.5 if kind == "half" else 0
        given = {"q": q.astype(dtype), "b": RNG.standard_normal(64, np.float32),
                 "s": np.asarray(RNG.uniform(0.001, 0.003, shapes[1]), np.float32),
                 "z": np.asarray(RNG.integers(50, 70, shapes[2]) + half, np.float32)}
        given["y"] = np.asarray(given["z"], dtype)
        constants += [numpy_helper.from_array(np.asarray(x), f"{name}{i}") for name, x in given.items()]
        text = re.sub(r"\b([qszywfdvik])\b", rf"\g<1>{i}", text)
        lines.append(f"{text}  m{i} = MatMul(x, w{i})  y{i}y = Add(b{i}, m{i})")
    outputs, graph = [f"y{i}y" for i in range(len(FORMS))], "\n".join(lines)
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[n, 64] x) => '
        f'({", ".join(f"float[n, 64] {each}" for each in outputs)}) {{ {graph} }}')
    model.graph.initializer.extend(constants)
    x = RNG.standard_normal((5, 64), np.float32)
    wanted = ReferenceEvaluator(model).run(None, {"x": x})
    made = OnnxRunner(model)({"x": x})
    for name, each, (*_, taken) in zip(FORMS, made.values(), FORMS.values(), strict=True):
        templates = [kernel.template or "" for kernel in explain(each).kernels]
        assert taken == any("quant" in template for template in templates), name
    Tensor.realize(*made.values())
    for name, each, exact in zip(FORMS, made.values(), wanted, strict=True):
        np.testing.assert_allclose(each.numpy(), exact, atol=2e-5, err_msg=name)
