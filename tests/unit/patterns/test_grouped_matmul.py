"""Matmuls of rows with a matrix for each group, beside a loop over groups in float64; gradients beside
torch's. Gradients of grouped matmuls beside torch's of a loop over rows in float64, and the memory of a
step."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import Context, GlobalCounters

from tinygrad_nv import disabled, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Policy, group_rows, grouped_matmul, grouped_outer, route

RNG = np.random.default_rng(1)
EXPERTS, K, WIDTH = 7, 24, 10
COUNTS = {"ragged": [3, 0, 5, 1, 0, 2, 4], "one has all": [0, 0, 15, 0, 0, 0, 0],
          "one row": [0, 0, 0, 0, 0, 0, 1], "even": [2] * 7, "some rows have none": [1, 1, 0, 0, 0, 0, 2]}


def given(*shape: int) -> np.ndarray: return RNG.integers(-4, 5, shape).astype(np.float32)


def on_cpu(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x), device="CPU")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_in_order(name: str, biased: bool):
    """Integers: the same bits."""
    counts = COUNTS[name]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = sum(counts) + 2 * (name == "some rows have none")
    x, w, bias = given(rows, K), given(EXPERTS, 6, K), given(EXPERTS, 6)
    more = on_cpu(bias) if biased else None
    found = grouped_matmul(on_cpu(x), on_cpu(w), on_cpu(offsets), bias=more).numpy()
    for e, count in enumerate(counts):
        own = slice(offsets[e], offsets[e] + count)
        assert (found[own] == x[own] @ w[e].T + bias[e] * biased).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_clamped"])
def test_a_mixture_of_experts(activation: str, k: int):
    """Both matmuls, gathered, scattered and weighted, within 2e-6 of float64, relative to the largest."""
    tokens = 13
    x, gate_up = RNG.normal(size=(tokens, K)), RNG.normal(size=(EXPERTS, 2 * WIDTH, K))
    down, logits = RNG.normal(size=(EXPERTS, K, WIDTH)), RNG.normal(size=(tokens, EXPERTS))
    x, gate_up, down, logits = (each.astype(np.float32) for each in (x, gate_up, down, logits))
    routing = route(on_cpu(logits), Policy(k, renormalize=True))
    inner = grouped_matmul(on_cpu(x), on_cpu(gate_up), routing.offsets, routing.order, gather=k,
                           activation=activation)
    made = grouped_matmul(inner, on_cpu(down), routing.offsets, routing.order, scatter=True,
                          weights=routing.weights.flatten())
    experts = torch.tensor(routing.experts.numpy()).long()
    weights = torch.tensor(routing.weights.numpy()).double()
    both = torch.einsum("tk,tenk->ten", torch.tensor(x).double(), torch.tensor(gate_up).double()[experts])
    gate, up = both.chunk(2, -1)
    act = {"silu": torch.nn.functional.silu(gate), "gelu": torch.nn.functional.gelu(gate),
           "gelu_tanh": torch.nn.functional.gelu(gate, approximate="tanh"),
           "swiglu_clamped": gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid()}[activation]
    up = up.clamp(-7, 7) + 1 if activation == "swiglu_clamped" else up
    wanted = torch.einsum("tei,tehi->teh", act * up, torch.tensor(down).double()[experts])
    wanted = wanted * weights[..., None]
    assert np.abs(made.numpy().reshape(wanted.shape) - wanted.numpy()).max() <= 2e-6 * wanted.abs().max()


def test_gradients_are_those_of_torch():
    """Of x, both matrices and logits, within 2e-6 of the largest."""
    tokens, k = 9, 2
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in
              ((tokens, K), (EXPERTS, 2 * WIDTH, K), (EXPERTS, K, WIDTH), (tokens, EXPERTS))]
    x, gate_up, down, logits = mine = [on_cpu(each) for each in arrays]
    routing = route(logits, Policy(k, renormalize=True))
    inner = grouped_matmul(x, gate_up, routing.offsets, routing.order, gather=k, activation="silu")
    made = grouped_matmul(inner, down, routing.offsets, routing.order, scatter=True,
                          weights=routing.weights.flatten())
    found = made.reshape(tokens, k, K).sum(1).square().sum().gradient(*mine)
    a, b, c, d = theirs = [torch.tensor(each, requires_grad=True) for each in arrays]
    weights, experts = d.softmax(-1).topk(k, -1)
    gate, up = torch.einsum("tk,tenk->ten", a, b[experts]).chunk(2, -1)
    out = torch.einsum("tei,tehi->teh", torch.nn.functional.silu(gate) * up, c[experts])
    (out * (weights / weights.sum(-1, keepdim=True))[..., None]).sum(1).square().sum().backward()
    for one, other in zip(found, theirs, strict=True):
        assert other.grad is not None
        assert np.abs(one.numpy() - other.grad.numpy()).max() <= 2e-6 * other.grad.abs().max()


def test_what_is_refused():
    x, w, offsets = on_cpu(given(4, K)), on_cpu(given(3, 6, K)), on_cpu(np.array([0, 1, 2, 4], np.int32))
    order = on_cpu(np.arange(4, dtype=np.int32))
    with pytest.raises(SpecError, match="w of f32"): grouped_matmul(x, w[:, :, :8], offsets)
    with pytest.raises(SpecError, match="offsets of s32"): grouped_matmul(x, w, offsets[:3])
    with pytest.raises(SpecError, match="no order"): grouped_matmul(x, w, offsets, scatter=True)
    with pytest.raises(SpecError, match="order of s32"): grouped_matmul(x, w, offsets, order)
    with pytest.raises(SpecError, match="activation='relu'"): grouped_matmul(x, w, offsets, activation="relu")
    with pytest.raises(SpecError, match="weights of shape"):
        grouped_matmul(x, w, offsets, order, weights=Tensor.ones(3), scatter=True)
    with pytest.raises(SpecError, match="floats of one"): grouped_matmul(x.cast(dtypes.int32), w, offsets)


E, N, D, ROWS = 6, 10, 14, 16
ACT = {"": lambda y: y, "silu": lambda y: torch.nn.functional.silu(y[:N // 2]) * y[N // 2:],
       "swiglu_clamped": lambda y: (y[N // 2:].clamp(-7, 7) + 1) * y[:N // 2].clamp(max=7) * torch.sigmoid(
           1.702 * y[:N // 2].clamp(max=7))}


def normal(*shape: int) -> np.ndarray: return RNG.normal(size=shape).astype(np.float32)


def tensor(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x), device="CPU").realize()


def looped(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, weights: torch.Tensor,
           experts: np.ndarray, order: np.ndarray, options: dict[str, object]) -> torch.Tensor:
    """Rows one after the other; those of no expert are zeros."""
    act, found = ACT[str(options.get("activation", ""))], {}
    for i, slot in enumerate(order):
        if (e := int(experts[slot])) >= E: continue
        matrix, row = w[e].T if "transposed" in options else w[e], i
        if "gather" in options: row = slot // int(str(options["gather"]))
        y = act(matrix @ x[row] + bias[e])
        found[slot if options.get("scatter") else i] = y * weights[slot]
    zeros = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(i, zeros) for i in range(len(order))])


CASES = {"down": {"scatter": True}, "gate and up": {"gather": 2, "activation": "silu"}, "rows in order": {},
         "transposed": {"scatter": True, "gather": 1, "transposed": True},
         "all there is": {"gather": 4, "scatter": True, "activation": "swiglu_clamped"}}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "all there is"))
                                  for name in CASES])
def test_gradients_are_those_of_a_loop(name: str):
    """Of x, w, bias and weights, within 4e-6 of the largest; experts 1 and 4 have no rows, some rows no
    expert."""
    options = CASES[name]
    experts = RNG.choice([0, 2, 3, 5, 5, E], ROWS).astype(np.int32)
    order, offsets = group_rows(tensor(experts), E)
    rows = ROWS // int(options.get("gather", 1))
    matrices = (E, D, N) if options.get("transposed") else (E, N, D)
    arrays = normal(rows, D), normal(*matrices), normal(E, N), normal(ROWS)
    mine = x, w, bias, weights = [tensor(each) for each in arrays]
    made = grouped_matmul(x, w, offsets, order, bias=bias, weights=weights, **options)
    grad = normal(*made.shape)
    found = [each.numpy() for each in (made * tensor(grad)).sum().gradient(*mine)]
    theirs = [torch.tensor(each.astype(np.float64), requires_grad=True) for each in arrays]
    (looped(*theirs, experts, order.numpy(), options) * torch.tensor(grad)).sum().backward()
    for one, other in zip(found, theirs, strict=True):
        assert np.abs(one - other.grad.numpy()).max() <= 4e-6 * other.grad.abs().max()
    for one in found[1:3]: assert (one[[1, 4]] == 0).all()


def test_some_slots_alone():
    """Rows of x that no slot names have no gradient: 5 slots of 12, by whole numbers."""
    x, w, grad = (RNG.integers(-3, 4, shape).astype(np.float32) for shape in ((6, D), (E, N, D), (5, N)))
    order, offsets = np.array([7, 1, 0, 11, 6], np.int32), np.array([0, 2, 2, 3, 3, 3, 5], np.int32)
    mine, matrices = tensor(x), tensor(w)
    made = grouped_matmul(mine, matrices, tensor(offsets), tensor(order), gather=2)
    dx, dw = (each.numpy() for each in (made * tensor(grad)).sum().gradient(mine, matrices))
    wanted, wanted_w = np.zeros_like(x), np.zeros_like(w)
    for i, (slot, e) in enumerate(zip(order, (0, 0, 2, 5, 5), strict=True)):
        wanted[slot // 2] += grad[i] @ w[e]
        wanted_w[e] += np.outer(grad[i], x[slot // 2])
    np.testing.assert_array_equal(dx, wanted)
    np.testing.assert_array_equal(dw, wanted_w)


def layer(tokens: int, experts: int, k: int, hidden: int, inner: int) -> Callable[[], list[Tensor]]:
    """A training step: the gradients of all that a layer has."""
    x, gate, up, down = (tensor(normal(*shape)) for shape in (
        (tokens, hidden), (experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)))

    def step() -> list[Tensor]:
        routing = route(x @ gate.T, Policy(k))
        middle = grouped_matmul(x, up, routing.offsets, routing.order, gather=k, activation="silu")
        made = grouped_matmul(middle, down, routing.offsets, routing.order, scatter=True,
                              weights=routing.weights.flatten())
        return made.reshape(tokens, k, hidden).sum(1).square().sum().gradient(x, gate, up, down)
    return step


def most_allocated(step: Callable[[], list[Tensor]], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes beyond those before, at most."""
    before, most, theirs = GlobalCounters.mem_used, [0], Buffer.allocate

    def allocate(self: Buffer, *given: object, **named: object) -> Buffer:
        made = theirs(self, *given, **named)
        most.append(GlobalCounters.mem_used - before)
        return made
    monkeypatch.setattr(Buffer, "allocate", allocate)
    Tensor.realize(*step())
    return max(most)


@pytest.mark.slow
def test_the_memory_of_a_step_is_that_of_rows_and_matrices(monkeypatch: pytest.MonkeyPatch):
    """512 tokens, 8 of 64 experts: at most 12 times the rows of gate | up, and 4 times the matrices. One
    product of each row and its expert's matrix would take 67 MB."""
    with Context(DEV="CPU"):
        step = layer(512, 64, 8, 64, 32)
        report = explain(*step())
        assert [each.template for each in report.kernels].count("grouped_gemm") == 8
        most, rows, matrices = most_allocated(step, monkeypatch), 512 * 8 * 64 * 4, 64 * 3 * 32 * 64 * 4
        print(f"{most / 1e6:.1f} MB, rows {rows / 1e6:.1f}, matrices {matrices / 1e6:.1f}")
        assert matrices < most <= 12 * rows + 4 * matrices


@pytest.mark.slow
def test_the_memory_of_the_bodies(monkeypatch: pytest.MonkeyPatch):
    """The same without kernels of ours, of 128 tokens, 8 of 64 experts: less than one product of each row and
    its expert's matrix, 16.8 MB."""
    with Context(DEV="CPU"), disabled():
        most = most_allocated(layer(128, 64, 8, 64, 32), monkeypatch)
        print(f"{most / 1e6:.1f} MB")
        assert most < 128 * 8 * 64 * 64 * 4 / 2


def test_outer_products_are_refused():
    y, x, offsets = tensor(normal(4, 3)), tensor(normal(4, 5)), tensor(np.array([0, 1, 4], np.int32))
    with pytest.raises(SpecError, match="x of bf16"): grouped_outer(y, x.cast("bfloat16"), offsets)
    with pytest.raises(SpecError, match="offsets of f32"): grouped_outer(y, x, offsets.float())
    with pytest.raises(SpecError, match="no order"): grouped_outer(y, x, offsets, gather_x=2)
    with pytest.raises(SpecError, match="an order of 4 for 3 rows"): grouped_outer(y, x[:3], offsets)
