"""`dispatch`, a mixture of experts in one call, beside its body in plain tinygrad and torch's loop over
tokens in float64, forward and backward."""
from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from tinygrad import Tensor

from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import Experts, Policy, dispatch
from tinygrad_nv.patterns.grouped_gemm.dispatch import dispatch_plain, policy_of
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.types import INT8, per_channel_scale

RNG = np.random.default_rng(5)
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


def test_what_is_refused():
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
