"""Beam search, as vLLM defines it.

Protocol: `Search(tokens, params, eos)` holds the beams of one prompt. Each round, `beams` are continued by
one token; `extend` is told the likeliest next tokens of each, with their log probabilities, and keeps the
`beam_width` best of all. A beam that ends at an end token is put aside. `best` are the best of both at last.

A score is cum_logprob / length ** length_penalty, where length counts all tokens, the prompt's too, but no
end token. (transformers counts new tokens alone, and stops when no beam can become better: the beams are
the same where end tokens are ignored.)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.engine.logprobs import Logprob
from tinygrad_nv.engine.sampling import MAX_LOGPROBS, SamplingParams
from tinygrad_nv.errors import RequestError


@dataclass(frozen=True)
class BeamSearchParams:
    """`beam_width` beams, of at most `max_tokens` new tokens each. `ignore_eos`: end tokens end none.
    `temperature` above 0: each beam's candidates have a sampled token among them, too.
    `skip_special_tokens` leaves these out of the texts."""
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        widest = MAX_LOGPROBS // 2  # each beam is continued by 2 · beam_width tokens
        for name, most in (("beam_width", widest), ("max_tokens", None)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < 1 or (most is not None and value > most):
                raise RequestError(f"{name} is {value!r}", f"a whole number from 1 to {most}" if most else
                                   "a whole number ≥ 1", f"change {name}")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise RequestError(f"length_penalty is {self.length_penalty!r}", "a number",
                               "change length_penalty")
        if self.structured_outputs is not None:
            raise RequestError("structured_outputs of a beam search", "none: beams take any token",
                               "leave it out, or call generate")
        _ = self.sampling       # checks the temperature

    @property
    def sampling(self) -> SamplingParams:
        """How a beam's candidates are asked for."""
        return SamplingParams(temperature=self.temperature, max_tokens=1, logprobs=2 * self.beam_width,
                              ignore_eos=True, detokenize=False)


@dataclass
class BeamSearchSequence:
    """A beam: `tokens` with the prompt's, `logprobs` of the new ones, their sum, and the text of all tokens.
    The finish reason is "stop" of one that ended at an end token."""
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def then(self, token: int, found: dict[int, Logprob]) -> BeamSearchSequence:
        """Returns this beam with one more token, of the candidates `found`."""
        return BeamSearchSequence([*self.tokens, token], [*self.logprobs, found],
                                  self.cum_logprob + found[token].logprob)

    def score(self, eos: Sequence[int], length_penalty: float) -> float:
        """By which beams are compared."""
        return self.cum_logprob / max(1, len(self.tokens) - (self.tokens[-1] in eos)) ** length_penalty


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, the best one first."""
    sequences: list[BeamSearchSequence]


class Search:
    """The beams of one prompt."""

    def __init__(self, tokens: Sequence[int], params: BeamSearchParams, eos: Sequence[int]) -> None:
        self.params, self.eos = params, eos
        self.beams = [BeamSearchSequence([*tokens], [])]
        self.ended: list[BeamSearchSequence] = []

    def extend(self, found: Sequence[dict[int, Logprob]]) -> None:
        """The next round; `found` are the candidates of each beam."""
        going = []
        for beam, candidates in zip(self.beams, found, strict=True):
            for token in candidates:
                made = beam.then(token, candidates)
                if token in self.eos and not self.params.ignore_eos:
                    made.finish_reason, made.stop_reason = "stop", token
                    self.ended.append(made)
                else: going.append(made)
        self.beams = self._sort_by_score(going)[:self.params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        """The best beams, ended or not."""
        for beam in self.beams: beam.finish_reason = "length"
        return self._sort_by_score([*self.ended, *self.beams])[:self.params.beam_width]

    def _sort_by_score(self, beams: Sequence[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def score(beam: BeamSearchSequence) -> float: return beam.score(self.eos, self.params.length_penalty)
        return sorted(beams, key=score, reverse=True)
