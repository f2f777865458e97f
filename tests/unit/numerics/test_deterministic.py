"""`with deterministic():` a row has the same bits alone and among others: matmuls, norms, attention, pages, a
whole network; without it some differ."""
from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_quant_case import TYPES, stored
from tinygrad_nv import explain
from tinygrad_nv.functional import prepare_matrix, quant_matmul, scaled_dot_product_attention
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.numerics.policy import deterministic
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.tile import order

ROWS, BATCHES = 64, (1, 3, 17)
Call = Callable[[int], Tensor]
random = np.random.default_rng(0)


def drawn(*shape: int, dtype: DType = dtypes.float32) -> Tensor:
    return Tensor(random.standard_normal(shape).astype(np.float32)).cast(dtype).contiguous().realize()


def bits(x: Tensor) -> np.ndarray: return x.float().numpy().view(np.uint32)


def same(call: Call) -> list[bool]:
    """Whether the first rows are the same beside 1, 3 and 17 rows as beside 64."""
    whole = bits(call(ROWS))
    return [bool((bits(call(count)) == whole[:count]).all()) for count in BATCHES]


def product(k: int, n: int, dtype: DType, transposed: bool) -> Call:
    x, w = drawn(ROWS, k, dtype=dtype), drawn(n, k, dtype=dtype) if transposed else drawn(k, n, dtype=dtype)
    return lambda m: x[:m].contiguous().realize() @ (w.T if transposed else w)


PRODUCTS = [(700, 96, dtypes.float32, False), (1500, 40, dtypes.float32, True),
            (512, 7, dtypes.float32, False), (8, 40, dtypes.float32, False),
            (1024, 24, dtypes.bfloat16, True), (1500, 1, dtypes.float32, False),
            (700, 1, dtypes.bfloat16, True)]


@pytest.mark.parametrize(("k", "n", "dtype", "transposed"), PRODUCTS, ids=str)
def test_matmuls(k: int, n: int, dtype: DType, transposed: bool):
    with deterministic(): assert same(product(k, n, dtype, transposed)) == [True] * 3


@pytest.mark.parametrize("products", [
    lambda x, y, m: (x * y[:m]).sum(1), lambda x, y, m: (x * y[0]).sum(1), lambda x, y, m: x.square().sum(1),
    lambda x, y, m: (y.reshape(-1, 1, 1500)[:m] @ x.reshape(m, 1500, 1)).reshape(m),
    lambda x, y, m: (x.square().mean(1, keepdim=True) + 1e-5).rsqrt() * x])
def test_sums_of_products_of_a_row(products: Callable[[Tensor, Tensor, int], Tensor]):
    """Of one row they look as a matmul of one row and one column does."""
    x, y = drawn(ROWS, 1500), drawn(ROWS, 1500)
    with deterministic(): assert same(lambda m: products(x[:m].clone().realize(), y, m)) == [True] * 3


@pytest.mark.parametrize("name", ["awq", "Q4_K"])
def test_matmuls_with_quantised_matrices(name: str):
    w, x = QTensor.of(TYPES[name], (40, 512), stored(TYPES[name], 40, 512, 1)), drawn(ROWS, 512)
    tiles = prepare_matrix(w)     # which have no class; inside, a matrix is prepared for what has one
    with deterministic():
        for each, template in ((w, "quant_gemm"), (prepare_matrix(w), "quant_gemm"), (tiles, "gemm")):
            assert same(lambda m, w=each: quant_matmul(x[:m].contiguous().realize(), w)) == [True] * 3
            found = explain(quant_matmul(x, each))
            assert [k.template for k in found.kernels if k.template] == [template]
            assert found.notes == (() if template == "quant_gemm" else (
                "quant_gemm: deterministic: no quant_gemm schedule of its class takes it",))


def test_without_the_switch_some_rows_differ():
    assert not all(same(product(1500, 40, dtypes.float32, True)))


def test_a_matmul_with_its_epilogue_and_two_parts():
    x, w = drawn(ROWS, 300), drawn(300, 2 * 48)

    def gated(m: int) -> Tensor:
        both = x[:m].contiguous().realize() @ w
        return both[:, :48].silu() * both[:, 48:]
    with deterministic(): assert same(gated) == [True] * 3


def test_rows_and_tinygrads_own_sums():
    x = drawn(ROWS, 1500)
    calls: tuple[Call, ...] = (lambda m: x[:m].softmax(), lambda m: x[:m].layernorm(),
                               lambda m: x[:m].reshape(m, 30, 50).sum(1), lambda m: x[:m].log_softmax())
    with deterministic():
        for call in calls: assert same(call) == [True] * 3


def test_a_long_sum_of_few_rows_is_not_split():
    x = drawn(4, 4, 40000).realize()
    whole = lambda m: x[:m].sum(2).exp()  # noqa: E731
    with deterministic():
        every = bits(whole(4))
        assert (bits(whole(1)) == every[:1]).all()
        kinds = [k.reason for k in explain(whole(1)).kernels if k.template is None and k.flops]
    assert all(order.WRITTEN in reason for reason in kinds)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_batches_and_chunks_of_rows(causal: bool):
    q, k, v = (drawn(ROWS, 2, 24, 16) for _ in range(3))
    calls: Call = lambda m: scaled_dot_product_attention(q[:m], k[:m], v[:m], is_causal=causal)  # noqa: E731
    with deterministic(): assert same(calls) == [True] * 3


def test_one_row_of_queries_is_no_other_attention():
    q, k, v = drawn(2, 2, 300, 16), drawn(2, 2, 300, 16), drawn(2, 2, 300, 16)
    with deterministic():
        whole = bits(scaled_dot_product_attention(q, k, v))
        for rows in (1, 5, 64):
            part = bits(scaled_dot_product_attention(q[:, :, :rows].contiguous(), k, v))
            assert (part == whole[:, :, :rows]).all(), rows


def test_pages_with_other_neighbours():
    size, pages, lengths = 16, 40, [290, 5, 77, 1]
    k, v, q = drawn(160, size, 2, 32), drawn(160, size, 2, 32), drawn(4, 8, 4, 32)
    table = Tensor(random.permutation(160).reshape(4, pages).astype(np.int32))

    def attended(who: list[int], rows: int = 1) -> np.ndarray:
        ends = Tensor(np.array([lengths[i] + rows for i in who], np.int32))
        return bits(paged_attention(q[who, -rows:].contiguous(), k, v, table[who].contiguous(), ends))
    with deterministic():
        alone = attended([0])[0]
        for who in ([0, 1], [2, 0, 3], [0, 1, 2, 3]):
            assert (attended(who)[who.index(0)] == alone).all(), who
        assert (attended([0], 1)[0, 0] == attended([1, 0], 1)[1, 0]).all()


def test_a_llama():
    made = Llama(ModelConfig("LlamaForCausalLM", 96, 96, 120, 2, 4, 2, 24, 64,
                             (RopeConfig("default", 10000.0, 24, 64),) * 2, windows=(None, None)))
    for x in (made.embedding, *(part for block in made.blocks for part in (
            block.attention.qkv.weight, block.attention.output.weight, block.feed_forward.gate_up.weight,
            block.feed_forward.down.weight))): x.assign(drawn(*map(int, x.shape)) * 0.2).realize()
    for norm in (made.norm, *(n for b in made.blocks for n in (b.attention_norm, b.feed_forward_norm))):
        norm.weight.assign(Tensor.ones(*norm.weight.shape)).realize()
    tokens = random.integers(0, 96, (ROWS, 5)).astype(np.int32)
    with deterministic(): assert same(lambda m: made(Tensor(tokens[:m]))) == [True] * 3


# **** where it holds ****

def test_explain_states_the_class():
    x, w = Tensor.empty(3, 64), Tensor.empty(64, 32)
    with deterministic():
        found = explain(x @ w, x.softmax(), Tensor.empty(10, 7, 9).sum(1))
        assert [k.schedule_class.removeprefix(order.CLASS).split(",")[-1] for k in found.kernels] == [
            " blocks of 64 along k", " in an order that its length gives", " sums in index order"]
        assert str(found).count(order.CLASS) == 3
    assert [k.schedule_class for k in explain(x @ w).kernels] == [""]


def test_the_switch_ends_with_its_block_and_is_one_threads_own():
    seen: list[bool] = []
    with deterministic():
        thread = threading.Thread(target=lambda: seen.append(order.is_wanted()))
        thread.start()
        thread.join()
        assert order.is_wanted()
    assert (seen, order.is_wanted()) == ([False], False)


def test_what_was_scheduled_before_is_not_taken():
    x, w = drawn(1, 700), drawn(700, 96)
    before = bits(x @ w)
    with deterministic(): inside = bits(x @ w)
    assert (before != inside).any()
    assert (bits(x @ w) == before).all()


def test_a_captured_function_keeps_its_class():
    x, w = drawn(ROWS, 700), drawn(700, 96)

    @TinyJit
    def step(x: Tensor) -> Tensor: return (x @ w).realize()
    with deterministic():
        for i in range(3): step(x[i:i + 1].clone().realize())
        whole = bits(x @ w)
    assert (bits(step(x[5:6].clone().realize())) == whole[5:6]).all()


def test_a_matrix_that_no_class_takes_is_left_to_the_reference():
    from tinygrad_nv.functional import grouped_matmul
    x, w, offsets = drawn(6, 16), drawn(2, 8, 16), Tensor(np.array([0, 2, 6], np.int32)).realize()
    with deterministic():
        found = explain(grouped_matmul(x, w, offsets))
    assert not any(k.template == "grouped_gemm" for k in found.kernels)
    assert "no class of grouped_gemm schedules" in str(found)
