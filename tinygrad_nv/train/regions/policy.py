"""Policies of what a region keeps for its backward pass, beside its inputs.

    none       everything: there is no region
    full       nothing
    dots       results of matmuls and of attention
    selective  results of attention, and of matmuls the first, third, fifth … of a region in the order in
               which they are computed: the rule of torchtitan's selective checkpoints
    offload    nothing, and inputs are on the host in between, but those of the last region
    budget     of all values those that cost most to compute again for their bytes, with the inputs up to a
               share of what none keeps
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.errors import ConfigError

POLICIES = ("full", "selective", "dots", "offload", "none")
BUDGET = "budget"


@dataclass(frozen=True)
class Policy:
    """One of `POLICIES`, or a budget from 0 (as full) to 1 (as none). Raises `ConfigError` for others."""
    name: str = "full"
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            if not 0 <= self.budget <= 1:
                raise ConfigError(f"budget {self.budget}", "a share from 0 to 1 of what is kept without "
                                  "regions", "0.5 keeps at most half")
        elif self.name not in POLICIES:
            raise ConfigError(f"policy {self.name!r}", f"{', '.join(POLICIES)}, or a budget from 0 to 1",
                              "choose one")

    @staticmethod
    def read(text: str) -> Policy:
        """Returns the policy of an option: a policy's name, or a budget as a number. Raises `ConfigError`."""
        try: return Policy(BUDGET, float(text))
        except ValueError: return Policy(text)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is computed again."""
        return self.budget == 1 or (self.budget is None and self.name == "none")
