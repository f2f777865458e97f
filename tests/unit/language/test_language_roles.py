"""Roles and pipes on the CPU and in the interpreter: the sequential meaning."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv.language import *


@kernel
def matmul(a: KTile["M", "K", f32], b: KTile["K", "N", f32], *, stages: int) -> OTile["M", "N", f32]:
    T = tile.context()
    pipe, acc = tile.pipe(stages), tile.zeros((T.m, T.n), f32)
    with tile.role("producer"):
        for k in tile.range_k(a.shape, T.k):
            pipe.acquire()
            pipe.commit(a[T.m, k], b[k, T.n])
    with tile.role("consumer"):
        for _ in tile.range_k(a.shape, T.k):
            x, y = pipe.wait()
            acc = tile.dot(x, y, acc)
            pipe.release()
    return acc


@pytest.mark.parametrize("stages", [1, 3])
def test_matmul(stages: int) -> None:
    Tensor.manual_seed(0)
    a, b = Tensor.randint(70, 200, low=-4, high=5).float(), Tensor.randint(200, 90, low=-4, high=5).float()
    wanted = a.numpy() @ b.numpy()
    np.testing.assert_array_equal(matmul(a, b, stages=stages).numpy(), wanted)
    np.testing.assert_array_equal(matmul.interpret(a, b, stages=stages), wanted)


def test_what_is_read() -> None:
    """A pipe's stages are an attribute of the loop in which the consumer waits; the producer has no loop."""
    a, b = Tensor.zeros(64, 128), Tensor.zeros(128, 64)
    made = matmul.program(a, b, stages=5)
    loops = [op for op in made.body.walk() if op.name == "for"]
    assert [op.attributes["pipe"] for op in loops] == [5]
    loads = [op for op in loops[0].regions[0].ops if op.name == "load_block"]
    assert [op.attributes["tensor"] for op in loads] == ["a", "b"]
    lines = matmul.fn.__code__.co_firstlineno
    assert all(op.line.number == lines + 7 for op in loads)


@kernel(grid=(1,))
def twice(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    """A pipe that is filled again behind its consumer, around a loop of the kernel."""
    pipe = tile.pipe(2)
    total = 0.0
    for _ in tile.range(2):
        with tile.role("producer"):
            for k in tile.range(x.shape[0]):
                pipe.acquire()
                pipe.commit(x[k, :])
        with tile.role("consumer"):
            for k in tile.range(x.shape[0]):
                row = pipe.wait()
                total = total + tile.sum(row)
                out[k, :] = row * total
                pipe.release()


def test_a_pipe_that_is_filled_again() -> None:
    x = Tensor.randint(4, 8, low=-3, high=4).float().realize()
    rows, total = x.numpy(), 0.0
    for _ in range(2):
        wanted = []
        for row in rows:
            total += row.sum()
            wanted.append(row * total)
    np.testing.assert_array_equal(twice(x).numpy(), np.array(wanted))
    np.testing.assert_array_equal(twice.interpret(x), np.array(wanted))
