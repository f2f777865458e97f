"""The router of a mixture of experts, in types. A spec does not know its target.

Protocol: of logits [T, E] of T tokens and E experts, in float32:

score   s = softmax(logits), sigmoid(logits), or the logits ("chosen": the k chosen ones become a softmax;
"chosen_sigmoid": each becomes its sigmoid) choice  c = s + bias; with `groups` of E / groups experts each
only experts of the `top_groups` best groups, by the sum of the two largest c of a group ("sum2") or by the
largest ("max"); of those the k largest c, the lower number first where they are equal weight  w = s of the
k chosen, divided by their sum (+ 1e-20) if `renormalize`, times `scale`

    experts [T, k] int32, by falling c    weights [T, k] float32
    order   [T · k] int32: slots t · k + j, by expert, then by slot
    offsets [E + 1] int32: expert e has order[offsets[e]:offsets[e + 1]]

Sources: Switch Transformer (arXiv 2101.03961), Mixtral (arXiv 2401.04088), DeepSeek-V2 and -V3 (arXiv
2405.04434, 2412.19437).
"""
from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

Score = Literal["softmax", "sigmoid", "chosen", "chosen_sigmoid"]
SCORES: tuple[Score, ...] = ("softmax", "sigmoid", "chosen", "chosen_sigmoid")
EPSILON = 1e-20     # of the sum that weights are divided by
FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)


@dataclass(frozen=True)
class Policy:
    """How experts are chosen and weighted. Raises `SpecError` for what cannot be."""
    k: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["sum2", "max"] = "sum2"

    def __post_init__(self) -> None:
        if self.score not in SCORES: raise SpecError(f"score={self.score!r}", f"one of {', '.join(SCORES)}")
        if self.k < 1: raise SpecError(f"top {self.k} experts", "1 at least")
        if not 1 <= self.top_groups <= self.groups:
            raise SpecError(f"{self.top_groups} of {self.groups} groups", "as many as there are, at most")
        if not isfinite(self.scale): raise SpecError(f"scale={self.scale}", "a finite number")


@dataclass(frozen=True)
class RouterSpec:
    """The router of `tokens` tokens. `biased`: choice has a bias, float32 [E]. Raises `SpecError` for what
    cannot be."""
    tokens: int
    experts: int
    policy: Policy
    dtype: DType = dtypes.float32
    biased: bool = False

    def __post_init__(self) -> None:
        check(self.policy, self.experts)
        if self.tokens < 1: raise SpecError("no tokens", "1 at least")
        if self.dtype not in FLOATS: raise SpecError(f"logits of {short(self.dtype)}", "floats")

    @property
    def slots(self) -> int:
        """Slots of all tokens."""
        return self.tokens * self.policy.k

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return ()

    def __str__(self) -> str:
        p = self.policy
        grouped = f", {p.top_groups} of {p.groups} groups" if p.groups > 1 else ""
        return f"{self.tokens} tokens, {p.k} of {self.experts} experts by {p.score}{grouped}"


def check(policy: Policy, experts: int) -> None:
    """Raises `SpecError` for a policy that so many experts cannot have."""
    if experts % policy.groups:
        raise SpecError(f"{experts} experts in {policy.groups} groups", "as many in each")
    within = experts // policy.groups
    if policy.k > policy.top_groups * within:
        raise SpecError(f"top {policy.k} of {policy.top_groups * within} experts",
                        "as many as there are, at most")
    if policy.groups > 1 and policy.group_score == "sum2" and within < 2:
        raise SpecError(f"groups of {within} experts", "2 at least, whose choices are added")


@dataclass(frozen=True)
class GroupRowsSpec:
    """The order of slots whose experts are given, int32 [tokens · k]: order [tokens · k] and offsets
    [experts + 1] as a router makes them. Slots whose number is no expert's stand behind all others; so do
    those of tokens that are not there, where their number is `symbolic` and `tokens` the most. Raises
    `SpecError` for what cannot be."""
    tokens: int
    k: int
    experts: int
    symbolic: bool = False

    def __post_init__(self) -> None:
        if min(self.tokens, self.k, self.experts) < 1:
            raise SpecError(f"{self.tokens} tokens, {self.k} of {self.experts} experts", "1 at least")

    @property
    def slots(self) -> int:
        """Slots of all tokens."""
        return self.tokens * self.k

    @property
    def integers(self) -> tuple[int, ...]:
        """A kernel's integer arguments."""
        return (self.tokens,) if self.symbolic else ()

    def __str__(self) -> str:
        return f"{self.slots} slots by their {self.experts} experts{', symbolic' * self.symbolic}"
