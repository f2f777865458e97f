"""Routers on the CPU: every instruction set and policy, ties, −inf, groups; graphs of routers and grouped
matmuls, with their gradients, against the references in tinygrad."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

from tests.support.cpu.cpu_gemv_case import LEVELS, at_end
from tests.support.cpu.router_case import Found, chosen, sorted_right, weights
from tests.support.tile.gemm_case import TORCH
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.functional import Policy, Routing, grouped_matmul, route
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.router.spec import SCORES, RouterSpec
from tinygrad_nv.tile.templates import TABLE

F32, BF16 = dtypes.float32, dtypes.bfloat16


def run(spec: RouterSpec, logits: torch.Tensor, bias: torch.Tensor | None = None,
        level: isa.ISA = LEVELS[-1]) -> Found:
    """experts, weights, order, offsets."""
    made = load(TABLE.build(spec, TABLE.choose(spec, target := CPU(level, 2)), target))
    out = [np.full(spec.slots, 99, np.int32), np.full(spec.slots, 99, np.float32),
           np.full(spec.slots, 99, np.int32), np.full(spec.experts + 1, 99, np.int32)]
    given = [each.contiguous().view(torch.uint8).numpy().reshape(-1) for each in (logits, bias)
             if each is not None]
    memory = [at_end(each.view(np.uint8)) for each in (*out, *map(np.array, given))]
    made(*memory)
    a, b, c, d = (each.view(kind.dtype) for each, kind in zip(memory, out, strict=False))
    return a.reshape(spec.tokens, -1), b.reshape(spec.tokens, -1), c, d


POLICIES = [Policy(8), Policy(1, "sigmoid"), Policy(3, "chosen"), Policy(4, "chosen_sigmoid", scale=2.5),
            Policy(6, "sigmoid", renormalize=True, scale=1.5, groups=7, top_groups=3),
            Policy(5, renormalize=True, groups=7, top_groups=2, group_score="max")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.score)
def test_experts_and_weights(level: isa.ISA, policy: Policy):
    random = torch.Generator().manual_seed(0)
    for dtype, count, tokens in ((F32, 35, 19), (BF16, 63, 1)):
        spec = RouterSpec(tokens, count, policy, dtype, policy.groups > 1)
        # whole eighths: far from each other, but for many that are equal
        logits = (torch.randint(-24, 24, (tokens, count), generator=random) / 8).to(TORCH[dtype])
        bias = torch.randint(-8, 8, (count,), generator=random) / 4. if spec.biased else None
        found = run(spec, logits, bias, level)
        np.testing.assert_array_equal(found[0], chosen(spec, logits, bias))
        sorted_right(spec, found)
        wanted = weights(policy, logits.double(), torch.from_numpy(found[0]).long())
        # an exponential and a quotient, each within 2 ulp, and a sum of so many
        np.testing.assert_allclose(found[1], wanted, rtol=(8 + count) * 2.0**-24)


def test_minus_infinity_and_nan():
    spec = RouterSpec(3, 20, Policy(20, "chosen_sigmoid"))
    logits = torch.zeros(3, 20)
    logits[0, ::2], logits[1], logits[2, 3:] = -torch.inf, -torch.inf, torch.nan
    experts, found, *_ = run(spec, logits)
    np.testing.assert_array_equal(experts[0], [*range(1, 20, 2), *range(0, 20, 2)])
    np.testing.assert_array_equal(experts[1], range(20))
    assert experts[2, :3].tolist() == [0, 1, 2]
    assert set(experts.flat) <= set(range(20))
    np.testing.assert_array_equal(found[0], [0.5] * 10 + [0] * 10)


def test_of_equal_groups_the_first_are_kept():
    spec = RouterSpec(1, 20, Policy(6, groups=5, top_groups=2))
    assert run(spec, torch.zeros(1, 20))[0].tolist() == [[*range(6)]]


def test_more_experts_are_refused():
    said = TABLE.why_not(RouterSpec(1, 1 << 16, Policy(1)), CPU(LEVELS[-1], 2))
    assert said == "65536 experts, at most 32768"


# **** graphs ****

def layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Routing]:
    """A mixture of experts, the results of slots added up."""
    routing = route(x @ gate.T, Policy(2, renormalize=True))
    hidden = grouped_matmul(x, up, routing.offsets, routing.order, gather=2, activation="silu")
    made = grouped_matmul(hidden, down, routing.offsets, routing.order, scatter=True,
                          weights=routing.weights.flatten())
    return made.reshape(-1, 2, int(x.shape[1])).sum(1), routing


def expected(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> np.ndarray:
    """The layer in float64."""
    found, experts = (x @ gate.T).softmax(-1).topk(2)
    found /= found.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for t, k in np.ndindex(*experts.shape):
        a, b = (up[e := experts[t, k]] @ x[t]).chunk(2)
        out[t] += found[t, k] * (down[e] @ (torch.nn.functional.silu(a) * b))
    return out.numpy()


def matrices(dtype: dtypes = F32) -> list[Tensor]:
    rng = np.random.default_rng(0)
    shapes = (9, 32), (5, 32), (5, 48, 32), (5, 32, 24)
    return [Tensor(rng.standard_normal(shape).astype(np.float32) / 4, device="CPU").cast(dtype).realize()
            for shape in shapes]


def test_a_layer_in_graphs_and_steps():
    with Context(DEV="CPU"):
        given = matrices()
        names = [each.template for each in explain(layer(*given)[0]).kernels]
        assert (names.count("router"), names.count("grouped_gemm")) == (1, 2)
        wanted = expected(*(torch.from_numpy(each.numpy()).double() for each in given))
        step = TinyJit(lambda *some: layer(*some)[0].realize())
        for _ in range(4): np.testing.assert_allclose(step(*given).numpy(), wanted, atol=2e-6)


@pytest.mark.slow
def test_gradients_are_those_of_the_bodies():
    with Context(DEV="CPU"):
        given = matrices()
        ours = [each.numpy() for each in layer(*given)[0].square().sum().gradient(*given)]
        with disabled():
            theirs = [each.numpy() for each in layer(*given)[0].square().sum().gradient(*given)]
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()))


def test_weights_of_another_dtype_are_the_bodys():
    with Context(DEV="CPU"):
        x, _, up, _ = matrices(BF16)
        offsets, order = Tensor([0, 2, 2, 5, 5, 9], dtype=dtypes.int32), Tensor.arange(9).cast(dtypes.int32)
        many = {"order": order, "weights": Tensor.ones(9, dtype=BF16)}
        report = explain(grouped_matmul(x, up, offsets, **many))
        assert "weights of bf16, not f32" in str(report)
        # the body's gather of matrices is found
        assert "9x48x32 of 5 groups f32, rows // 1, scattered, matrices bf16" in str(report)


def test_every_score_is_tried():
    assert {policy.score for policy in POLICIES} == set(SCORES)
