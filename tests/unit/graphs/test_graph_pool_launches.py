"""Launches whose buffers lie elsewhere in each run, what their first call shows; and what a graph pool
shows: its statistics as a table, a bar while it captures."""
from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import rich.console
import torch
from tinygrad.helpers import Context

from tinygrad_nv import dtypes
from tinygrad_nv.graphs import BucketStats, GraphPool, GraphPoolStats, Input, launches
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


def bucket(size: int, rows: int, padding: int, *reasons: str) -> BucketStats:
    return BucketStats(size, 5, 1, 2, 0.25, rows, padding, 7, 1, len(reasons), reasons, 3 << 20, 1 << 10,
                       4096)


def test_statistics_are_an_aligned_table():
    stats = GraphPoolStats("CUDA", (bucket(1, 4, 0), bucket(64, 120, 40, "because")), 3 << 20, 512, 1 << 10,
                           1024,
                      1 << 30)
    lines = str(stats).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["size", "1", "64"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[2].split() == ["64", "5", "1", "2", "0.25", "120", "25%", "7", "1", "1", "3.00", "MiB",
                                "1.00", "KiB", "4.00", "KiB"]
    assert lines[3] == ("CUDA: 3.01 MiB of 1.00 GiB in graphs (8.00 KiB), arena (3.00 MiB) and outputs "
                        "(1.00 KiB); inputs 512 B, page-locked 1.00 KiB")
    assert lines[4:] == ["size 64 without a whole graph: because"]
    assert stats.padding_waste == 40 / 164
    assert stats.hits == 10


def test_a_pool_that_never_ran_has_no_waste():
    assert GraphPoolStats("EMU", (bucket(1, 0, 0),), 0, 0, 0, 0, None).padding_waste == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_progress_bar_only_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]):
    shown = io.StringIO()
    made = partial(rich.console.Console, file=shown, force_terminal=terminal, width=120)
    monkeypatch.setattr(rich.console, "Console", lambda stderr: made())
    pool = GraphPool(lambda x: x + 1, {"x": Input((4,), dtypes.int32)}, (1, 2), "CPU")
    pool.capture()
    assert [stats.builds for stats in pool.stats().buckets] == [1, 1]
    text = shown.getvalue()
    assert ("graphs: size 2" in text, "graphs: size 1" in text, "held" in text) == (terminal,) * 3
    assert capsys.readouterr() == ("", "")
