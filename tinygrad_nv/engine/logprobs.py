"""Log probabilities as vLLM's programs read them.

Protocol: of each token a dictionary from token ids to `Logprob`s, the sampled token, or the prompt's, first,
then the likeliest. `collect(found, params)` makes a list of them, or `FlatLogprobs`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.engine.sampling import SamplingParams

APPENDED = "FlatLogprobs are only appended to"


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token, its rank (1: the likeliest), and its text."""
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(MutableSequence[dict[int, Logprob] | None]):
    """A list of dictionaries, kept as lists of numbers: so many objects are slow to collect. Candidates of
    place i are those from `start_indices[i]` to `end_indices[i]` − 1; a first token of a prompt has none.
    Places can be appended alone."""
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, value: dict[int, Logprob] | None) -> None:
        """Adds a place."""
        self.add((value or {}).items())

    def add(self, candidates: Iterable[tuple[int, Logprob]]) -> None:
        """Adds a place with its candidates; the sampled token may come again among the likeliest."""
        self.start_indices.append(len(self.token_ids))
        for token, each in candidates:
            self.token_ids.append(token)
            self.logprobs.append(each.logprob)
            self.ranks.append(each.rank)
            self.decoded_tokens.append(each.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int: return len(self.start_indices)

    def __getitem__(self, index: Any) -> Any:
        """The dictionary of a place, empty for a first token of a prompt; the places of a slice."""
        if not isinstance(index, slice):
            places = range(self.start_indices[index], self.end_indices[index])
            return {self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
                    for at in places}
        made = FlatLogprobs()
        made.extend(self[at] for at in range(len(self))[index])
        return made

    def __setitem__(self, index: Any, value: Any) -> None: raise TypeError(APPENDED)

    def __delitem__(self, index: Any) -> None: raise TypeError(APPENDED)

    def insert(self, index: int, value: Any) -> None:
        """Raises TypeError, as vLLM's."""
        raise TypeError(APPENDED)


def collect(found: Iterable[TokenLogprobs], params: SamplingParams, of_prompt: bool = False
            ) -> MutableSequence[Any]:
    """Returns the log probabilities of tokens as `params` ask for them; those of a prompt begin with none."""
    if params.flat_logprobs:
        flat = FlatLogprobs()
        if of_prompt: flat.append(None)
        for each in found: flat.add(_candidates(each, params.detokenize))
        return flat
    return [None] * of_prompt + [of_token(each, params.detokenize) for each in found]


def of_token(found: TokenLogprobs, with_texts: bool = True) -> dict[int, Logprob]:
    """The dictionary of a token."""
    made: dict[int, Logprob] = {}
    for token, each in _candidates(found, with_texts): made.setdefault(token, each)
    return made


def _candidates(found: TokenLogprobs, with_texts: bool) -> Iterator[tuple[int, Logprob]]:
    """The token, and the likeliest."""
    yield found.token, Logprob(found.logprob, found.rank, found.text if with_texts else None)
    for rank, (token, text, value) in enumerate(found.top, 1):
        yield token, Logprob(value, rank, text if with_texts else None)
