"""ONNX on the emulated GPU: a sample of the node tests, and attention by the kernel for GPUs."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from tinygrad import Tensor
from tinygrad.helpers import Context

from bench.interop import onnx_nodes
from tinygrad_nv import explain
from tinygrad_nv.onnx import OnnxRunner


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def test_attention_is_the_kernel_for_gpus():
    """As exporters write it, in float16."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float16[1, 2, s, 64] q, float16[1, 2, s, 64] k,
        float16[1, 2, s, 64] v) => (float16[1, 2, s, 64] y) {
        t = Transpose<perm = [0, 1, 3, 2]>(k)  scores = MatMul(q, t)
        wide = Constant<value_float = 0.125>()  scale = Cast<to = 10>(wide)  scaled = Mul(scores, scale)
        p = Softmax<axis = -1>(scaled)  y = MatMul(p, v) }"""
    random = np.random.default_rng(0)
    inputs = {name: random.standard_normal((1, 2, 64, 64)).astype(np.float16) for name in "qkv"}
    made = OnnxRunner(onnx.parser.parse_model(text))(inputs)["y"]
    templates = [each.template for each in explain(made).kernels]
    assert sum(str(each).startswith("flash") for each in templates) == 1, templates
    q, k, v = (each.astype(np.float64) for each in inputs.values())
    scores = np.exp(q @ k.swapaxes(-1, -2) / 8)
    wanted = scores / scores.sum(-1, keepdims=True) @ v
    # three roundings to 11 bits: of the weights, of the sum, of the result
    np.testing.assert_allclose(made.numpy(), wanted, atol=3 * 2 ** -11 * np.abs(v).max())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_sample_of_cases(part: int):
    """Every eighth case."""
    wrong = []
    for case in onnx_nodes.cases()[::8][part::8]:
        why, listed = onnx_nodes.failure(case), case.name in onnx_nodes.load_known("EMU")
        if bool(why) is not listed: wrong.append(f"{case.name}: {why or 'passes, but is listed'}")
    assert not wrong, "\n".join(wrong)


def test_calls_of_one_kind():
    """The first is lazy, the third is captured, others are replayed; results stay."""
    runner = OnnxRunner(onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        g (float[2, 3] x, int64 n) => (float[2, 3] y) {
        yes = Constant<value: tensor = bool {1}>()
        y = Loop(n, yes, x) <body = l (int64 i, bool c0, float[2, 3] v0) => (bool c1, float[2, 3] v1) {
            c1 = Identity(c0) v1 = Add(v0, x) }> }"""))
    made = []
    for i in range(5):
        x = np.full((2, 3), i, np.float32)
        made.append(runner({"x": x if i % 2 else Tensor(x), "n": np.array(2)})["y"])
    assert [each.tolist() for each in made] == [[[3 * i] * 3] * 2 for i in range(5)]
    assert len(runner._captured) == 1
