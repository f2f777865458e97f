"""What a router has to find, by sorting in float64, for tests of routers on any target."""
from __future__ import annotations

import numpy as np
import torch

from tinygrad_nv.tile.router.spec import Policy, RouterSpec

# experts, weights, order, offsets
Found = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def chosen(spec: RouterSpec, logits: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    """Experts by sorting, in float64: of scores that are no closer than float32 tells."""
    policy, x = spec.policy, logits.double()
    if policy.score == "softmax": x = x.softmax(-1)
    if policy.score == "sigmoid": x = x.sigmoid()
    if bias is not None: x = x + bias
    if policy.groups > 1:
        groups = x.view(spec.tokens, policy.groups, -1)
        score = groups.amax(-1) if policy.group_score == "max" else groups.topk(2).values.sum(-1)
        kept = (-score).sort(stable=True).indices[:, :policy.top_groups]
        left = torch.ones_like(score, dtype=torch.bool).scatter(1, kept, False)
        x = groups.masked_fill(left.unsqueeze(-1), -torch.inf).view(spec.tokens, -1)
    return (-x).sort(stable=True).indices[:, :policy.k].numpy().astype(np.int32)


def sorted_right(spec: RouterSpec, found: Found) -> None:
    """Asserts order and offsets."""
    experts, _, order, offsets = found
    np.testing.assert_array_equal(order, experts.reshape(-1).argsort(kind="stable"))
    counts = np.bincount(experts.reshape(-1), minlength=spec.experts)
    np.testing.assert_array_equal(offsets, [0, *counts.cumsum()])


def weights(policy: Policy, x: torch.Tensor, experts: torch.Tensor) -> np.ndarray:
    """In float64."""
    if policy.score == "softmax": x = x.softmax(-1)
    if policy.score == "sigmoid": x = x.sigmoid()
    x = x.gather(1, experts)
    if policy.score == "chosen": x = x.softmax(-1)
    if policy.score == "chosen_sigmoid": x = x.sigmoid()
    if policy.renormalize: x = x / x.sum(-1, keepdim=True)
    return (x * policy.scale).numpy()
