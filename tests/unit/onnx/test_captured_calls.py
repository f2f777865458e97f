"""Calls of an ONNX model that are captured: what they read, what they return, and what is not captured.
Models of many nodes: long expressions become several kernels, of the same numbers."""
from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, reference
from tinygrad import Tensor, TinyJit
from tinygrad.helpers import Context

from tinygrad_nv import explain
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx import OnnxRunner, gradients
from tinygrad_nv.onnx.ops.selection import PAIRS, non_max_suppression
from tinygrad_nv.onnx.scope import Scope
from tinygrad_nv.transforms import jit

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.usefixtures("cpu_device")


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form."""
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    weights = [onnx.numpy_helper.from_array(each, name) for name, each in constants.items()]
    made.graph.initializer.extend(weights)
    return made


def floats(*shape: int) -> np.ndarray: return RNG.standard_normal(shape).astype(np.float32)


W = floats(3, 4)
AFFINE = model("""g (float[n, 3] x, float[4] b) => (float[n, 4] y, float[n, 4] z) {
    m = MatMul(x, w) y = Add(m, b) z = Neg(y) }""", w=W)


def test_inputs_of_every_kind_and_results_that_stay(monkeypatch: pytest.MonkeyPatch):
    runner, b = OnnxRunner(AFFINE), floats(4)
    runner({"x": floats(2, 3), "b": b})

    def none(*_: object) -> None: raise AssertionError("the graph is built again")
    monkeypatch.setattr(Scope, "run", none)
    whole = floats(8, 7)
    bytes_ = np.zeros(6 * 4 + 1, np.uint8)
    odd = bytes_[1:].view(np.float32).reshape(2, 3)     # of no aligned address
    odd[...] = whole[:2, :3]
    tensor = Tensor(whole).realize()
    kept: list[tuple[Any, np.ndarray]] = []
    for x, wanted in [(whole[:2, :3], whole[:2, :3]), (odd, odd), (whole[:3, :2].T, whole[:3, :2].T),
                      (whole[::-4, ::3], whole[::-4, ::3]), (Tensor(whole[:2, 1:4]), whole[:2, 1:4]),
                      (tensor[3:5, :3], whole[3:5, :3]),
                      (tensor.reshape(-1)[5:11].reshape(2, 3), whole.reshape(-1)[5:11]),
                      (tensor[:2, :3] * 2 + 1, whole[:2, :3] * 2 + 1),
                      (Tensor.zeros(2, 3), np.zeros((2, 3))), (whole[:2, :3].tolist(), whole[:2, :3])]:
        made = runner({"x": x, "b": b})
        kept.append((made, wanted.reshape(2, 3) @ W + b))
    for made, wanted in kept:       # later calls wrote other memory
        np.testing.assert_allclose(made["y"].numpy(), wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(made["z"].numpy(), -made["y"].numpy())
    made["y"].numpy()[:] = 0        # a copy
    assert made["y"].tolist() == made["y"].numpy().tolist() != [[0] * 4] * 2
    assert (made["y"] + made["z"]).abs().max().item() == 0
    assert (made["y"].shape, made["y"].dtype.name) == ((2, 4), "float")
    made["y"].assign(Tensor.ones(2, 4)).realize()
    assert made["y"].tolist() == [[1] * 4] * 2


def test_a_state_that_is_fed_back():
    text = """g (float[1, 3] x, float[1, 1, 4] h, float[1, 1, 4] c) => (float[1, 1, 4] y, float[1, 1, 4] d) {
        axes = Constant<value_ints = [0]>() rows = Unsqueeze(x, axes)
        all, y, d = LSTM<hidden_size = 4>(rows, w, r, b, , h, c) }"""
    made = model(text, w=floats(1, 16, 3), r=floats(1, 16, 4), b=floats(1, 32))
    runner, evaluator = OnnxRunner(made), reference.ReferenceEvaluator(made)
    state: dict[str, Any] = {"h": np.zeros((1, 1, 4), np.float32), "c": np.zeros((1, 1, 4), np.float32)}
    wanted: dict[str, Any] = dict(state)
    for i in range(12):
        x = floats(1, 3)
        found = runner({"x": x, **state})
        state = {"h": found["y"], "c": found["d"] if i % 2 else found["d"].numpy()}
        y, d = evaluator.run(None, {"x": x, **wanted})
        wanted = {"h": y, "c": d}
    np.testing.assert_allclose(state["h"].numpy(), wanted["h"], atol=1e-5)
    np.testing.assert_allclose(state["c"].numpy(), wanted["c"], atol=1e-5)
    assert len(runner._captured) == 1


def test_values_that_decide_what_runs():
    """A condition and a number of iterations are part of a capture. One that is computed is not."""
    runner = OnnxRunner(model("""g (int64 rate, int64 n, float[2] x) => (float[2] y) {
        r = Constant<value: tensor = int64 {16}>() c = Equal(rate, r)
        t = If (c) <then_branch = a () => (float[2] u) { u = Add(x, x) },
                    else_branch = b () => (float[2] v) { v = Neg(x) }>
        yes = Constant<value: tensor = bool {1}>()
        y = Loop(n, yes, t) <body = l (int64 i, bool c0, float[2] v0) => (bool c1, float[2] v1) {
            c1 = Identity(c0) v1 = Add(v0, v0) }> }"""))
    x = np.array([1, 2], np.float32)
    for rate, n, by in [(16, 1, 4), (8, 1, -2), (16, 3, 16), (16, 1, 4), (8, 0, -1)]:
        for given in (np.array(rate), Tensor(rate), Tensor(rate, dtype="int64").contiguous()):
            made = runner({"rate": given, "n": np.array(n), "x": x})["y"]
            assert made.tolist() == [by, 2 * by]
    assert len(runner._captured) == 4
    runner = OnnxRunner(model("""g (float[100] x) => (float[100] y) {
        s = ReduceSum<keepdims = 0>(x) zero = Constant<value: tensor = float {0}>() c = Greater(s, zero)
        y = If (c) <then_branch = a () => (float[100] u) { u = Add(x, x) },
                    else_branch = b () => (float[100] v) { v = Neg(x) }> }"""))
    ones = np.ones(100, np.float32)
    assert [runner({"x": ones * by})["y"].tolist()[0] for by in (1, -1, 2)] == [2, 1, 4]
    assert not runner._captured


def test_how_many_are_kept():
    runner, b = OnnxRunner(AFFINE, captures=2), floats(4)
    for n in (1, 2, 3, 1):
        x = floats(n, 3)
        np.testing.assert_allclose(runner({"x": x, "b": b})["y"].numpy(), x @ W + b, rtol=1e-5, atol=1e-6)
    assert len(runner._captured) == 2
    lazy, x = OnnxRunner(AFFINE, captures=0), Tensor(floats(2, 3))
    lazy({"x": x, "b": Tensor(b)})["y"].sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(W.sum(1), (2, 3)), rtol=1e-5)
    assert not lazy._captured


def test_threads_with_inputs_of_changing_shapes():
    runner, wrong, b = OnnxRunner(AFFINE, captures=2), list[Any](), floats(4)

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            x = rng.standard_normal((int(rng.integers(1, 5)), 3)).astype(np.float32)
            want, made = x @ W + b, runner({"x": x, "b": b})["y"]
            x[:] = 0        # after the call
            if not np.allclose(made.numpy(), want, atol=1e-5): wrong.append((x.shape, made.numpy(), want))
        done.append(seed)
    done, theirs = list[int](), Tensor.realize
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for each in threads: each.start()
    for each in threads: each.join()
    assert (sorted(done), wrong, Tensor.realize) == ([0, 1, 2, 3], [], theirs)


def test_under_a_jit_and_explained():
    runner, b = OnnxRunner(AFFINE), Tensor(floats(4)).realize()
    step = TinyJit(lambda x: runner({"x": x, "b": b})["y"].realize())
    for i in range(4):
        x = Tensor(np.full((2, 3), i, np.float32)).realize()
        np.testing.assert_allclose(step(x).numpy(), x.numpy() @ W + b.numpy(), rtol=1e-5, atol=1e-6)
    made = runner({"x": floats(2, 3), "b": b})
    assert len(explain(made["y"]).kernels) == 1


SQUARE = model("g (float[4] x) => (float[4] y, float[4] z) { y = Mul(x, x) z = Mul(y, w) }",
               w=np.float32([3] * 4))


@pytest.mark.parametrize("device", ["CPU", pytest.param("EMU", marks=pytest.mark.slow)])
def test_results_are_ordinary_tensors_with_gradients(device: str):
    with Context(DEV=device):
        runner, w = OnnxRunner(SQUARE), Tensor([2.0, 2, 2, 2]).realize()
        step, pure = TinyJit(lambda x: (x + 1).realize()), jit(lambda x: x + 1)
        for i in range(4):
            x = Tensor(np.full(4, i, np.float32)).realize()
            made = runner({"x": np.full(4, i, np.float32)})
            # they are arguments, not constants, of captured functions
            assert step(made["z"]).tolist() == pure(made["z"]).tolist() == [1 + 3 * i * i] * 4
            assert (made["z"] * w + made["y"] * w).tolist() == (w * made["z"] + w * made["y"]).tolist() \
                == [8 * i * i] * 4
            assert pickle.loads(pickle.dumps(made["z"])).tolist() == copy.deepcopy(made["z"]).tolist() \
                == [3 * i * i] * 4
            z = runner({"x": x})["z"]
            doubled, loss = z * 2, (z * z).sum()        # 9 x⁴: 36 x³
            assert loss.gradient(x, z)[0].tolist() == [36 * i ** 3] * 4
            assert loss.gradient(z)[0].tolist() == [6 * i * i] * 4
            assert doubled.gradient(x, gradient=Tensor([1.0, 0, 0, 1]))[0].tolist() == [12 * i, 0, 0, 12 * i]
            loss.backward()
            assert (x.grad.tolist(), z.grad.tolist()) == ([36 * i ** 3] * 4, [6 * i * i] * 4)
            (runner({"x": w * i})["y"] * 1).sum().backward()
            assert w.grad.tolist() == [sum(4 * n * n for n in range(i + 1))] * 4
            x.assign(x + 1).realize()       # a result stays as it was computed
            assert z.tolist() == [3 * i * i] * 4


def test_gradients_of_results_that_are_inputs():
    runner, x = OnnxRunner(SQUARE), Tensor([1.25] * 4).realize()
    made, given = x, np.ones(4, np.float32)
    for _ in range(2): made = runner({"x": made})["z"]      # 27 x⁴
    np.testing.assert_allclose(made.sum().gradient(x)[0].numpy(), 108 * 1.25 ** 3)
    made, small = x, Tensor([0.25] * 4).realize()
    for _ in range(gradients.MOST_CALLS + 1): made = runner({"x": made})["y"]
    with pytest.raises(OnnxError, match=r"more than 32 captured calls(.|\n)*captures=0"):
        made.sum().gradient(x)
    made = runner({"x": given})["y"]
    assert made.sum().gradient(small)[0].tolist() == [0] * 4        # of another function
    del made
    gc.collect()
    assert not gradients._results


def test_results_without_kernels_and_random_ones():
    runner = OnnxRunner(model("""g (float[2, 3] x) => (float[2, 3] y, float[6] z, int64[2] s, float[3, 4] r) {
        y = Identity(x) six = Constant<value_ints = [6]>() z = Reshape(x, six)
        s = Shape(x) r = Identity(w) }""",
                        w=W))
    for _ in range(2):
        x = floats(2, 3)
        made = runner({"x": x})
        np.testing.assert_array_equal(made["y"].numpy(), x)
        np.testing.assert_array_equal(made["z"].numpy(), x.reshape(-1))
        assert made["s"].tolist() == [2, 3]
        np.testing.assert_array_equal(made["r"].numpy(), W)
        made["y"].assign(made["y"] * 0).realize()       # the model keeps its weights, the caller his array
        made["r"].assign(made["r"] * 0).realize()
    runner = OnnxRunner(model("g (float[8] x) => (float[8] y) { y = RandomNormalLike(x) }"))
    one, two = (runner({"x": floats(8)})["y"].tolist() for _ in range(2))
    assert one != two


def test_free_extents():
    """-1 and 0, as some exporters write them, are any."""
    made = model("g (float[n, 3] x, float[4] b) => (float[n, 4] y) { m = MatMul(x, w) y = Add(m, b) }", w=W)
    for extent in (-1, 0):
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = extent
        found = OnnxRunner(made)({"x": np.ones((5, 3), np.float32), "b": np.zeros(4, np.float32)})["y"]
        np.testing.assert_allclose(found.numpy(), np.ones((5, 3)) @ W, rtol=1e-5)


X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
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
