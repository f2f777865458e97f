"""DEV=EMU: `with deterministic():` a row has the same bits alone and among others, on sm_80 and sm_90a, and
without the switch some differ; safe norms are one norm kernel each."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad.dtype import DType
from tinygrad.helpers import ALLOW_TF32, Context

from tests.support.cpu.cpu_quant_case import TYPES, stored
from tests.support.graphs.pool_case import device
from tests.support.numerics import safe_case as right
from tests.unit.numerics.test_safe import Safe, U, upstream, within
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.functional import prepare_matrix, quant_matmul, scaled_dot_product_attention
from tinygrad_nv.numerics.policy import deterministic
from tinygrad_nv.numerics.safe import layernorm_safe, rmsnorm_safe, softmax_safe
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.tile import order

ROWS, BATCHES = 64, (1, 3, 17)
Call = Callable[[int], Tensor]
random = np.random.default_rng(1)


def drawn(gpu: NVDevice, *shape: int, dtype: DType) -> Tensor:
    return Tensor(random.standard_normal(shape).astype(np.float32)).cast(dtype).to(gpu.device).realize()


def bits(x: Tensor) -> np.ndarray: return x.to("CPU").float().numpy().view(np.uint32)


def same(call: Call) -> list[bool]:
    whole = bits(call(ROWS))
    return [bool((bits(call(count)) == whole[:count]).all()) for count in BATCHES]


def classes(x: Tensor) -> set[str]:
    """Those of kernels that compute; all of them are ours."""
    found = explain(x).kernels
    assert all(k.template for k in found if k.flops), str(explain(x))
    return {k.schedule_class for k in found if k.template}


@pytest.mark.parametrize(("dtype", "k", "n"), [(dtypes.float16, 2048, 16), (dtypes.bfloat16, 1024, 40),
                                               (dtypes.float16, 1024, 1),
                                               (dtypes.float32, 512, 16)], ids=str)
def test_matmuls(gpu: NVDevice, dtype: DType, k: int, n: int):
    x, w = drawn(gpu, ROWS, k, dtype=dtype), drawn(gpu, n, k, dtype=dtype)
    product: Call = lambda m: x[:m].clone().realize().matmul(w.T, dtype=dtypes.float32)  # noqa: E731
    with deterministic(), Context(ALLOW_TF32=1):
        assert ALLOW_TF32.value
        assert same(product) == [True] * 3


def test_matmuls_of_8_bits():
    gpu = device(arch="sm_90a")
    x, w = drawn(gpu, ROWS, 1024, dtype=dtypes.fp8e4m3), drawn(gpu, 32, 1024, dtype=dtypes.fp8e4m3)
    product: Call = lambda m: x[:m].clone().realize().matmul(w.T, dtype=dtypes.float32)  # noqa: E731
    with deterministic():
        assert same(product) == [True] * 3
        assert classes(product(3)) == {"class: tensor cores along k, one CTA a sum, wgmma"}


@pytest.mark.parametrize("name", ["awq", "Q4_K"])
def test_matmuls_with_quantised_matrices(name: str):
    with Context(DEV="EMU"):
        w = prepare_matrix(QTensor.of(TYPES[name], (40, 512), stored(TYPES[name], 40, 512, 1)))
        x = Tensor(random.standard_normal((ROWS, 512)).astype(np.float32)).cast(dtypes.bfloat16).realize()
        with deterministic():
            assert same(lambda m: quant_matmul(x[:m].clone().realize(), w)) == [True] * 3
            assert classes(quant_matmul(x, w)) == {"class: tensor cores along k, one CTA a sum"}


def test_without_the_switch_some_rows_differ(gpu: NVDevice):
    x, w = drawn(gpu, ROWS, 2048, dtype=dtypes.float16), drawn(gpu, 16, 2048, dtype=dtypes.float16)
    product: Call = lambda m: x[:m].clone().realize().matmul(w.T, dtype=dtypes.float32)  # noqa: E731
    assert not all(same(product))
    with deterministic(): assert classes(product(3)) == {"class: tensor cores along k, one CTA a sum"}


def test_attention_over_batches_and_chunks_of_rows(gpu: NVDevice):
    q, k, v = (drawn(gpu, 5, 1, 70, 64, dtype=dtypes.float16) for _ in range(3))
    with deterministic():
        whole = bits(scaled_dot_product_attention(q, k, v))
        part = scaled_dot_product_attention(q[:1].clone().realize(), k[:1].clone().realize(),
                                            v[:1].clone().realize())
        assert len(classes(part)) == 1
        assert len(explain(part).kernels) == 1
        assert (bits(part) == whole[:1]).all()
        for rows in (1, 20):
            few = scaled_dot_product_attention(q[:, :, :rows].clone().realize(), k, v)
            assert (bits(few) == whole[:, :, :rows]).all(), rows


def test_pages_with_other_neighbours(gpu: NVDevice):
    size, pages, lengths = 16, 30, [420, 5, 77]
    k, v, q = (drawn(gpu, *shape, dtype=dtypes.float16) for shape in
               ((90, size, 1, 64), (90, size, 1, 64), (3, 8, 2, 64)))
    table = random.permutation(90).reshape(3, pages).astype(np.int32)

    def attended(who: list[int], rows: int = 1) -> np.ndarray:
        ends = Tensor(np.array([lengths[i] for i in who], np.int32), device=gpu.device)
        pages = Tensor(table[who], device=gpu.device).realize()
        return bits(paged_attention(q[who, -rows:].clone().realize(), k, v, pages, ends))
    with deterministic():
        alone = attended([0])[0]
        for who in ([1, 0], [0, 1, 2]): assert (attended(who)[who.index(0)] == alone).all(), who
        # the last row of a chunk is what the token has that is decoded
        assert (attended([0, 1], 8)[0, -1] == alone[0]).all()


def test_rows(gpu: NVDevice):
    x, w = drawn(gpu, ROWS, 300, dtype=dtypes.bfloat16), drawn(gpu, 300, dtype=dtypes.bfloat16)
    def norm(m: int) -> Tensor:
        rows = x[:m].clone().realize().float()
        return (rows * (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w).softmax()
    with deterministic():
        assert same(norm) == [True] * 3
        assert classes(norm(3)) == {order.CLASS + order.BY_ROW}


WIDTH = 160


@pytest.mark.parametrize(("safe", "want", "bound"), [
    (softmax_safe, right.softmax, 4),
    (layernorm_safe, lambda x: right.layernorm(x, 1e-5), 64 * np.sqrt(2 * WIDTH)),
    (rmsnorm_safe, lambda x: right.rmsnorm(x, 1e-6), 16 * np.sqrt(WIDTH))])
def test_rows_that_break_others(safe: Safe, want: Safe, bound: float):
    x = right.rows(WIDTH, dtypes.float32, 0)
    out = safe(Tensor(x, device="EMU").realize())
    assert [each.template for each in explain(out).kernels] == ["norm"]
    within(out.numpy().astype(np.float64), want(x), bound * U, dtypes.float32)


def test_a_gradient():
    x = right.rows(WIDTH, dtypes.float32, 0)
    g, given = upstream(x), Tensor(x, device="EMU").realize()
    gradient = (layernorm_safe(given) * Tensor(g, device="EMU")).sum().gradient(given)[0]
    slope, size = right.layernorm_gradient(x, g, 1e-5)
    room = 64 * U * np.sqrt(2 * WIDTH) * (1 + np.abs(right.layernorm(x, 1e-5))) * size
    within(gradient.numpy().astype(np.float64), slope, room, dtypes.float32)
