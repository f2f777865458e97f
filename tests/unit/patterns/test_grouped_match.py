"""Matmuls with gathered matrices, as tinygrad's llm spells experts, become grouped matmuls: whole numbers,
the same bits; what is not of that form is tinygrad's, and explain() says why."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, Variable, dtypes, function
from tinygrad.dtype import DType

from tinygrad_nv import disabled, explain
from tinygrad_nv.patterns.program import collect_misses

RNG = np.random.default_rng(3)
E, N, K = 5, 12, 20
pytestmark = pytest.mark.usefixtures("cpu_device")


def whole(*shape: int, dtype: DType = dtypes.float32) -> Tensor:
    return Tensor(RNG.integers(-4, 5, shape).astype(np.float32)).cast(dtype).realize()


def chosen(*shape: int) -> Tensor: return Tensor(RNG.integers(0, E, shape).astype(np.int32)).realize()


def experts(x: Tensor, w: Tensor, sel: Tensor) -> Tensor:
    """Rows x (…, 1 or k, K) times matrices w (E, N, K) of experts sel (…, k), as tinygrad's llm has it."""
    return (x.unsqueeze(-2) @ w[sel].transpose(-1, -2)).contiguous().squeeze(-2)


def right(made: Tensor, x: Tensor, w: Tensor, sel: Tensor, count: int = 1) -> None:
    """Asserts that grouped matmuls and one sort compute whole numbers. x (R, K) or (1, K), sel (R,)."""
    names = [each.template for each in explain(made).kernels]
    assert (names.count("grouped_gemm"), names.count("router")) == (count, 1), str(explain(made))
    wanted = np.einsum("rk,rnk->rn", x.float().numpy() + np.zeros((sel.numel(), 1)),
                       w.float().numpy()[sel.numpy().reshape(-1)])
    np.testing.assert_array_equal(made.float().numpy().reshape(wanted.shape), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=str)
def test_tokens_that_share_a_row(dtype: DType):
    x, w, sel = whole(2, 3, 1, K, dtype=dtype), whole(E, N, K, dtype=dtype), chosen(2, 3, 4)
    right(experts(x, w, sel), x.expand(2, 3, 4, K).reshape(24, K), w, sel)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [dtypes.float16, pytest.param(dtypes.bfloat16, marks=pytest.mark.slow)],
                         ids=str)
def test_matrices_of_16_bits(dtype: DType):
    """Rows of float32, as tinygrad's llm has them: a few of an expert, and 40; and rows that are widened."""
    w, x, sel = whole(E, N, K, dtype=dtype), whole(40, 1, K), Tensor.full((40, 1), 2, dtype=dtypes.int32)
    few, one = chosen(8, 1), sel.contiguous().realize()
    rows = x[:8].contiguous().realize()
    right(experts(rows, w, few), rows[:, 0], w, few)
    right(experts(x, w, one), x[:, 0], w, one)
    half = x.cast(dtype).realize()
    made = (half.float().unsqueeze(-2) @ w[one].float().transpose(-1, -2)).contiguous()
    right(made, x[:, 0], w, one)


def test_a_row_for_each_slot_and_one_for_all():
    w, sel, rows, one = whole(E, N, K), chosen(7, 2), whole(7, 2, K), whole(1, 1, K)
    right(experts(rows, w, sel), rows.reshape(14, K), w, sel)
    right(experts(one, w, sel), one.reshape(1, K), w, sel)
    x = rows[:, 0].contiguous().realize()
    right(Tensor.einsum("tk,tnk->tn", x, w[sel[:, 0].contiguous()]).contiguous(), x, w, sel[:, 0])


@pytest.mark.slow
def test_numbers_of_no_expert_are_those_of_tinygrad():
    """Those below 0 count from the last; others are rows of zeros."""
    x, w, sel = whole(4, 1, K), whole(E, N, K), Tensor([[0, -1], [E, 2], [-E, 77], [-E - 1, 4]]).realize()
    assert "grouped_gemm" in [each.template for each in explain(experts(x, w, sel)).kernels]
    found = experts(x, w, sel).numpy()
    with disabled(): np.testing.assert_array_equal(found, experts(x, w, sel).numpy())


def test_experts_of_64_bits():
    """Numbers beyond 32 bits are no expert's."""
    x, w = whole(4, 1, K), whole(E, N, K)
    sel = Tensor([[3], [2**32 + 1], [0], [2**40]], dtype=dtypes.int64).realize()
    found, rows = experts(x, w, sel).numpy()[:, 0], x.numpy()[:, 0]
    wanted = np.einsum("rk,rnk->rn", rows, w.numpy()[[3, 0, 0, 0]]) * [[1], [0], [1], [0]]
    np.testing.assert_array_equal(found, wanted)


def test_a_layer_sorts_once():
    """Gate, up and down; the choice is computed in the same graph."""
    x, gate, up, down = whole(6, 1, K), whole(E, N, K), whole(E, N, K), whole(E, K, N)
    logits = whole(6, E)
    sel = logits.argmax(-1, keepdim=True).cast(dtypes.int32)
    inner = (experts(x, gate, sel).relu() * experts(x, up, sel)).contiguous()
    numbers = logits.numpy().argmax(-1)
    a, b = (np.einsum("rk,rnk->rn", x.numpy()[:, 0], w.numpy()[numbers]) for w in (gate, up))
    rows = np.maximum(a, 0) * b
    right(experts(inner, down, sel), Tensor(rows.astype(np.float32)), down, Tensor(numbers), 3)


@pytest.mark.slow
def test_symbolic_tokens_in_steps():
    """Captured once for any number of tokens, in a function."""
    w, xs, sels = whole(E, N, K), whole(1, 9, K), chosen(1, 9, 2)

    @function(precompile=True, allow_implicit=True)
    def inner(x: Tensor, sel: Tensor) -> Tensor: return experts(x.unsqueeze(2), w, sel) + 1

    @TinyJit
    def step(x: Tensor, sel: Tensor) -> Tensor: return inner(x, sel).contiguous().realize()
    for tokens in (3, 9, 1, 5):
        many = Variable("tokens", 1, 9).bind(tokens)
        found = step(xs[:, :many], sels[:, :many])
        got, x, sel = found[:, :tokens].numpy(), xs.numpy()[0, :tokens], sels.numpy()[0, :tokens]
        np.testing.assert_array_equal(got[0], np.einsum("tk,tsnk->tsn", x, w.numpy()[sel]) + 1)
    many = Variable("tokens", 1, 9).bind(4)
    report = explain(experts(xs[:, :many].unsqueeze(2), w, sels[:, :many]))
    assert "grouped_gemm" in [each.template for each in report.kernels]


def by_hand(x: Tensor, w: Tensor, sel: Tensor, first: int = 0) -> Tensor:
    """The sum over experts of `w[sel]`, written down; experts are counted from `first`."""
    own = sel.reshape(*sel.shape, 1, 1, 1) == Tensor.arange(first, first + len(w)).reshape(-1, 1, 1)
    return (x.unsqueeze(-2) @ own.where(w, 0).sum(2).transpose(-1, -2)).contiguous()


@pytest.mark.parametrize(("words", "make"), [
    ("matrices that are computed", lambda x, w, sel: experts(x, w + 1, sel)),
    ("do not lie as (experts, columns, summed)", lambda x, w, sel: experts(x, w.transpose(0, 1), sel)),
    ("40000 experts, at most 32768", lambda x, w, sel: experts(
        x, Tensor.zeros(40000, 1, K).contiguous().realize(), sel)),
    ("matrices that are rounded", lambda x, w, sel: (x.unsqueeze(-2) @ w[sel].half().float().transpose(
        -1, -2)).contiguous()),
    ("results of f32, rows of f16", lambda x, w, sel: x.half().unsqueeze(-2).matmul(
        w.half().contiguous()[sel].transpose(-1, -2), dtype=dtypes.float).contiguous()),
    ("experts of slots in another order", lambda x, w, sel: by_hand(x, w, sel.reshape(2, 7).T)),
    ("compared with other numbers", lambda x, w, sel: by_hand(x, w, sel, 1))])
def test_what_is_left_to_tinygrad(words: str, make: Callable[[Tensor, Tensor, Tensor], Tensor]):
    made = make(whole(7, 1, K), whole(N, N, K), chosen(7, 2))
    with collect_misses() as heard: made.schedule_linear()
    assert any(words in miss.reason for miss in heard if miss.template == "grouped_gemm"), heard


def test_a_sum_over_slots_is_not_one_matmul():
    """Weights of classes, added up over tokens: an element of `w[sel]` is no row of inputs times a matrix."""
    x, w, sel = whole(3, K), whole(K), Tensor(RNG.integers(0, K, 3).astype(np.int32)).realize()

    def made() -> Tensor: return ((x + 1).gather(1, sel.unsqueeze(1)).squeeze(1) * w[sel]).sum()
    wanted = ((x.numpy() + 1)[np.arange(3), sel.numpy()] * w.numpy()[sel.numpy()]).sum()
    assert made().item() == wanted
    assert (-x.gather(1, sel.unsqueeze(1)).squeeze(1) * w[sel]).sum().item() == \
        -(x.numpy()[np.arange(3), sel.numpy()] * w.numpy()[sel.numpy()]).sum()
