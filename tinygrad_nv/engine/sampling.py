"""What a user may ask of the sampler.

Protocol: `SamplingParams` is checked when made. `filters` says which parts of the sampler it needs, `numbers`
what a row of running/sampler.py is told of it.
"""
from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from tinygrad_nv.engine.structured_output.structured import Structured
from tinygrad_nv.errors import RequestError
from tinygrad_nv.tile.sampling.spec import NUMBERS, SEEDS, Number

# the smallest and largest normal numbers of float32
FLOAT32_MIN, FLOAT32_MAX = 2.0 ** -126, (2 - 2.0 ** -23) * 2.0 ** 127
# vLLM's bound: a logit 2e-4 below the largest is 20 below it once divided by this, and noise makes up for 19
GREEDY_BELOW = 1e-5
MOST_LOGPROBS = 20      # OpenAI's, as are the bounds of bias and penalties
MOST_BIASED = 300
_KNOBS = [Number.temperature, Number.min_p, Number.repetition_penalty, Number.presence_penalty,
          Number.frequency_penalty]


@dataclass(frozen=True)
class Filters:
    """Which parts of the sampler requests need; equal filters share a captured graph. A row that does not
    need what others of its step do is the same with it."""
    draw: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False
    bias: bool = False
    mask: bool = False

    def __or__(self, other: Filters) -> Filters:
        """What either needs."""
        return Filters(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(Filters)))


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings are vLLM's.

    `temperature` 0 is greedy (as is anything below `GREEDY_BELOW`). `top_k` 0 or -1 keeps every token.
    `top_p` in (0, 1]; `min_p` in [0, 1], relative to the likeliest token. `repetition_penalty` divides
    positive logits of tokens of prompt and output, and multiplies negative ones; `presence_penalty` is
    subtracted from those of the output, `frequency_penalty` as often as they occur there. `logit_bias` is
    added to logits, by token id. `seed` None draws a fresh one; sequence i of `n` has one of its own.

    `stop` strings end the text and are not part of it, unless `include_stop_str_in_output`; ids in
    `stop_token_ids` end it like the model's own end tokens, which `ignore_eos` disables. No end token is
    chosen before there are `min_tokens`. `logprobs` and `prompt_logprobs` ask for the logarithms of
    probabilities of so many of the likeliest tokens, besides the chosen. `structured` is what the text has to
    be (structured_output/structured.py).
    """
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    structured: Structured | None = None

    def __post_init__(self) -> None:
        self._number("temperature", 0, FLOAT32_MAX, "a number ≥ 0 (0 is greedy)")
        self._whole("top_k", -1, sys.maxsize, "a whole number ≥ 1, or 0 for every token")
        self._number("top_p", 0, 1, "a number in (0, 1]", above=True)
        self._number("min_p", 0, 1, "a number in [0, 1]")
        self._number("repetition_penalty", 0, FLOAT32_MAX, "a number > 0 (1 is none)", above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -2, 2, "a number in [-2, 2] (0 is none)")
        self._whole("n", 1, sys.maxsize, "a whole number ≥ 1")
        self._whole("max_tokens", 1, sys.maxsize, "a whole number ≥ 1", optional=True)
        most = sys.maxsize if self.max_tokens is None else self.max_tokens
        self._whole("min_tokens", 0, sys.maxsize, "a whole number ≥ 0")
        self._range("min_tokens", self.min_tokens <= most, f"at most max_tokens, {most}")
        self._whole("seed", 0, (1 << 64) - 1, "a whole number in [0, 2^64)", optional=True)
        for name in ("logprobs", "prompt_logprobs"):
            self._whole(name, 0, MOST_LOGPROBS, f"a whole number from 0 to {MOST_LOGPROBS}", optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            self._range(name, isinstance(getattr(self, name), bool), "True or False")
        self._range("stop", isinstance(self.stop, tuple | list)
                    and all(isinstance(each, str) and each for each in self.stop), "non-empty strings")
        self._range("stop_token_ids", isinstance(self.stop_token_ids, tuple | list)
                    and all(_is_whole(each) and each >= 0 for each in self.stop_token_ids), "token ids")
        self._range("structured", self.structured is None or isinstance(self.structured, Structured),
                    "a Structured")
        self._biases()

    def _biases(self) -> None:
        bias = self.logit_bias
        self._range("logit_bias", isinstance(bias, Mapping) and all(_is_whole(i) and i >= 0 for i in bias),
                    "a bias for token ids")
        if len(bias) > MOST_BIASED:
            raise RequestError(f"logit_bias has {len(bias)} entries", f"at most {MOST_BIASED}",
                               "change logit_bias")
        for i, each in bias.items():
            if not (_is_number(each) and -100 <= each <= 100):
                raise RequestError(f"logit_bias of token {i} is {each!r}", "a number in [-100, 100]",
                                   "change logit_bias")

    def _number(self, name: str, low: float, high: float, expected: str, above: bool = False) -> None:
        x = getattr(self, name)
        self._range(name, _is_number(x) and low <= x <= high and not (above and x == low), expected)

    def _whole(self, name: str, low: int, high: int, expected: str, optional: bool = False) -> None:
        x = getattr(self, name)
        self._range(name, (x is None and optional) or (_is_whole(x) and low <= x <= high), expected)

    def _range(self, name: str, holds: bool, expected: str) -> None:
        if not holds: raise RequestError(f"{name} is {getattr(self, name)!r}", expected, f"change {name}")

    @property
    def filters(self) -> Filters:
        """What the device has to compute."""
        draw = self.temperature >= GREEDY_BELOW
        penalty = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return Filters(draw, draw and self.top_k > 0, draw and self.top_p < 1, draw and self.min_p > 0,
                       penalty, bool(self.logit_bias))

    def require_vocabulary(self, size: int) -> None:
        """Raises `RequestError` for a bias of a token that a vocabulary of so many has not."""
        if bad := [i for i in self.logit_bias if i >= size]:
            raise RequestError(f"logit_bias has token id {bad[0]}, which is not in the vocabulary",
                               f"0 to {size - 1}", "use ids of this model's tokenizer")

    def numbers(self, seed: int) -> np.ndarray:
        """A row's numbers, float32 [NUMBERS], in the order of `Number`. What a greedy request does not need
        is none."""
        made = np.zeros(NUMBERS, np.float32)
        # a number that float32 rounds to 0 would divide by it, or be none
        for i in _KNOBS: made[i] = (x := getattr(self, i.name)) and (max(x, FLOAT32_MIN) if x > 0 else x)
        used = self.filters
        if not used.draw: made[[Number.temperature, Number.min_p]] = 0
        made[Number.top_k] = self.top_k if used.top_k else np.inf
        made[Number.top_p] = max(self.top_p, FLOAT32_MIN) if used.top_p else np.inf
        made[Number.seed:] = [seed >> 16 * i & 0xFFFF for i in range(SEEDS)]
        return made


def _is_number(x: object) -> bool: return isinstance(x, int | float) and not isinstance(x, bool)


def _is_whole(x: object) -> bool: return isinstance(x, int) and not isinstance(x, bool)


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(32)
