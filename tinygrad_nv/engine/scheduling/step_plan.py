"""A step while it is assembled, and as it is launched.

Protocol: the scheduler adds sequences to a `StepPlan`, which counts what is left of the step's budgets, takes
some out again, and makes a `ScheduledStep` of the rest. `TokenMasks` are the masks of a sequence that may not
end yet, packed as `Sample.mask`: bit i % 32 of word i // 32 for token i.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tinygrad_nv.engine.scheduling.request import Seq, pad_tokens
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, SchedulerOutput

if TYPE_CHECKING:
    from tinygrad_nv.models.peft import Adapter


@dataclass
class ScheduledStep:
    """A batch and its sequences. `drafted`: those with draft tokens. Before the launch, the slots of
    `started` are to be set, then those of the branches of `forked`; `adapters` are put into their slots.
    `needs_sync`: the output must be processed before the next step is scheduled. `number`: the pool's batch
    number."""
    batch: SchedulerOutput
    seqs: list[Seq]
    drafted: frozenset[Seq]
    started: list[Seq]
    forked: list[Seq]
    needs_sync: bool
    number: int
    adapters: tuple[tuple[int, Adapter], ...] = ()


@dataclass
class StepPlan:
    """A step being assembled."""
    token_budget: int
    logits_budget: int              # prompt tokens whose logits are computed
    single_tokens: bool = False     # decodes leave less than a group of the budget
    num_tokens: dict[Seq, int] = field(default_factory=dict)
    drafts: dict[Seq, Sequence[int]] = field(default_factory=dict)
    masks: dict[Seq, Sequence[np.ndarray | None]] = field(default_factory=dict)

    def add(self, seq: Seq, num_tokens: int) -> None:
        """Schedules `num_tokens` tokens of the sequence."""
        self.num_tokens[seq] = num_tokens
        self.token_budget -= pad_tokens(num_tokens)
        self.logits_budget -= len(seq.logits_range(seq.num_scheduled, seq.num_scheduled + num_tokens))

    def chunk_size(self, seq: Seq, start: int) -> int:
        """How many tokens from `start` on to schedule: whole groups, except for the last chunk; one, if
        decodes leave no more of the budget; 0 if none is left."""
        left = len(seq.tokens) - start
        if left == 1 or self.single_tokens: made = min(1, self.token_budget)
        else: made = min(left, self.token_budget // GROUP * GROUP)
        wanted = seq.logits_range(start, start + made)
        if len(wanted) <= self.logits_budget: return made
        return (wanted.start + self.logits_budget - start) // GROUP * GROUP

    def remove(self, seq: Seq) -> None:
        """Takes the sequence out of the step."""
        if not (num_tokens := self.num_tokens.pop(seq, 0)): return
        self.token_budget += pad_tokens(num_tokens)
        self.logits_budget += len(seq.logits_range(seq.num_scheduled, seq.num_scheduled + num_tokens))


class TokenMasks:
    """Token masks of a vocabulary of `size` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._without: dict[frozenset[int], np.ndarray] = {}

    def without(self, tokens: frozenset[int]) -> np.ndarray:
        """The mask of all tokens but these."""
        if (made := self._without.get(tokens)) is None:
            # bounded, since clients choose stop tokens
            if len(self._without) >= 256: self._without.clear()
            allowed = np.ones(-(-self.size // 32) * 32, np.uint8)
            allowed[[token for token in tokens if 0 <= token < self.size]] = 0
            made = self._without[tokens] = np.packbits(allowed, bitorder="little").view(np.uint32)
        return made

    def of(self, seq: Seq, position: int, mask: np.ndarray | None) -> np.ndarray | None:
        """The token mask at `position` of a sequence whose structured output allows `mask`. None allows every
        token."""
        mask = mask
        if position >= seq.min_length or not seq.stop_ids: return mask
        without = self.without(seq.stop_ids)
        if mask is None: return without
        # a complete structured output can only end, even before min_tokens
        return both if (both := mask & without).any() else mask
