"""Exported functions: checked by onnx, run by onnxruntime, and the values of tinygrad; matmuls and look-ups
are found among reductions."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from tinygrad import Tensor, dtypes, nn

from tinygrad_nv import disabled
from tinygrad_nv.functional import embedding, scaled_dot_product_attention
from tinygrad_nv.onnx import OnnxRunner, export
from tinygrad_nv.onnx.exporting.builder import Builder

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.usefixtures("cpu_device")


def floats(*shape: int) -> Tensor: return Tensor(RNG.standard_normal(shape, dtype=np.float32)).realize()


def checked(tmp_path: Path, fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> Counter[str]:
    """Exports, runs and compares; the ops of the model."""
    path = export(fn, inputs, tmp_path / "fn.onnx", **options)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {each.name: x.numpy() for each, x in
                               zip(session.get_inputs(), inputs, strict=True)})
    with disabled(): wanted = fn(*inputs)
    results = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, b in zip(found, results, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-5, atol=1e-5)
        assert a.dtype == b.numpy().dtype
    return Counter(each.op_type for each in onnx.load(path, load_external_data=False).graph.node)


W, BIAS, TABLE = floats(16, 8), floats(16), floats(50, 8)


@pytest.mark.parametrize(("fn", "shapes", "matmuls"), [
    (lambda x: (x @ W.T + BIAS).softmax(-1), [(4, 8)], 1),
    (lambda a, b: a @ b, [(2, 3, 4, 5), (3, 5, 6)], 1),
    (lambda a, b: Tensor.einsum("bhqd,bhkd->bqhk", a, b), [(2, 3, 4, 5), (2, 3, 6, 5)], 1),
    (lambda a, b: a.transpose(0, 1) @ b, [(5, 4), (5, 3)], 1),
    (lambda a, b: a.dot(b), [(7,), (7,)], 0),
    (lambda x: x.square().sum(-1), [(4, 8)], 0),
    (lambda q, k: scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True),
     [(2, 4, 6, 8), (2, 2, 6, 8)], 2)])
def test_matmuls_are_found(tmp_path: Path, fn: Callable[..., Tensor], shapes: list[tuple[int, ...]],
                           matmuls: int):
    assert checked(tmp_path, fn, *(floats(*shape) for shape in shapes))["MatMul"] == matmuls


def test_a_convolution_is_a_matmul(tmp_path: Path):
    conv = nn.Conv2d(3, 5, 3, padding=1, stride=2)
    Tensor.realize(*nn.state.get_parameters(conv))
    assert checked(tmp_path, lambda x: conv(x).relu(), floats(2, 3, 8, 8))["MatMul"] == 1


@pytest.mark.parametrize("fn", [lambda i: embedding(TABLE, i) @ W.T, lambda i: TABLE[i] + 1,
                                lambda i: TABLE.T[:, i]])
def test_look_ups_are_gathers(tmp_path: Path, fn: Callable[..., Tensor]):
    ops = checked(tmp_path, fn, Tensor([[1, 2, 3], [4, -1, 49]]).realize())
    assert ops["Gather"] == 1
    assert not ops["ReduceSum"]


def test_constants_are_told_apart_by_their_values():
    """Not by their addresses, which a freed array leaves to the next one."""
    builder = Builder()
    names = [builder.constant(np.full(size, i % 4, dtype=kind)) for i in range(8)
             for size in (1, 100, (4, 25)) for kind in (np.float32, np.int32)]
    assert len(set(names)) == len(names) // 2
    assert names[:24] == names[24:]
    values = [numpy_helper.to_array(builder.initializers[name]) for name in names[:24]]
    assert [(each.shape, each.dtype, each.max()) for each in values] == [
        (shape, kind, i) for i in range(4) for shape in ((1,), (100,), (4, 25))
        for kind in (np.float32, np.int32)]


def test_movement(tmp_path: Path):
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (x.flip(1)[:, 2:6], x.pad(((1, 2), (0, 3))), x.reshape(2, 16).T,
                x.unsqueeze(1).expand(4, 3, 8), x[::2, ::-3],
                Tensor.stack(x, x + 1, dim=1), x.cat(x, dim=0), x.roll(3, 1))
    checked(tmp_path, fn, floats(4, 8))


def test_elementwise(tmp_path: Path):
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (x.exp(), x.exp2(), x.abs().log(), (x.abs() + 1).log2(), x.sin(), x.sqrt().isnan(), x.trunc(),
                x.round(), x.tanh(), x.gelu(), x.erf(), x.sigmoid(), x.sign(), x.maximum(0.5),
                x.bool().where(x, 1.0), (x > 0.5).where(x, -1.0), x.layernorm(), x.logsumexp(-1), x ** 3)
    checked(tmp_path, fn, floats(4, 8))


def test_integers_and_bools(tmp_path: Path):
    def fn(i: Tensor) -> tuple[Tensor, ...]:
        even = i % 2 == 0
        return (i // 3, i % 3, i & 6, i | 1, i ^ 5, i << 2, i >> 1, even & (i > 0), even | (i < 0), ~even,
                even.any(1), even.all(), i.argmax(1), i.sum(0), i.cumsum(1), i.prod(1), i.max(),
                Tensor.arange(6).reshape(1, 6) + i, i.cast(dtypes.int64) * 3)
    checked(tmp_path, fn, Tensor(RNG.integers(-9, 10, (3, 6)).astype(np.int32)).realize())


def test_the_result_runs_here_too(tmp_path: Path):
    x = floats(4, 8)
    path = export(lambda x: {"twice": x * 2, "sum": x.sum()}, {"x": x}, tmp_path / "fn.onnx", opset=24)
    found = OnnxRunner(path)({"x": x})
    np.testing.assert_array_equal(found["twice"].numpy(), x.numpy() * 2)
    assert set(found) == {"twice", "sum"}


def test_weights_in_a_file_of_their_own(tmp_path: Path):
    big = floats(64, 64)
    checked(tmp_path, lambda x: x @ big, floats(2, 64), external_data=True)
    assert (tmp_path / "fn.onnx.data").stat().st_size >= 64 * 64 * 4
    assert (tmp_path / "fn.onnx").stat().st_size < 4096
    found = OnnxRunner(tmp_path / "fn.onnx")({"input": Tensor.ones(2, 64)})["output"].numpy()
    np.testing.assert_allclose(found[0], big.numpy().sum(0), rtol=1e-4, atol=1e-4)
