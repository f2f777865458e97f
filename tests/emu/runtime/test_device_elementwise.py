"""DEV=EMU, element by element: functions, integers, comparisons, selection and casts, against numpy;
indexing, movement of elements, and random numbers. Bounds are |error| / (1 + |value|) against float64."""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.patterns.on_emu import emu, equal, floats, near, rng  # noqa: F401
from tinygrad_nv import Context, Tensor, Variable, dtypes, nn
from tinygrad_nv.runtime.ptx_renderer import bf16_constant

SHAPE = (7, 33)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray], float]] = {
    "exp": (Tensor.exp, np.exp, 1e-6), "exp2": (Tensor.exp2, np.exp2, 1e-6),
    "log": (lambda x: x.abs().log(), lambda x: np.log(np.abs(x)), 1e-6),
    "log2": (lambda x: x.abs().log2(), lambda x: np.log2(np.abs(x)), 1e-6),
    "sin": (Tensor.sin, np.sin, 2e-6), "cos": (Tensor.cos, np.cos, 2e-6), "tan": (Tensor.tan, np.tan, 1e-4),
    "sqrt": (lambda x: x.abs().sqrt(), lambda x: np.sqrt(np.abs(x)), 1e-6),
    "rsqrt": (lambda x: x.abs().rsqrt(), lambda x: 1 / np.sqrt(np.abs(x)), 1e-6),
    "reciprocal": (Tensor.reciprocal, lambda x: 1 / x, 1e-6), "tanh": (Tensor.tanh, np.tanh, 1e-6),
    "sigmoid": (Tensor.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 1e-6),
    "silu": (Tensor.silu, lambda x: x / (1 + np.exp(-x)), 1e-6),
    "gelu": (Tensor.gelu, lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
             1e-6),
    "softplus": (Tensor.softplus, lambda x: np.log1p(np.exp(x)), 1e-6),
    "erf": (Tensor.erf, lambda x: torch.erf(torch.tensor(x)).numpy(), 1e-6),
    "pow": (lambda x: x.abs() ** 2.5, lambda x: np.abs(x) ** 2.5, 1e-5),
}
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "neg": (Tensor.neg, np.negative), "abs": (Tensor.abs, np.abs),
    "relu": (Tensor.relu, lambda x: np.maximum(x, 0)),
    "floor": (Tensor.floor, np.floor), "ceil": (Tensor.ceil, np.ceil), "trunc": (Tensor.trunc, np.trunc),
    "round": (Tensor.round, np.round), "sign": (Tensor.sign, np.sign), "square": (Tensor.square, np.square),
    "clip": (lambda x: x.clip(-0.5, 0.5), lambda x: x.clip(-0.5, 0.5)),
    "isnan": (Tensor.isnan, np.isnan), "isinf": (Tensor.isinf, np.isinf),
}
INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str):
    ours, numpys, error = FUNCTIONS[name]
    x = floats(*SHAPE) * 2
    near(ours(Tensor(x)), numpys(x.astype(np.float64)), error)


@pytest.mark.parametrize("name", EXACT)
def test_exact_functions(name: str):
    ours, numpys = EXACT[name]
    x = np.concatenate([floats(61) * 3, np.float32([0, -0.0, 0.5, 1.5, -2.5, np.inf, -np.inf])])
    equal(ours(Tensor(x)), numpys(x))


def test_nan_goes_through():
    x = np.float32([np.nan, 1, np.inf, -np.inf])
    equal(Tensor(x) * 2 + 1, x * 2 + 1)
    equal(Tensor(x).isnan(), np.isnan(x))
    equal(Tensor(x) != Tensor(x), x != x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32], ids=lambda d: d.__name__)
def test_two_operands_and_comparisons(dtype: type):
    a, b = (rng().integers(-4, 5, (2, *SHAPE)) / (2 if dtype is not np.int32 else 1)).astype(dtype)
    x, y = Tensor(a), Tensor(b)
    for found, wanted in ((x + y, a + b), (x - y, a - b), (x * y, a * b), (x.maximum(y), np.maximum(a, b)),
                          (x.minimum(y), np.minimum(a, b)), (x < y, a < b), (x <= y, a <= b),
                          (x == y, a == b), (x != y, a != b), (x > y, a > b), (x >= y, a >= b),
                          ((x < y).where(x, y * 2), np.where(a < b, a, b * 2)),
                          ((x < y) & (x > 0) | ~(y == x), (a < b) & (a > 0) | ~(b == a)),
                          ((x < y) ^ (x > 0), (a < b) ^ (a > 0))):
        equal(found, wanted)


def test_division():
    a, b = floats(2, 64)
    near(Tensor(a) / Tensor(b), a.astype(np.float64) / b, 1e-6)


@pytest.mark.parametrize("name", ["exp", "log2", "sin", "sqrt", "reciprocal", "tanh"])
def test_double_keeps_its_digits(name: str):
    ours, numpys, _ = FUNCTIONS[name]
    x = np.abs(floats(*SHAPE).astype(np.float64)) + 0.1
    found, wanted = ours(Tensor(x)).numpy(), numpys(x)
    assert found.dtype == np.float64
    assert np.abs(found / wanted - 1).max() < 1e-14


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.__name__)
def test_integers_wrap_as_numpys(dtype: type):
    info = np.iinfo(dtype)
    a, b = rng().integers(info.min, info.max, (2, 200), dtype, endpoint=True)
    divisor = np.where(b == 0, dtype(1), b)
    x, y, d = Tensor(a), Tensor(b), Tensor(divisor)
    three, two = dtype(3), dtype(2)
    with np.errstate(all="ignore"):
        # compared and widened, too: a register may hold more bits than the type
        for found, wanted in ((x + y, a + b), (x * y, a * b), (-x, -a), ((x + y) < y, (a + b) < b),
                              ((x - y) < y, (a - b) < b), ((x * y) > y, (a * b) > b),
                              ((x + y).cast(dtypes.int64), (a + b).astype(np.int64)),
                              ((x * y + x).float(), (a * b + a).astype(np.float32)),
                              ((x << 3) > y, (a << three) > b), (x >> 2, a >> two), (x // d, a // divisor),
                              (x % d, a % divisor), (x ^ y, a ^ b), (x & y, a & b), (x | y, a | b), (~x, ~a),
                              (x.maximum(y), np.maximum(a, b))):
            equal(found, wanted)


ALL = (dtypes.bool, dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16, dtypes.int32, dtypes.uint32,
       dtypes.int64, dtypes.uint64, dtypes.half, dtypes.bfloat16, dtypes.float, dtypes.double)


def torch_of(dtype) -> torch.dtype:
    names = {dtypes.half: "float16", dtypes.bfloat16: "bfloat16", dtypes.float: "float32",
             dtypes.double: "float64", dtypes.bool: "bool"}
    signed = "uint" if dtypes.is_unsigned(dtype) else "int"
    return getattr(torch, names.get(dtype) or f"{signed}{8 * dtype.itemsize}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("source", ALL, ids=lambda d: torch_of(d).__str__().removeprefix("torch."))
def test_casts_from(source):
    # what every type can hold, so that no cast is undefined; halves and bf16 round it
    values = torch.tensor([0, 1, 2, 3, 5, 17, 100, 127] + [0.5, 1.75, 99.9] * dtypes.is_float(source))
    given = values.to(torch_of(source))
    x = Tensor(values.numpy()).cast(source).contiguous().realize()
    for target in ALL:
        found = x.cast(target).contiguous().cast(dtypes.double).numpy()
        np.testing.assert_array_equal(found, given.to(torch_of(target)).double().numpy(), f"to {target}")


@pytest.mark.parametrize("target", [dtypes.half, dtypes.bfloat16], ids=["half", "bfloat16"])
def test_rounding_to_sixteen_bits(target):
    bits = rng().integers(0, 1 << 32, 4000, np.uint32, endpoint=False)
    edges = np.float32([0, -0.0, np.inf, -np.inf, 65519, 65520, 1e-8, 6e-8])
    values = np.concatenate([bits.view(np.float32), edges])
    values = values[~np.isnan(values)]
    found = Tensor(values).cast(target).contiguous().float().numpy()
    np.testing.assert_array_equal(found, torch.tensor(values).to(torch_of(target)).float().numpy())


def test_constants_of_sixteen_bits():
    x = torch.arange(-8, 8).reshape(1, 1, 4, 4).bfloat16()
    t = Tensor(x.float().numpy()).cast(dtypes.bfloat16).contiguous().realize()
    # pads with minus infinity
    equal(t.max_pool2d(2, padding=1).float(), torch.max_pool2d(x.float(), 2, padding=1).numpy())
    full = Tensor.full((3,), 1.3, dtype=dtypes.bfloat16).contiguous()
    equal(full.float(), np.full(3, 1.296875, np.float32))


@pytest.mark.parametrize(("bits", "wanted"), [
    ("3FA66666", "3FA6"), ("3F808000", "3F80"), ("3F818000", "3F82"), ("3F808001", "3F81"),
    ("FF800000", "FF80"), ("7FC00000", "7FC0"), ("7F7FFFFF", "7F80"), ("80000000", "8000")])
def test_constants_round_to_nearest_even(bits: str, wanted: str):
    assert bf16_constant(f"mov.b16 %cast_b16_0, 0f{bits};") == f"mov.b16 %cast_b16_0, 0x{wanted};"
    assert bf16_constant(f"mov.b32 %cast_f32_0, 0f{bits};") == f"mov.b32 %cast_f32_0, 0f{bits};"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.bfloat16], ids=["half", "bfloat16"])
def test_arithmetic_of_sixteen_bits(dtype):
    a, b = (torch.tensor(floats(2, 500))).to(torch_of(dtype))
    x, y = (Tensor(t.float().numpy()).cast(dtype).contiguous().realize() for t in (a, b))
    for found, wanted in ((x + y, a + b), (x * y, a * b), (x - y, a - b), (x.maximum(y), torch.maximum(a, b)),
                          (x < y, a < b), ((x < y).where(x, 1), torch.where(a < b, a, torch.ones_like(a))),
                          ((x == x.contiguous()), a == a), (-x, -a), (x + 1.5, a + 1.5),
                          (x.bitcast(dtypes.uint16).int(), a.view(torch.uint16).int())):
        np.testing.assert_array_equal(found.float().numpy(), wanted.float().numpy())
    near(x.exp(), a.double().exp().numpy(), {dtypes.half: 1e-3, dtypes.bfloat16: 8e-3}[dtype])
    near(x.sigmoid(), a.double().sigmoid().numpy(), {dtypes.half: 1e-3, dtypes.bfloat16: 8e-3}[dtype])


def test_bits_of_one_type_as_another():
    x = floats(64)
    equal(Tensor(x).bitcast(dtypes.int32), x.view(np.int32))
    equal(Tensor(x.view(np.int32)).bitcast(dtypes.float), x)
    equal(Tensor(x.view(np.uint16)).bitcast(dtypes.half), x.view(np.float16))
    equal(Tensor(x.view(np.uint8)).bitcast(dtypes.uint32), x.view(np.uint32))


# **** indexing, movement, random numbers ****

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
