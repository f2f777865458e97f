"""DEV=EMU: indexing, movement of elements, and random numbers."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.patterns.on_emu import emu, equal, floats, rng  # noqa: F401
from tinygrad_nv import Context, Tensor, Variable, nn

X = np.arange(6 * 10, dtype=np.float32).reshape(6, 10)
ROWS = np.array([5, 0, 3, 3, 1], np.int32)
GRID = np.array([[0, 5, 2], [4, 4, 1]], np.int64)

INDEXED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "row": (lambda t: t[4], lambda x: x[4]),
    "slice": (lambda t: t[1:5, 2:9], lambda x: x[1:5, 2:9]),
    "steps": (lambda t: t[::2, ::3], lambda x: x[::2, ::3]),
    "backwards": (lambda t: t[::-1, 8:1:-2], lambda x: x[::-1, 8:1:-2]),
    "rows": (lambda t: t[Tensor(ROWS)], lambda x: x[ROWS]),
    "columns": (lambda t: t[:, Tensor(ROWS)], lambda x: x[:, ROWS]),
    "points": (lambda t: t[Tensor(ROWS), Tensor(ROWS)], lambda x: x[ROWS, ROWS]),
    "grid of rows": (lambda t: t[Tensor(GRID)], lambda x: x[GRID]),
    "gather": (lambda t: t.gather(0, Tensor(GRID)), lambda x: np.take_along_axis(x[:, :3], GRID, 0)),
    "masked_fill": (lambda t: t.masked_fill(t > 30, -1), lambda x: np.where(x > 30, -1, x)),
    "where": (lambda t: (t % 2 == 0).where(t, -t), lambda x: np.where(x % 2 == 0, x, -x)),
    "tril": (lambda t: t.tril(1), lambda x: np.tril(x, 1)),
    "triu": (lambda t: t.triu(-1), lambda x: np.triu(x, -1)),
    "permute": (lambda t: t.reshape(2, 3, 10).permute(2, 0, 1),
                lambda x: x.reshape(2, 3, 10).transpose(2, 0, 1)),
    "flip": (lambda t: t.flip((0, 1)), lambda x: x[::-1, ::-1]),
    "pad": (lambda t: t.pad(((1, 2), (3, 0)), value=7),
            lambda x: np.pad(x, ((1, 2), (3, 0)), constant_values=7)),
    "reflected": (lambda t: t.pad((2, 1, 1, 2), mode="reflect"),
                  lambda x: np.pad(x, ((1, 2), (2, 1)), "reflect")),
    "shrink": (lambda t: t.shrink(((1, 5), (2, 4))), lambda x: x[1:5, 2:4]),
    "expand": (lambda t: t.reshape(6, 1, 10).expand(6, 4, 10), lambda x: np.repeat(x[:, None], 4, 1)),
    "cat": (lambda t: Tensor.cat(t, t * 2, t[:1], dim=0), lambda x: np.concatenate([x, x * 2, x[:1]])),
    "cat of columns": (lambda t: t.cat(-t, dim=1), lambda x: np.concatenate([x, -x], 1)),
    "stack": (lambda t: t.stack(t + 1, dim=2), lambda x: np.stack([x, x + 1], 2)),
    "repeat": (lambda t: t.repeat(2, 3), lambda x: np.tile(x, (2, 3))),
    "roll": (lambda t: t.roll(3, 1), lambda x: np.roll(x, 3, 1)),
    "chunk": (lambda t: t.chunk(3, 1)[1], lambda x: x[:, 4:8]),
    "diagonal": (lambda t: t[:, :6].diagonal(), lambda x: np.diagonal(x)),
    "meshgrid": (lambda t: t[0].meshgrid(t[:, 0])[1], lambda x: np.meshgrid(x[0], x[:, 0], indexing="ij")[1]),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=["float", "int8"])
def test_movement(name: str, dtype: type):
    ours, numpys = INDEXED[name]
    equal(ours(Tensor(X.astype(dtype))), numpys(X.astype(dtype)).astype(dtype))


def test_scatter():
    index = np.array([[0, 2, 1], [3, 0, 2]], np.int64)
    base, values = np.full((4, 3), 2, np.float32), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    wanted = torch.tensor(base).scatter(0, torch.tensor(index), torch.tensor(values))
    equal(Tensor(base).scatter(0, Tensor(index), Tensor(values)), wanted.numpy())


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_scatter_reduce_joins_what_meets(reduce: str):
    index, values = np.array([0, 2, 0, 0, 1, 2], np.int64), np.arange(6, dtype=np.float32)
    wanted = torch.ones(4).scatter_reduce(0, torch.tensor(index), torch.tensor(values), reduce)
    equal(Tensor.ones(4).scatter_reduce(0, Tensor(index), Tensor(values), reduce), wanted.numpy())


def test_assignment_into_a_slice():
    t = Tensor(X).contiguous().realize()
    t[2:4, 1:3] = Tensor(np.float32([[1, 2], [3, 4]]))
    wanted = X.copy()
    wanted[2:4, 1:3] = [[1, 2], [3, 4]]
    equal(t.realize(), wanted)


def test_assignment_at_a_variable():
    cache = Tensor.zeros(8, 4).contiguous().realize()
    wanted = np.zeros((8, 4), np.float32)
    for at in (0, 3, 7):
        position = Variable("position", 0, 7).bind(at)
        cache[position:position + 1].assign(Tensor.full((1, 4), float(at + 1))).realize()
        wanted[at] = at + 1
    equal(cache, wanted)


def test_embedding_and_one_hot():
    table = nn.Embedding(12, 5)
    tokens = rng().integers(0, 12, (2, 7))
    equal(table(Tensor(tokens)), table.weight.numpy()[tokens])
    equal(Tensor(tokens).one_hot(12), np.eye(12, dtype=np.int32)[tokens])


def test_counting():
    equal(Tensor.arange(3, 40, 4), np.arange(3, 40, 4, np.int32))
    equal(Tensor.linspace(0, 1, 9), np.linspace(0, 1, 9, dtype=np.float32))
    equal(Tensor.eye(5), np.eye(5, dtype=np.float32))
    equal(Tensor.full((3, 4), 2.5), np.full((3, 4), 2.5, np.float32))


# **** random numbers: threefry is integer arithmetic, so devices agree bit for bit until functions come ****

def drawn(device: str, draw: Callable[[], Tensor]) -> np.ndarray:
    with Context(DEV=device):
        Tensor.manual_seed(1337)
        return draw().numpy()


DRAWS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "rand": (lambda: Tensor.rand(3, 77), 0), "uniform": (lambda: Tensor.uniform(50, low=-2, high=5), 1e-6),
    "randint": (lambda: Tensor.randint(40, low=-5, high=90), 0), "randn": (lambda: Tensor.randn(200), 2e-6),
    "kaiming": (lambda: Tensor.kaiming_uniform(8, 9), 1e-6), "randperm": (lambda: Tensor.randperm(30), 0),
    "two": (lambda: Tensor.rand(20) + Tensor.rand(20), 0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_those_of_the_cpu(name: str):
    draw, error = DRAWS[name]
    first, again, cpu = drawn("EMU", draw), drawn("EMU", draw), drawn("CPU", draw)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first, cpu, rtol=error, atol=error)
    assert len(np.unique(first)) > 10


def test_dropout_drops_the_same_elements():
    def dropped() -> Tensor:
        with Context(TRAINING=1): return Tensor.ones(1000).dropout(0.25)
    first, cpu = drawn("EMU", dropped), drawn("CPU", dropped)
    np.testing.assert_array_equal(first, cpu)
    assert 200 < (first == 0).sum() < 300
    np.testing.assert_allclose(first[first != 0], 1 / 0.75, rtol=1e-6)


def test_multinomial_follows_its_weights():
    Tensor.manual_seed(2)
    found = Tensor(np.float32([0, 1, 3])).multinomial(400, replacement=True).numpy()
    assert (found == 0).sum() == 0
    assert 60 < (found == 1).sum() < 140
