"""Guesses of the next tokens, which a step verifies all at once.

Protocol: a proposer is asked for drafts of the sequences that decode (scheduling/request.py's `Asked`), and
told when one is over. A step then computes the last token and its draft together, and chooses a token after
each of them as it would have alone: noise depends on seed, place and token, so a draft's token is right if it
is the one that is chosen there, and what is chosen after the last right one is kept too. So tokens are
exactly those without drafts, greedy or not: coupling in place of the rejection of Leviathan et al. (arXiv
2211.17192), with the same distribution, and the same tokens by seed. A proposer can only cost or save time.

`NGrams` looks the last tokens up in what the sequence holds already, and copies what followed them there
(prompt lookup). `drafting` reads the words of `--speculative`.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinygrad_nv.engine.scheduling.batch import GROUP
from tinygrad_nv.engine.scheduling.request import Asked
from tinygrad_nv.errors import ConfigError

# a draft and the token before it are one group of rows: as much work as the first of them
MOST = GROUP - 1
LONGEST, SHORTEST = 4, 2    # tokens that are looked up


@dataclass
class _Index:
    """Of each run of tokens the place behind its last occurrence, as far as `known` tokens."""
    known: int = 0
    places: dict[tuple[int, ...], int] = field(default_factory=dict)


class NGrams:
    """Copies of what followed the same tokens before: the longest run of `shortest` to `longest`, and its
    last occurrence. Costs microseconds a step and sequence, and memory of three places a token."""

    def __init__(self, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        self.longest, self.shortest = longest, shortest
        self._indices: dict[tuple[str, int], _Index] = {}

    def propose(self, asked: Sequence[Asked]) -> list[list[int]]:
        """A draft for each, empty where nothing was found."""
        return [self._draft(each) for each in asked]

    def forget(self, key: tuple[str, int]) -> None:
        """The sequence is over."""
        self._indices.pop(key, None)

    def _draft(self, asked: Asked) -> list[int]:
        tokens = asked.tokens
        index = self._indices.setdefault(asked.key, _Index())
        places, lengths = index.places, range(self.longest, self.shortest - 1, -1)
        # runs that end before the last token: the last ones are what is looked for
        for end in range(index.known + 1, len(tokens)):
            for length in lengths:
                if length <= end: places[tuple(tokens[end - length:end])] = end
        index.known = max(index.known, len(tokens) - 1)
        for length in lengths:
            if length < len(tokens) and (at := places.get(tuple(tokens[-length:]))) is not None:
                return copied(tokens, at, asked.most)
        return []


def copied(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """`count` tokens from place `at` on; behind the last one it goes on with the copy, as a text that repeats
    itself does."""
    made = list(tokens[at:at + count])
    period = len(tokens) - at
    while len(made) < count: made.append(made[len(made) - period])
    return made


@dataclass(frozen=True)
class Speculation:
    """How many tokens are guessed, at most, and by which model: None for the sequence's own tokens."""
    tokens: int
    model: Path | None = None


def drafting(text: str) -> Speculation:
    """`--speculative`'s words: ngram:K, or draft:DIR:K with a model's directory."""
    kind, _, rest = text.partition(":")
    name, colon, count = rest.rpartition(":")
    known = (kind == "ngram" and not colon) or (kind == "draft" and name)
    if not known or not count.isascii() or not count.isdigit() or not 1 <= int(count) <= MOST:
        raise ConfigError(f"--speculative {text}", f"ngram:K, or draft:DIR:K with a model's directory, and K "
                          f"from 1 to {MOST} tokens", "change --speculative, or leave it out")
    return Speculation(int(count), Path(name) if kind == "draft" else None)
