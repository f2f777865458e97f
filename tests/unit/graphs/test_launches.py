"""Launches whose buffers lie elsewhere in each run: what their first call shows."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tinygrad.helpers import Context

from tinygrad_nv.graphs import launches
from tinygrad_nv.onnx import OnnxRunner

GIVEN = np.arange(6, dtype=np.float32).reshape(2, 3)


def of_onnx() -> Callable[[], Any]:
    x, y = (onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, [2, 3]) for each in "xy")
    nodes = [onnx.helper.make_node("Softmax", ["x"], ["m"]),
             onnx.helper.make_node("CumSum", ["m", "i"], ["y"])]
    axis = onnx.numpy_helper.from_array(np.array(1), "i")
    runner = OnnxRunner(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [y], [axis]),
                                               opset_imports=[onnx.helper.make_opsetid("", 17)]))
    return lambda: runner({"x": GIVEN})


def of_torch() -> Callable[[], Any]:
    compiled = torch.compile(lambda x: x.softmax(1).cumsum(1), backend="tinygrad_nv")
    return lambda: compiled(torch.from_numpy(GIVEN))


@pytest.mark.parametrize("made", [of_onnx, of_torch])
def test_progress_of_a_first_call(made: Callable[[], Callable[[], Any]], monkeypatch: pytest.MonkeyPatch):
    shown: list[Any] = []

    @contextmanager
    def bar(words: str) -> Iterator[Any]:
        shown.append(words)
        yield lambda done, count: shown.append((done, count))
    monkeypatch.setattr(launches, "bar", bar)
    monkeypatch.setattr(launches, "CHUNK", 1)
    with Context(DEV="CPU"):
        call = made()
        for _ in range(2): call()
    number = len(shown) - 1     # the second call compiles nothing
    assert number > 1
    assert shown == ["compiling kernels", *((i, number) for i in range(number))]
