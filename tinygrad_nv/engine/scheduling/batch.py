"""What a step computes and what comes back: the words between scheduling and the device.

Protocol. A `Batch` is one step. Its `Work`s are sequences, each with some new tokens at places start, start
+ 1, …: one for a sequence that decodes, more for a chunk of a prompt or a draft that is verified. Before it
computes, the device copies the pages in `moves`, in order. Then it writes keys and values of all new tokens
into `pages` of their works, and for each `Sample` chooses a token by the logits of one of its work's rows.

A `slot` is a sequence's place on the device, below the most sequences that run at a time. It keeps what a
later step needs before the host knows it: the token chosen last (a work without `tokens` begins with it), and
counts of tokens for penalties. `Sample.slot` says whose numbers choose, and who keeps the token: after a fork
several samples choose from one row, each for a slot of its own.

Rows are computed in groups of `GROUP` for works of more than one token: their pages cover start + tokens,
rounded up to whole groups from `start`. What is written there behind the last token nobody sees, and it is
written again when its token comes.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tinygrad_nv.kvcache.pages import Move

GROUP = 8       # rows of a request that attention over pages takes at once


class Sample(NamedTuple):
    """A token to be chosen: by the logits of the work's row `row`, for `slot`. It will stand at `place`,
    which with the seed selects the noise. `mask`, packed uint32 [⌈vocab / 32⌉], allows tokens, bit i % 32 of
    word i // 32 for token i; None allows all. `logprobs`: how many of the likeliest to tell, besides the
    chosen; None for none at all."""
    row: int
    slot: int
    place: int
    mask: np.ndarray | None = None
    logprobs: int | None = None


class Work(NamedTuple):
    """A sequence's part of a step: `tokens` (empty: one, the slot's last chosen) at places start, start + 1,
    … over its block table `pages`, the same object as long as the table does not change. (A tuple, as
    `Sample` is: a step makes one for each sequence, in half the time of a frozen dataclass.)"""
    slot: int
    start: int
    tokens: Sequence[int]
    pages: Sequence[int]
    samples: tuple[Sample, ...] = ()

    @property
    def rows(self) -> int:
        """How many new tokens there are."""
        return max(1, len(self.tokens))


@dataclass(frozen=True)
class Batch:
    """A step."""
    works: tuple[Work, ...]
    moves: tuple[Move, ...] = ()

    @property
    def rows(self) -> int:
        """New tokens of all works."""
        return sum(work.rows for work in self.works)

    @property
    def samples(self) -> int:
        """Tokens chosen."""
        return sum(len(work.samples) for work in self.works)


@dataclass(frozen=True)
class Logprobs:
    """Natural logarithms of probabilities, by the model's logits as they are before any filter: the chosen
    token's, its rank (1: the likeliest), and the likeliest tokens with theirs, best first."""
    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Sampled:
    """What a step chose: int32 [samples], in the order of the batch's works and their samples; logprobs by
    the sample's number. A token ≥ vocab says that the logits were not numbers."""
    tokens: np.ndarray
    logprobs: dict[int, Logprobs] = field(default_factory=dict)
