"""Operators of com.microsoft give what onnxruntime gives. onnx's node tests: a case that fails is in the
list, and the list has no other. (onnx takes seconds to make the cases, so no test is named after one.)"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tinygrad.helpers import Context

from bench.interop import onnx_nodes
from tinygrad_nv.onnx import OnnxRunner

RNG = np.random.default_rng(4)
B, S, H, H_KV, D = 2, 5, 4, 2, 16


def floats(*shape: int) -> np.ndarray: return RNG.standard_normal(shape, dtype=np.float32)


def checked(op: str, inputs: dict[str, np.ndarray], outputs: int = 1, domain: str = "com.microsoft",
            **attributes: Any) -> None:
    """Compares all outputs of one node; a name that begins with _ is an input that is left out."""
    given = {name: each for name, each in inputs.items() if not name.startswith("_")}
    names = [name if name in given else "" for name in inputs]
    made = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, made, domain=domain, **attributes)], "g",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
         for name, each in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, given)
    with Context(DEV="CPU"):
        for found, each in zip(OnnxRunner(model)(given).values(), wanted, strict=True):
            np.testing.assert_allclose(found.numpy(), each, rtol=1e-4, atol=1e-5)


def tables() -> tuple[np.ndarray, np.ndarray]:
    angle = np.outer(np.arange(32), 1 / 100 ** (np.arange(D // 2) / (D // 2)))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def test_norms():
    x, skip, w = floats(B, S, 64), floats(B, S, 64), floats(64)
    checked("SkipSimplifiedLayerNormalization", {"x": x, "s": skip, "w": w}, epsilon=1e-6)
    checked("SimplifiedLayerNormalization", {"x": x, "w": w}, domain="", axis=-1, epsilon=1e-6)
    checked("SkipLayerNormalization", {"x": x, "s": skip, "w": w, "b": floats(64)}, epsilon=1e-6)


@pytest.mark.parametrize(("mean", "deviation"), [(0, 300), (1000, 4)])
def test_norms_of_float16(mean: float, deviation: float):
    """The sum and its norm in float32, as onnxruntime has them on a CPU."""
    x, skip, w, b = (np.float16(floats(*shape) * by + plus) for shape, by, plus in
                     (((3, 64), deviation, mean), ((3, 64), deviation, 0), ((64,), 1, 0), ((64,), 1, 0)))
    total = x.astype(np.float64) + skip
    away = total - total.mean(-1, keepdims=True)
    for op, given, want in (
        ("SkipLayerNormalization", {"x": x, "s": skip, "w": w, "b": b},
         away / np.sqrt((away**2).mean(-1, keepdims=True) + 1e-6) * w + b),
        ("SkipSimplifiedLayerNormalization", {"x": x, "s": skip, "w": w},
         total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * w)):
        graph = helper.make_graph(
            [helper.make_node(op, [*given], ["y"], domain="com.microsoft", epsilon=1e-6)], "g",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT16, each.shape)
             for name, each in given.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)])
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        made = OnnxRunner(helper.make_model(graph, opset_imports=opsets))(given)["y"].numpy()
        np.testing.assert_allclose(made, want, rtol=2e-3, atol=6e-3)


def test_activations():
    checked("QuickGelu", {"x": floats(3, 7)}, alpha=1.702)
    checked("FastGelu", {"x": floats(3, 7), "b": floats(7)})
    checked("BiasGelu", {"x": floats(3, 7), "b": floats(7)})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [np.array([3]), RNG.integers(0, 32, (B, S))], ids=["first", "each"])
def test_rotation(interleaved: int, positions: np.ndarray):
    cos, sin = tables()
    inputs = {"x": floats(B, S, H * D), "p": positions.astype(np.int64), "c": cos, "s": sin}
    checked("RotaryEmbedding", inputs, interleaved=interleaved)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("new", [1, S])
def test_grouped_queries(rotary: int, window: int, new: int):
    """A prompt, and a step after a past."""
    past = 6 if new == 1 else 0
    cos, sin = tables()
    inputs = {"q": floats(B, new, H * D), "k": floats(B, new, H_KV * D), "v": floats(B, new, H_KV * D),
              "pk": floats(B, H_KV, past, D), "pv": floats(B, H_KV, past, D),
              "n": np.full(B, past + new - 1, np.int32), "t": np.array(past + new, np.int32)}
    if rotary: inputs |= {"c": cos, "s": sin}
    checked("GroupQueryAttention", inputs, 3, num_heads=H, kv_num_heads=H_KV, do_rotary=rotary,
            local_window_size=window)


def test_many_heads():
    q, k, v = floats(B, S, H * D), floats(B, 7, H * D), floats(B, 7, H * D)
    checked("MultiHeadAttention", {"q": q, "k": k, "v": v}, num_heads=H)
    checked("MultiHeadAttention", {"q": q, "k": k, "v": v, "b": floats(3 * H * D)}, num_heads=H)
    checked("MultiHeadAttention", {"q": q, "k": k, "v": v, "_": q, "m": np.array([7, 4], np.int32)},
            num_heads=H)
    checked("MultiHeadAttention", {"q": q, "k": k, "v": v, "_": q, "_m": q, "a": floats(B, H, S, 7)},
            num_heads=H, scale=0.3)


PARTS = 40


def differences(cases: Sequence[Any]) -> list[str]:
    """What the list of failures says wrongly of cases."""
    found = []
    for case in cases:
        with Context(DEV="CPU"): why = onnx_nodes.failure(case)
        listed = onnx_nodes.load_known("CPU").get(case.name)
        if why and listed is None: found.append(f"{case.name}: {why}")
        if listed is not None and not why:
            found.append(f"{case.name} passes, but {onnx_nodes.KNOWN.name} has it: {listed}")
    return found


def test_a_sample_of_cases():
    cases = onnx_nodes.cases()
    assert len(cases) == 1884
    assert not (found := differences(cases[::120])), "\n".join(found)
    for device in ("CPU", "EMU"):
        assert onnx_nodes.load_known(device).keys() <= {each.name for each in cases}
        assert all(len(reason) > 20 for reason in onnx_nodes.load_known(device).values())
    # what the package claims
    assert len(onnx_nodes.load_known("CPU")) <= 0.03 * len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case(part: int):
    assert not (found := differences(onnx_nodes.cases()[part::PARTS])), "\n".join(found)
