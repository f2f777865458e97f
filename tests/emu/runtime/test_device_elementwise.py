"""DEV=EMU, element by element: functions, integers, comparisons, selection and casts, against numpy.

Bounds are |error| / (1 + |value|) against float64; PTX's approximate ex2, lg2, sin, rcp and sqrt are within
2^-21 or so, and functions made of several lose a few bits more.
"""
from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.patterns.on_emu import emu, equal, floats, near, rng  # noqa: F401
from tinygrad_nv import Tensor, dtypes
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
