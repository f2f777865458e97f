"""Models of many nodes: long expressions become several kernels, of the same numbers."""
from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper

from tinygrad_nv import explain
from tinygrad_nv.onnx import OnnxRunner
from tinygrad_nv.onnx.ops.selection import PAIRS, non_max_suppression

X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("cpu_device")


def chain(nodes: list[onnx.NodeProto]) -> OnnxRunner:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, X.shape)], [value("y", 1, X.shape)])
    return OnnxRunner(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]))


def test_a_chain_of_functions():
    """(Of 60, which one kernel of all would take minutes to compile.)"""
    names = ["x", *(f"v{i}" for i in range(59)), "y"]
    made = chain([helper.make_node("Tanh", [a], [b]) for a, b in itertools.pairwise(names)])
    found, wanted = made({"x": X})["y"], X.astype(np.float64)
    for _ in range(60): wanted = np.tanh(wanted)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-5)
    assert 1 < len(explain(made({"x": X})["y"]).kernels) < 20


def test_a_wide_sum():
    nodes = [helper.make_node("Add", ["x", "x"], ["a"])]
    nodes += [helper.make_node("Sin" if i % 2 else "Cos", ["a"], [f"v{i}"]) for i in range(40)]
    made = chain([*nodes, helper.make_node("Sum", [f"v{i}" for i in range(40)], ["y"])])
    twice = X.astype(np.float64) * 2
    np.testing.assert_allclose(made({"x": X})["y"].numpy(), 20 * (np.sin(twice) + np.cos(twice)), rtol=1e-4,
                               atol=1e-4)


def test_non_max_suppression_of_many_boxes():
    """A grid of boxes of which each overlaps its neighbours in a row by a third."""
    n = 20_000
    x, y = np.arange(n, dtype=np.float32) % 100, np.arange(n, dtype=np.float32) // 100
    boxes = np.stack([2 * y, x, 2 * y + 1, x + 1.5], axis=1)[None]
    scores = np.random.default_rng(0).random((1, 1, n), dtype=np.float32)
    found = non_max_suppression(boxes, scores, np.array(n), np.float32(0.2)).numpy()
    kept = np.zeros(n, dtype=bool)
    for i in np.argsort(-scores[0, 0], kind="stable"):      # 0.5 / (1.5 + 1.5 - 0.5) = 0.2 is not above 0.2
        kept[i] = True
    assert len(found) == kept.sum()
    found = non_max_suppression(boxes, scores, np.array(n), np.float32(0.19)).numpy()
    kept[:] = False
    for i in np.argsort(-scores[0, 0], kind="stable"):
        kept[i] = not (x[i] > 0 and kept[i - 1]) and not (x[i] < 99 and kept[i + 1])
    assert sorted(found[:, 2]) == np.flatnonzero(kept).tolist()
    assert 10 * n * n / 2 < PAIRS
