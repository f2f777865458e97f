"""Routing of tokens to experts, beside torch's softmax and top-k: which experts, weights, order,
gradient. `dispatch`, a mixture of experts in one call, beside its body in plain tinygrad and torch's loop
over tokens in float64, forward and backward."""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from tinygrad_nv import disabled
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Experts, Policy, dispatch, group_rows, route
from tinygrad_nv.patterns.grouped_gemm.dispatch import dispatch_plain, policy_of
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.types import INT8, per_channel_scale

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


E, H, I = 5, 16, 12
SHAPES = {"router": (E, H), "gate_up": (E, 2 * I, H), "down": (E, H, I), "router_bias": (E,),
          "choice_bias": (E,), "gate_up_bias": (E, 2 * I), "down_bias": (E, H)}


def arrays(*names: str) -> dict[str, np.ndarray]:
    return {name: (RNG.normal(size=SHAPES[name]) / 2).astype(np.float32) for name in names}


def tensor(x: np.ndarray) -> Tensor: return Tensor(x, device="CPU").realize()


def looped(x: torch.Tensor, given: dict[str, torch.Tensor], policy: Policy) -> torch.Tensor:
    """A token after the other."""
    made = []
    for token in x.reshape(-1, H):
        scores = (given["router"] @ token + given.get("router_bias", 0)).softmax(-1)
        chosen = (scores + given.get("choice_bias", 0)).topk(policy.k).indices
        weights = scores[chosen] / (scores[chosen].sum() if policy.renormalize else 1)
        out = torch.zeros(H, dtype=torch.float64)
        for weight, e in zip(weights, chosen.tolist(), strict=True):
            gate, up = (given["gate_up"][e] @ token + given.get("gate_up_bias", [0] * E)[e]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            out = out + weight * (given["down"][e] @ inner + given.get("down_bias", [0] * E)[e])
        made.append(out)
    return torch.stack(made).reshape(x.shape)


@pytest.mark.parametrize(("policy", "all_there_is"), [
    ("top2", False), *(pytest.param(*each, marks=pytest.mark.slow) for each in
                       (("top1", False), ("top1", True), ("top2", True)))])
def test_results_and_gradients(policy: str, all_there_is: bool):
    """Within 4e-6 of the largest: results, and gradients of tokens and of every field."""
    given = arrays(*(SHAPES if all_there_is else ("router", "gate_up", "down")))
    x, grad = (RNG.normal(size=(2, 5, H)).astype(np.float32) for _ in range(2))
    mine = {name: tensor(each) for name, each in given.items()}
    tokens, names = tensor(x), [name for name in mine if name != "choice_bias"]
    made = dispatch(tokens, Experts(**mine), policy)
    found = [made, *(made * tensor(grad)).sum().gradient(tokens, *(mine[name] for name in names))]
    theirs = {name: torch.tensor(each.astype(np.float64), requires_grad=True) for name, each in given.items()}
    rows = torch.tensor(x.astype(np.float64), requires_grad=True)
    wanted = looped(rows, theirs, policy_of(policy))
    (wanted * torch.tensor(grad)).sum().backward()
    for one, other in zip(found, [wanted.detach(), rows.grad, *(theirs[name].grad for name in names)],
                          strict=True):
        assert other is not None
        assert np.abs(one.numpy() - other.numpy()).max() <= 4e-6 * max(other.abs().max(), 1e-3)


@pytest.mark.slow
def test_the_body_is_the_same():
    mine = Experts(**{name: tensor(each) for name, each in arrays(*SHAPES).items()})
    x, policy = tensor(RNG.normal(size=(6, H)).astype(np.float32)), Policy(3, "sigmoid", True, 2.5)
    got, wanted = (make(x, mine, policy).numpy() for make in (dispatch, dispatch_plain))
    assert np.abs(got - wanted).max() <= 2e-6 * np.abs(wanted).max()


def stack(x: np.ndarray) -> QStack:
    """int8, a scale for each row."""
    count, n, k = x.shape
    scales = np.abs(x).max(-1, keepdims=True).reshape(count * n, 1) / 127
    codes = np.rint(x.reshape(count * n, k) / scales).astype(np.int8)
    return QStack(INT8 @ per_channel_scale(), x.shape, {"codes": tensor(codes), "scales": tensor(scales)})


@pytest.mark.slow
def test_quantised_matrices():
    """Results and gradients of tokens, router and biases are those of the dequantised matrices."""
    given = arrays("router", "gate_up", "down", "gate_up_bias", "down_bias")
    stacks = {"gate_up": stack(given["gate_up"].reshape(2 * E, I, H)), "down": stack(given["down"])}
    shared = {name: tensor(given[name]) for name in ("router", "gate_up_bias", "down_bias")}
    dense = {name: each.dequantize().reshape(SHAPES[name]).realize() for name, each in stacks.items()}
    tokens, grad = (tensor(RNG.normal(size=(2, 5, H)).astype(np.float32)) for _ in range(2))
    found, wanted = [], []
    for out, matrices in ((found, stacks), (wanted, dense)):
        made = dispatch(tokens, Experts(**shared, **matrices), "top2")
        out += [made, *(made * grad).sum().gradient(tokens, *shared.values())]
    found.append(dispatch_plain(tokens, Experts(**shared, **stacks), "top2"))
    for one, other in zip(found, [*wanted, wanted[0]], strict=True):
        assert np.abs(one.numpy() - other.numpy()).max() <= 4e-6 * max(np.abs(other.numpy()).max(), 1e-3)
    with pytest.raises(SpecError, match="gate_up of shape"):
        Experts(shared["router"], stack(given["gate_up"]), stacks["down"])


def test_policies_by_name():
    assert policy_of("top1") == Policy(1)
    assert policy_of("top8") == Policy(8, renormalize=True)
    for words in ("top0", "best", "top2 "):
        with pytest.raises(SpecError, match="policy="): policy_of(words)


def test_calls_that_are_refused():
    given = {name: Tensor.empty(*shape, device="CPU") for name, shape in SHAPES.items()}
    good, x = Experts(**given), Tensor.empty(3, H, device="CPU")
    assert {each.name for each in fields(good)} == {*given, "activation"}
    with pytest.raises(SpecError, match="down_bias of shape"):
        Experts(**given | {"down_bias": Tensor.empty(E)})
    with pytest.raises(SpecError, match="gate_up of shape"): Experts(**given | {"gate_up": given["down"]})
    with pytest.raises(SpecError, match=r"router \(5,\)"): Experts(**given | {"router": Tensor.empty(E)})
    with pytest.raises(SpecError, match="tokens of f32"): dispatch(x[:, :8], good)
    with pytest.raises(SpecError, match="tokens of f16"): dispatch(x.half(), good)
    with pytest.raises(SpecError, match="top 6 of 5 experts"): dispatch(x, good, "top6")
    with pytest.raises(SpecError, match="activation='relu'"):
        dispatch(x, Experts(given["router"], given["gate_up"], given["down"], "relu"))
