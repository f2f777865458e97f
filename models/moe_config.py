"""A model's mixture of experts."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.errors import ModelError, SpecError
from tinygrad_nv.functional import Policy

from .fields import Fields


@dataclass(frozen=True)
class MoEConfig:
    """`experts` of `width` columns between gate | up and down, in the layers that `layers` says; `policy`
    chooses them. `shared_width` is that of the expert that every token has, 0 for none; with `shared_gate`
    it is multiplied with the sigmoid of a logit."""
    experts: int
    width: int
    policy: Policy
    layers: tuple[bool, ...]
    shared_width: int = 0
    shared_gate: bool = False

    def parameters(self, hidden: int) -> int:
        """Of one layer."""
        return hidden * (self.experts * (3 * self.width + 1) + 3 * self.shared_width + self.shared_gate)


COUNTS = ("num_local_experts", "num_experts")     # transformers takes either


def moe_config(f: Fields, default: int, width: str, layers: Sequence[bool], shared_width: int = 0,
               shared_gate: bool = False, renormalize: bool = True) -> MoEConfig:
    """Of `default` experts where the file says no number, and the key of their width. Raises `ModelError`."""
    counts = {f.positive(key) for key in COUNTS if f.get(key) is not None} or {default}
    if len(counts) > 1:
        raise ModelError(f"{f.name}: num_local_experts is {f.get(COUNTS[0])}, num_experts {f.get(COUNTS[1])}",
                         "one number of experts", "correct the file, or download it again")
    count, k = counts.pop(), f.positive("num_experts_per_tok")
    try: policy = Policy(k, renormalize=renormalize)
    except SpecError as error: raise ModelError(f"{f.name}: {error.found}", error.expected) from error
    if k > count:
        raise ModelError(f"{f.name}: num_experts_per_tok is {k}, of {count} experts", "as many, at most")
    return MoEConfig(count, f.positive(width), policy, tuple(layers), shared_width, shared_gate)
