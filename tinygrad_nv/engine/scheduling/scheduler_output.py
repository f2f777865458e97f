"""The interface between scheduler and model runner: what a step computes, and what comes back.

Protocol. A `SchedulerOutput` is one step. Each `ScheduledSeq` is a sequence with new tokens at positions
start, start + 1, …: one token for a decode, more for a chunk of a prompt (chunked prefill) or for a draft to
verify. The device first performs the page copies in `copies`, in order. It then writes keys and values of all
new tokens into the pages of their block tables, and for each `Sample` samples a token from the logits of one
of the sequence's new tokens.

A `slot` is a sequence's index on the device, below the maximum number of running sequences. The device keeps
for each slot what a later step needs before the host knows it: the token sampled last (a `ScheduledSeq`
without `tokens` starts with it), and token counts for penalties. `Sample.slot` selects the sampling
parameters, and the slot that keeps the token: after a fork, several samples read one token's logits, each for
its own slot. A sample with a `target` has slot −1: it is computed for the log probability of that token, and
what it samples is dropped.

Sequences with more than one new token are computed in groups of `GROUP` tokens. Their block table covers
start + tokens, rounded up to whole groups from `start`. No token attends to what the padding writes, and it
is overwritten when the real token comes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinygrad_nv.kvcache.page_allocator import PageCopy
from tinygrad_nv.kvcache.state_table import StateStep

if TYPE_CHECKING:
    from tinygrad_nv.engine.vision.prompt import PromptImages

GROUP = 8       # query tokens of one sequence that paged attention computes together
# prompt tokens of a step whose logits are computed: 32 MiB of them with 128Ki tokens in the vocabulary
PROMPT_LOGITS = 64


def max_samples(max_seqs: int) -> int:
    """Samples of a step: one for each sequence, and at least a group of prompt tokens or of drafts."""
    return GROUP * max(2, max_seqs)


def decode_rows(max_seqs: int) -> list[int]:
    """Numbers of decodes that a step with prompt chunks is captured for: others are padded."""
    return sorted({min(each, max_seqs) for each in (GROUP, 2 * GROUP, 4 * GROUP, max_seqs)})


def pad_decodes(count: int, max_seqs: int, budget: int) -> int:
    """Returns how many of a step's tokens its decodes take: with their padding, which is computed as well,
    where that leaves half of the budget to prompts."""
    if not count: return 0
    padded = 1 << (next(each for each in decode_rows(max_seqs) if each >= count) - 1).bit_length()
    return padded if 2 * padded <= budget else count


def max_prompt_logits(max_seqs: int) -> int:
    """Samples of a step that may be prompt tokens."""
    return min(PROMPT_LOGITS, max_samples(max_seqs) - max_seqs)


class Sample(NamedTuple):
    """A token to sample from the logits of the sequence's new token number `token_index`, for `slot`. The
    token will be at `position`, which together with the seed determines the sampling noise. `mask`, packed
    uint32 [⌈vocab / 32⌉], is a token mask: bit i % 32 of word i // 32 allows token i; None allows all.
    `logprobs`: how many of the likeliest tokens to report besides the sampled one, or which tokens; None
    reports nothing.
    `target`: the token to report instead of the sampled one."""
    token_index: int
    slot: int
    position: int
    mask: np.ndarray | None = None
    logprobs: int | tuple[int, ...] | None = None
    target: int | None = None


class ScheduledSeq(NamedTuple):
    """The new tokens of a sequence in a step: `tokens` (empty: one, the slot's last sampled token) at
    positions start, start + 1, … `block_table` is the same object as long as the table does not change; with
    several groups of layers it has their entries one group after the other, equally many of each. `adapter`:
    the slot of its adapter, −1 without one. `images` of its prompt, if it has some. `states`: its pages of
    states, of a model that has such. (A tuple, as `Sample` is:
    a step creates one for each sequence, in half the time of a frozen dataclass.)"""
    slot: int
    start: int
    tokens: Sequence[int]
    block_table: Sequence[int]
    samples: tuple[Sample, ...] = ()
    adapter: int = -1
    images: PromptImages | None = None
    states: StateStep | None = None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return max(1, len(self.tokens))


@dataclass(frozen=True)
class SchedulerOutput:
    """One step."""
    seqs: tuple[ScheduledSeq, ...]
    copies: tuple[PageCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(seq.num_tokens for seq in self.seqs)

    @property
    def num_samples(self) -> int:
        """Tokens to sample."""
        return sum(len(seq.samples) for seq in self.seqs)


@dataclass(frozen=True)
class Logprobs:
    """Natural log probabilities, from the model's logits before any filter: that of the sampled token, or
    of the target (`chosen`), its rank (1: the likeliest), and with theirs the likeliest tokens, best first,
    or those that were asked for."""
    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens of a step, int32 [samples], in the order of the sequences and their samples; log
    probabilities by sample number, none where the logits were NaN. A token ≥ vocab means the same."""
    tokens: np.ndarray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
