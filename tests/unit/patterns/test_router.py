"""Routing of tokens to experts, beside torch's softmax and top-k: which experts, weights, order, gradient."""
from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tinygrad_nv import disabled
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Policy, group_rows, route

RNG = np.random.default_rng(0)
POLICIES = {"mixtral": Policy(2, renormalize=True), "qwen": Policy(5), "one": Policy(1), "all": Policy(12),
            "deepseek": Policy(3, "sigmoid", True, 2.5, groups=4, top_groups=2),
            "deepseek v2": Policy(2, groups=3, top_groups=2, group_score="max", scale=16.0),
            "gpt-oss": Policy(4, "chosen"), "llama 4": Policy(1, "chosen_sigmoid")}


def expected(policy: Policy, logits: torch.Tensor, bias: torch.Tensor | None = None
             ) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights as transformers computes them."""
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(policy.score, logits)
    choice = scores if bias is None else scores + bias
    if policy.groups > 1:
        groups = choice.view(len(logits), policy.groups, -1)
        best = groups.max(-1)[0] if policy.group_score == "max" else groups.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(policy.top_groups, -1)[1], 1).bool()
        choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(policy.k, -1)[1]
    weights = scores.gather(1, experts)
    if policy.score == "chosen": weights = weights.softmax(-1)
    if policy.score == "chosen_sigmoid": weights = weights.sigmoid()
    if policy.renormalize: weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * policy.scale


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("biased", [False, True])
def test_experts_weights_and_order(name: str, biased: bool):
    """Weights within 4e-7 of torch's, the rest the same."""
    policy, logits = POLICIES[name], RNG.normal(size=(29, 12)).astype(np.float32)
    bias = RNG.normal(size=12).astype(np.float32) if biased else None
    found = route(Tensor(logits, device="CPU"), policy, None if bias is None else Tensor(bias, device="CPU"))
    experts, weights = expected(policy, torch.tensor(logits), None if bias is None else torch.tensor(bias))
    assert (found.experts.numpy() == experts.numpy()).all()
    assert np.abs(found.weights.numpy() - weights.numpy()).max() <= 4e-7 * policy.scale
    flat = experts.flatten().numpy()
    assert (found.order.numpy() == np.argsort(flat, kind="stable")).all()
    counts = np.bincount(flat, minlength=12)
    assert (found.offsets.numpy() == np.concatenate([[0], np.cumsum(counts)])).all()


def test_equal_logits_go_to_the_lower_numbers():
    found = route(Tensor(np.zeros((3, 6), np.float32), device="CPU"), Policy(2))
    assert (found.experts.numpy() == [0, 1]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_the_gradient_is_that_of_torch(name: str):
    """Within 1e-6 of the largest."""
    logits, grad = (RNG.normal(size=shape).astype(np.float32) for shape in ((7, 12), (7, POLICIES[name].k)))
    mine, theirs = Tensor(logits, device="CPU"), torch.tensor(logits, requires_grad=True)
    weights = route(mine, POLICIES[name]).weights
    found = (weights * Tensor(grad, device="CPU")).sum().gradient(mine)[0].numpy()
    (expected(POLICIES[name], theirs)[1] * torch.tensor(grad)).sum().backward()
    assert theirs.grad is not None
    assert np.abs(found - theirs.grad.numpy()).max() <= 1e-6 * theirs.grad.abs().max()


def test_what_is_refused():
    logits = Tensor.zeros(3, 6, device="CPU").contiguous()
    with pytest.raises(SpecError, match="top 7 of 6 experts"): route(logits, Policy(7))
    with pytest.raises(SpecError, match="6 experts in 4 groups"): route(logits, Policy(1, groups=4))
    with pytest.raises(SpecError, match="score='relu'"): Policy(1, "relu")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="bias of f32"): route(logits, Policy(1), Tensor.zeros(5))
    with pytest.raises(SpecError, match="logits of s32"): route(logits.cast(dtypes.int32), Policy(1))


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_of_given_experts(plain: bool):
    """In the order of a stable sort, those of no expert behind all others; `plain`: by the body."""
    experts = RNG.choice([0, 2, 5, 6, 7, -1, 99], 40).astype(np.int32)
    known = np.where((experts >= 0) & (experts < 7), experts, 7)
    wanted = np.argsort(known, kind="stable"), np.cumsum([0, *np.bincount(known, minlength=8)[:7]])
    with disabled() if plain else nullcontext():
        found = [each.numpy() for each in group_rows(Tensor(experts, device="CPU"), 7)]
    for mine, numbers in zip(found, wanted, strict=True): np.testing.assert_array_equal(mine, numbers)
    with pytest.raises(SpecError, match="experts of f32"): group_rows(Tensor.zeros(4), 7)
    with pytest.raises(SpecError, match="1 of 0 experts"): group_rows(Tensor(experts), 0)
