"""Speculative decoding with n-gram prompt lookup, and the `--speculative` option.

Protocol: the scheduler asks a proposer for drafts of decoding sequences (`DraftRequest` in
scheduling/request.py), and tells it when a sequence is finished. The step then computes the last token and
its draft together, and samples a token after each of them exactly as without a draft: noise depends on seed,
position and token id. A draft token is accepted if it equals the token sampled at its position. The token
sampled after the last accepted one is kept, too. So the output is exactly that without drafts, greedy or not.
This is coupling instead of the rejection sampling of Leviathan et al. (arXiv 2211.17192), with the same
distribution.

`NgramProposer` looks up the last tokens in the sequence itself, and proposes what followed them there (prompt
lookup). `parse_speculative` reads `--speculative`.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinygrad_nv.engine.scheduling.request import DraftRequest
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP
from tinygrad_nv.errors import ConfigError

# a draft and the token before it fill one group, which costs as much as one token
MAX_DRAFT_TOKENS = GROUP - 1
MAX_NGRAM, MIN_NGRAM = 4, 2    # tokens of an n-gram


@dataclass
class _Index:
    """For each n-gram the position after its last occurrence, as far as `known` tokens."""
    known: int = 0
    positions: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramProposer:
    """Prompt lookup: finds the longest n-gram of `min_ngram` to `max_ngram` tokens that ends the sequence and
    occurs before, and proposes what followed its last occurrence. Costs microseconds a step and sequence, and
    three index entries a token."""

    def __init__(self, max_ngram: int = MAX_NGRAM, min_ngram: int = MIN_NGRAM) -> None:
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._indices: dict[tuple[str, int], _Index] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """A draft for each request, empty where no n-gram was found."""
        return [self._draft(each) for each in requests]

    def forget(self, key: tuple[str, int]) -> None:
        """Drops the state of a finished sequence."""
        self._indices.pop(key, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        tokens = request.tokens
        index = self._indices.setdefault(request.key, _Index())
        positions, lengths = index.positions, range(self.max_ngram, self.min_ngram - 1, -1)
        # n-grams that end before the last token; those at the end are looked up below
        for end in range(index.known + 1, len(tokens)):
            for length in lengths:
                if length <= end: positions[tuple(tokens[end - length:end])] = end
        index.known = max(index.known, len(tokens) - 1)
        for length in lengths:
            if length < len(tokens) and (at := positions.get(tuple(tokens[-length:]))) is not None:
                return repeat_from(tokens, at, request.max_tokens)
        return []


def repeat_from(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """`count` tokens from position `at` on. Past the end, the copied tokens repeat, as in periodic text."""
    made = list(tokens[at:at + count])
    period = len(tokens) - at
    while len(made) < count: made.append(made[len(made) - period])
    return made


@dataclass(frozen=True)
class SpeculativeConfig:
    """The maximum number of draft tokens, and the draft model's directory (None: n-gram lookup)."""
    tokens: int
    model: Path | None = None


def parse_speculative(text: str) -> SpeculativeConfig:
    """Parses `--speculative`: ngram:K, or draft:DIR:K with a model directory."""
    kind, _, rest = text.partition(":")
    name, colon, count = rest.rpartition(":")
    known = (kind == "ngram" and not colon) or (kind == "draft" and name)
    if not known or not re.fullmatch("[0-9]{1,9}", count) or not 1 <= int(count) <= MAX_DRAFT_TOKENS:
        raise ConfigError(f"--speculative {text[:200]}",
                          "ngram:K, or draft:DIR:K with a model's directory, and K from "
                          f"1 to {MAX_DRAFT_TOKENS} tokens", "change --speculative, or leave it out")
    return SpeculativeConfig(int(count), Path(name) if kind == "draft" else None)
