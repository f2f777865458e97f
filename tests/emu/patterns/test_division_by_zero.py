"""Quotients and remainders of integers by 0 and -1 on both devices: a number, and no signal."""
from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tinygrad import Tensor

import tinygrad_nv.torch  # noqa: F401 - the backend
from tinygrad_nv.errors import NumericsError, OnnxError
from tinygrad_nv.onnx import OnnxRunner


def pairs(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of numbers around 0 and at the ends of a dtype."""
    info = np.iinfo(dtype)
    values = np.array(sorted({info.min, max(info.min, -7), max(info.min, -1), 0, 1, 3, 7, info.max}), dtype)
    return values.repeat(len(values)), np.tile(values, len(values))


@pytest.mark.parametrize("device", ["CPU", "EMU"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_numbers_that_trap(device, dtype):
    x, y = pairs(dtype)
    a, b = (Tensor(each, device=device).realize() for each in (x, y))
    wide = list(zip(map(int, x), map(int, y), strict=True))
    cut = [(abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) if q else 0) for p, q in wide]
    want = ([p // q if q else 0 for p, q in wide], [p % q if q else 0 for p, q in wide], cut,
            [p - q * c if q else 0 for (p, q), c in zip(wide, cut, strict=True)])
    made = (a // b, a % b, a.div(b, rounding_mode="trunc"), a.fmod(b))
    for own, each in zip(made, want, strict=True):
        # the least integer // -1 has no place in the dtype: it wraps
        np.testing.assert_array_equal(own.numpy(), _wrapped(each, dtype))


def _wrapped(values: list[int], dtype: str) -> np.ndarray:
    bits = 8 * np.dtype(dtype).itemsize
    return np.array([each % 2**bits for each in values], f"uint{bits}").view(dtype)


def test_a_divisor_known_to_be_0():
    for divided in (lambda x: x // 0, lambda x: x % 0, lambda x: x // Tensor(0).expand(2)):
        with pytest.raises(ZeroDivisionError, match="0\n  expected: a divisor other than 0") as found:
            divided(Tensor([1, 2])).realize()
        assert isinstance(found.value, NumericsError)
    assert (Tensor([1.0, -1]) / 0).tolist() == [np.inf, -np.inf]
    assert (Tensor([7, -7]) // -1).tolist() == [-7, 7]


def test_torch_compile():
    x, y = torch.tensor([5, -2**31, 7], dtype=torch.int32), torch.tensor([0, -1, 2], dtype=torch.int32)
    compiled = torch.compile(lambda a, b: (a // b, a % b, torch.div(a, b, rounding_mode="trunc")),
                             backend="tinygrad_nv")
    assert [each.tolist() for each in compiled(x, y)] == [[0, -2**31, 3], [0, 0, 1], [0, -2**31, 3]]


def test_onnx():
    def model(op: str, *constants: onnx.TensorProto) -> bytes:
        ints = [helper.make_tensor_value_info(name, TensorProto.INT32, [3]) for name in "xyz"]
        graph = helper.make_graph([helper.make_node(op, ["x", "y"], ["z"])], op,
                                  ints[:1] if constants else ints[:2], ints[2:], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    x, y = (np.array(each, np.int32) for each in ([5, -2**31, -7], [0, -1, 2]))
    for op, want in (("Div", [0, -2**31, -3]), ("Mod", [0, 0, 1])):
        assert OnnxRunner(model(op))({"x": x, "y": y})["z"].tolist() == want
        zero = helper.make_tensor("y", TensorProto.INT32, [3], y)
        with pytest.raises(OnnxError, match=f"{op} of integers by 'y', with a 0 among its 3 elements"):
            OnnxRunner(model(op, zero))
