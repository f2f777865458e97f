"""The router in plain tinygrad (tile/reference.py). Experts are ranked by comparing all pairs, which needs no
sort."""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.reference import Argument, Given, Results, dense, gather
from tinygrad_nv.tile.router.spec import EPSILON, GroupRowsSpec, Policy, RouterSpec


def arguments(spec: RouterSpec | GroupRowsSpec) -> tuple[Argument, ...]:
    """experts, weights, order, offsets; logits, and a bias if there is one. Of given experts: order, offsets;
    experts."""
    rows = (Argument("order", dtypes.int32, (dense(spec.slots),), "out"),
            Argument("offsets", dtypes.int32, (dense(spec.experts + 1),), "out"))
    if isinstance(spec, GroupRowsSpec):
        return *rows, Argument("experts", dtypes.int32, (dense(spec.tokens, spec.k),),
                               values=range(-2, spec.experts + 2), usual=range(spec.experts))
    chosen = dense(spec.tokens, spec.policy.k)
    given = [Argument("logits", spec.dtype, (dense(spec.tokens, spec.experts),))]
    if spec.biased: given.append(Argument("bias", dtypes.float32, (dense(spec.experts),)))
    return (Argument("experts", dtypes.int32, (chosen,), "out"),
            Argument("weights", dtypes.float32, (chosen,), "out"), *rows, *given)


def reference(spec: RouterSpec | GroupRowsSpec, given: Given, exact: bool = False) -> Results:
    """experts, weights, order, offsets; `exact`: weights in float64, of the experts that float32 has. Of
    given experts: order, offsets."""
    if isinstance(spec, GroupRowsSpec): return rows_of(given["experts"].flatten(), spec.experts)
    inputs = {each.name: gather(given[each.name], each.places[0]) for each in arguments(spec)[4:]}
    logits = inputs["logits"]
    made = route_tokens(spec.policy, logits, inputs.get("bias"))
    if not exact: return made
    scores = score(spec.policy, logits.cast(dtypes.float64)).gather(1, made[0])
    return made[0], weigh_experts(spec.policy, scores), *made[2:]


def ranks(x: Tensor) -> Tensor:
    """The rank of each of the last dimension's numbers, int32, 0 the largest; equal ones by their place."""
    n = int(x.shape[-1])
    mine, other = x.unsqueeze(-1), x.unsqueeze(-2)
    at = Tensor.arange(n, dtype=dtypes.int32).to(x.device)
    before = (other > mine) | ((other == mine) & (at.reshape(1, n) < at.reshape(n, 1)))
    return before.sum(-1, dtype=dtypes.int32)


def route_tokens(policy: Policy, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """experts, weights, order, offsets of logits (T, E)."""
    tokens, count = int(logits.shape[0]), int(logits.shape[1])
    scores = score(policy, logits).contiguous()
    choice = scores if bias is None else scores + bias.float()
    if policy.groups > 1: choice = _in_groups(policy, choice)
    # [T, k, E]: true where expert e is the j-th of token t
    place = Tensor.arange(policy.k, dtype=dtypes.int32).to(logits.device).reshape(1, -1, 1)
    chosen = ranks(choice.contiguous()).unsqueeze(1) == place
    numbers = Tensor.arange(count, dtype=dtypes.int32).to(logits.device)
    experts = chosen.where(numbers, 0).sum(-1, dtype=dtypes.int32).contiguous()
    weights = weigh_experts(policy, chosen.where(scores.unsqueeze(1), 0).sum(-1))
    return experts, weights, *sort_slots(experts.reshape(tokens * policy.k), count)


def score(policy: Policy, logits: Tensor) -> Tensor:
    """The scores of all experts, float32, or float64 of such logits."""
    wide = logits if logits.dtype == dtypes.float64 else logits.float()
    if policy.score == "softmax": return wide.softmax(-1)
    return wide.sigmoid() if policy.score == "sigmoid" else wide


def weigh_experts(policy: Policy, scores: Tensor) -> Tensor:
    """The weights of the chosen experts, of their scores (T, k)."""
    if policy.score == "chosen": scores = scores.softmax(-1)
    if policy.score == "chosen_sigmoid": scores = scores.sigmoid()
    if policy.renormalize: scores = scores / (scores.sum(-1, keepdim=True) + EPSILON)
    return scores if policy.scale == 1 else scores * policy.scale


def _in_groups(policy: Policy, choice: Tensor) -> Tensor:
    """Choices, −inf in groups that are not among the best."""
    tokens, count = choice.shape
    groups = choice.reshape(tokens, policy.groups, -1).contiguous()
    if policy.group_score == "max": score = groups.max(-1)
    else: score = (ranks(groups) < 2).where(groups, 0).sum(-1)
    kept = ranks(score.contiguous()) < policy.top_groups
    return kept.unsqueeze(-1).where(groups, -float("inf")).reshape(tokens, count)


def sort_slots(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """order and offsets of the experts (R) of slots."""
    slots = int(experts.shape[0])
    own = (experts.unsqueeze(-1) == Tensor.arange(count, dtype=dtypes.int32).to(experts.device))
    until = own.cast(dtypes.int32).cumsum(0).contiguous()     # [R, E], with the slot's own
    offsets = until[-1].cumsum(0).pad(((1, 0),)).cast(dtypes.int32).contiguous()
    before = own.where(until - 1 + offsets[:-1], 0).sum(-1, dtype=dtypes.int32).contiguous()
    numbers = Tensor.arange(slots, dtype=dtypes.int32).to(experts.device)
    order = (before.unsqueeze(0) == numbers.unsqueeze(1)).where(numbers, 0).sum(-1, dtype=dtypes.int32)
    return order.contiguous(), offsets


def rows_of(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the rows of numbers (R) that may be no expert's: their slots stand behind all others."""
    known = (experts >= 0) & (experts < count)
    order, offsets = sort_slots(known.where(experts, count), count + 1)
    return order, offsets[:-1].contiguous()
