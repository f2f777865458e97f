"""`SamplingParams`: the sampling options of a request.

Protocol: `SamplingParams` is checked when created; None, and a single stop string, are put as what they stand
for. `filters` says which parts of the sampler it needs,
`numbers` are its parameters in the layout of worker/sampler.py.
"""
from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any

import numpy as np

from tinygrad_nv.engine.structured_output.params import ReasoningTokens, StructuredOutputsParams
from tinygrad_nv.errors import RequestError
from tinygrad_nv.tile.sampling.spec import NUMBERS, SEEDS, Number

# the smallest and largest normal numbers of float32
FLOAT32_MIN, FLOAT32_MAX = 2.0 ** -126, (2 - 2.0 ** -23) * 2.0 ** 127
# vLLM's bound: divided by this, a logit 2e-4 below the largest is 20 below it, more than the noise's 19
GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20       # OpenAI's bounds, also for bias and penalties
MAX_LOGPROB_TOKEN_IDS = 128     # vLLM's bound
MAX_BIASED_TOKENS = 300
MAX_BAD_WORDS = 1000            # limit: bad words of a request
# each is tokenized twice, and followed in answers
MAX_BAD_WORD_CHARACTERS = 64 << 10      # limit: characters of all bad words of a request
# each new token is compared with all of it
MAX_STOP_CHARACTERS = 1024      # limit: characters of a stop string
# vocabularies have up to half of that
MAX_TOKEN_IDS = 1 << 19         # limit: token ids in stop_token_ids, or in allowed_token_ids
MAX_TEMPERATURE = 2     # vLLM's and OpenAI's
# each new token is compared with so many patterns
MAX_PATTERN = 1024      # limit: tokens of a pattern of repetition_detection
# fields of vLLM that are None here, and why
UNSET = {"logits_processors": "logits stay on the device; logit_bias, allowed_token_ids, bad_words and "
                              "structured_outputs are there",
         "guided_decoding": "structured_outputs stands for it",
         **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start"),
                         "log probabilities of prompts are of the likeliest tokens"),
         "trace_decode_token_ids": "tokens are sampled"}
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize",
         "spaces_between_special_tokens", "flat_logprobs", "skip_reading_prefix_cache")
LAST = "logits_processors"      # the last field
_SLOT_NUMBERS = [Number.temperature, Number.min_p, Number.repetition_penalty, Number.presence_penalty,
                 Number.frequency_penalty]


@dataclass(frozen=True)
class Filters:
    """Parts of the sampler that requests need. Equal filters share a captured graph. A row's token does not
    change when its step uses more filters than the row needs."""
    draw: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False
    bias: bool = False
    mask: bool = False

    def __or__(self, other: Filters) -> Filters:
        """The union."""
        return Filters(*(getattr(self, f.name) or getattr(other, f.name) for f in fields(Filters)))

    @property
    def ordering(self) -> bool:
        """Whether a filter depends on the order of all of a row's logits: one that has a part of them does
        not suffice."""
        return self.top_k or self.top_p


class RequestOutputKind(Enum):
    """Outputs that vLLM returns while a request runs. A finished answer, as `LLM.generate` has it, is the
    same for all; streams of this package are deltas."""
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class RepetitionDetectionParams:
    """Ends an answer whose last tokens repeat: a pattern of `min_pattern_size` to `max_pattern_size` tokens
    (0: none), `min_count` times in a row."""
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        sizes = self.min_pattern_size, self.max_pattern_size, self.min_count
        whole = all(map(_is_whole, sizes)) and 0 <= self.min_pattern_size <= self.max_pattern_size
        if not whole or (self.max_pattern_size and self.min_count < 2) or self.max_pattern_size > MAX_PATTERN:
            raise RequestError(f"repetition_detection is {self!r:.200}",
                               f"0 ≤ min_pattern_size ≤ max_pattern_size ≤ {MAX_PATTERN}, and min_count ≥ 2",
                               "change repetition_detection")

    def finds(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the tokens from `start` on end with a repeated pattern."""
        for size in range(max(1, self.min_pattern_size), self.max_pattern_size + 1):
            if (first := len(tokens) - size * self.min_count) < start: return False
            if tokens[first:-size] == tokens[first + size:]: return True
        return False


@dataclass
class SamplingParams:
    """How to sample tokens and when to stop. Names, order, meanings and defaults are vLLM's.

    `temperature` 0 is greedy (as is anything below `GREEDY_BELOW`). `top_k` 0 or -1 keeps every token.
    `top_p` in (0, 1]; `min_p` in [0, 1], relative to the likeliest token. `repetition_penalty` divides
    positive logits of tokens in the prompt or output, and multiplies negative ones. `presence_penalty` is
    subtracted from the logits of tokens in the output, `frequency_penalty` once for each occurrence.
    `logit_bias` is added to logits, by token id. `seed` None or -1 draws a random one; sequence i of `n` uses
    seed + i.

    `stop` strings end the text and are not part of it, unless `include_stop_str_in_output`. Ids in
    `stop_token_ids` end it like the model's own end tokens, which `ignore_eos` disables. No end token is
    sampled before `min_tokens` tokens. `logprobs` and `prompt_logprobs` request log probabilities of so many
    of the likeliest tokens, besides the sampled one, as `FlatLogprobs` with `flat_logprobs`, and
    `logprob_token_ids` those of these tokens in place of the likeliest. Nothing of a prompt with
    `skip_reading_prefix_cache` is taken from the prefix cache.

    `structured_outputs` constrains the output (structured_output/params.py), with `reasoning` what comes
    after the model's reasoning, whose tokens may be bounded (structured_output/after_reasoning.py). Only
    `allowed_token_ids` are sampled, if there are any, and none that completes one of `bad_words` (a text,
    also with a blank before it) in the output. A prompt is cut off at its beginning so that it has at most
    `truncate_prompt_tokens` tokens (-1: what the context holds). `skip_special_tokens` leaves special tokens
    out of the text, and without `detokenize` there is none. `best_of` is `n`. `watermarking`,
    `stream_interval`, `skip_clone`, `extra_args`, `output_kind`, `spaces_between_special_tokens` and
    `routed_experts_prompt_start` are for parts of vLLM, and change nothing. The fields of `UNSET` are None.

    A field that is set later is checked, too. Requests keep the values that they were made with."""
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: None = None
    prompt_logprob_start: None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] = field(default_factory=list)
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: None = None
    # older names of vLLM, and what its server has beside the class
    reasoning: ReasoningTokens | None = None
    truncate_prompt_tokens: int | None = None
    best_of: int | None = None
    guided_decoding: None = None
    logits_processors: None = None

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else _as_list(self.stop)
        self._set(stop=stop, stop_token_ids=_as_list(self.stop_token_ids), bad_words=_as_list(self.bad_words),
                  seed=None if self.seed == -1 else self.seed,
                  **{name: None for name in UNSET if getattr(self, name) == []},
                  thinking_token_budget=None if self.thinking_token_budget == -1 else
                  self.thinking_token_budget)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True: self._set(**{name: 1})
        if self.allowed_token_ids is not None: self._set(allowed_token_ids=_as_list(self.allowed_token_ids))
        self._set(logprob_token_ids=_as_list(self.logprob_token_ids) or None)
        if self.skip_reading_prefix_cache is None:
            self._set(skip_reading_prefix_cache=self.prompt_logprobs is not None)
        for name in FLAGS:
            if (value := getattr(self, name)) is None or (value in (0, 1)): self._set(**{name: bool(value)})
        self._check_number("temperature", 0, MAX_TEMPERATURE,
                           f"a number from 0 (greedy) to {MAX_TEMPERATURE}")
        self._check_integer("top_k", -1, sys.maxsize, "a whole number ≥ 1, or 0 for every token")
        self._check_number("top_p", 0, 1, "a number in (0, 1]", above=True)
        self._check_number("min_p", 0, 1, "a number in [0, 1]")
        self._check_number("repetition_penalty", 0, FLOAT32_MAX,
                           "a number > 0 and at most 3.4e38 (1 is none)", above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, -2, 2, "a number in [-2, 2] (0 is none)")
        self._check_integer("n", 1, sys.maxsize, "a whole number ≥ 1")
        self._check_integer("max_tokens", 1, sys.maxsize, "a whole number ≥ 1", optional=True)
        most = sys.maxsize if self.max_tokens is None else self.max_tokens
        self._check_integer("min_tokens", 0, sys.maxsize, "a whole number ≥ 0")
        self._require("min_tokens", self.min_tokens <= most, f"at most max_tokens, {most}")
        self._check_integer("seed", -(1 << 63), (1 << 64) - 1, "a whole number in [-2^63, 2^64)",
                            optional=True)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_integer(name, 0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}",
                                optional=True)
        self._check_integer("truncate_prompt_tokens", -1, sys.maxsize, "a whole number ≥ 1, or -1",
                            optional=True)
        for name in FLAGS: self._require(name, isinstance(getattr(self, name), bool), "True or False")
        for name, low in (("stream_interval", 1), ("thinking_token_budget", 0)):
            self._check_integer(name, low, sys.maxsize, f"a whole number ≥ {low}", optional=True)
        for name in ("stop", "bad_words"):
            self._require(name, isinstance(texts := getattr(self, name), list)
                          and all(isinstance(each, str) and each for each in texts), "non-empty strings")
        for name, most_ids in (("stop_token_ids", MAX_TOKEN_IDS), ("allowed_token_ids", MAX_TOKEN_IDS),
                               ("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS)):
            self._require(name, (ids := getattr(self, name)) is None or (isinstance(ids, list)
                          and _are_ids(ids)), "token ids")
            self._require_length(name, len(ids or ()), most_ids, "token ids")
        self._check_unusual()
        self._require("structured_outputs", self.structured_outputs is None
                      or isinstance(self.structured_outputs, StructuredOutputsParams),
                      "StructuredOutputsParams")
        self._check_logit_bias()
        self._set(stop_token_ids=list(dict.fromkeys(self.stop_token_ids)),
                  bad_words=list(dict.fromkeys(self.bad_words)))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__:
            near = get_close_matches(name, type(self).__dataclass_fields__, 1)
            raise RequestError(f"SamplingParams has no field {name!r}", "those of docs/vllm.md",
                               f"did you mean {near[0]}?" if near else f"leave {name} out")
        before = dict(vars(self))
        object.__setattr__(self, name, value)
        if LAST not in before: return   # `__init__` sets the fields in order
        try: self.__post_init__()
        except RequestError:
            vars(self).update(before)
            raise

    def _check_unusual(self) -> None:
        self._require("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "a whole number ≥ 1, or -1")
        self._require("allowed_token_ids", self.allowed_token_ids != [], "at least one token id, or None")
        self._require_length("bad_words", len(self.bad_words), MAX_BAD_WORDS, "texts")
        self._require_length("bad_words", sum(map(len, self.bad_words)), MAX_BAD_WORD_CHARACTERS,
                             "characters in all")
        self._require_length("stop", max(map(len, self.stop), default=0), MAX_STOP_CHARACTERS,
                             "characters in a string")
        self._require("stop", not self.stop or self.detokenize, "none without detokenize")
        self._require("best_of", self.best_of in (None, self.n), f"n, {self.n}: answers are not chosen among")
        for name, why in UNSET.items(): self._require(name, getattr(self, name) is None, f"None: {why}")
        self._require("output_kind", isinstance(self.output_kind, RequestOutputKind), "a RequestOutputKind")
        self._require("extra_args", isinstance(self.extra_args, dict | None), "a dictionary")
        self._require("repetition_detection", isinstance(self.repetition_detection,
                      RepetitionDetectionParams | None), "RepetitionDetectionParams")

    def _set(self, **values: Any) -> None:
        for name, value in values.items(): object.__setattr__(self, name, value)

    def _check_logit_bias(self) -> None:
        if (bias := self.logit_bias) is None: return
        self._require("logit_bias", isinstance(bias, Mapping) and all(_is_whole(i) and i >= 0 for i in bias),
                      "a bias for token ids")
        if len(bias) > MAX_BIASED_TOKENS:
            raise RequestError(f"logit_bias has {len(bias)} entries", f"at most {MAX_BIASED_TOKENS}",
                               "change logit_bias")
        for i, each in bias.items():
            if not (_is_number(each) and -100 <= each <= 100):
                raise RequestError(f"logit_bias of token {i} is {each!r}", "a number in [-100, 100]",
                                   "change logit_bias")

    def _check_number(self, name: str, low: float, high: float, expected: str, above: bool = False) -> None:
        x = getattr(self, name)
        self._require(name, _is_number(x) and low <= x <= high and not (above and x == low), expected)

    def _check_integer(self, name: str, low: int, high: int, expected: str, optional: bool = False) -> None:
        x = getattr(self, name)
        self._require(name, (x is None and optional) or (_is_whole(x) and low <= x <= high), expected)

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if holds: return
        value = getattr(self, name)
        many = _is_whole(value) and abs(value) >= 10 ** 20
        shown = "a number of many digits" if many else repr(value)[:200]
        raise RequestError(f"{name} is {shown}", expected, f"change {name}")

    def _require_length(self, name: str, found: int, most: int, of: str) -> None:
        if found <= most: return
        raise RequestError(f"{name} has {found} {of}", f"at most {most}", f"shorten {name}")

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Returns parameters of fields as a client has them: None is the default, keys of `logit_bias` may be
        texts, and its values are cut to [-100, 100]."""
        if bias := given.get("logit_bias"):
            given["logit_bias"] = {int(token): min(100.0, max(-100.0, each)) for token, each in bias.items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None
                                 or name == "max_tokens"})

    def clone(self) -> SamplingParams:
        """Returns a copy."""
        return replace(self)

    @property
    def filters(self) -> Filters:
        """The parts of the sampler that the request needs."""
        draw = self.temperature >= GREEDY_BELOW
        penalty = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return Filters(draw, draw and self.top_k > 0, draw and self.top_p < 1, draw and self.min_p > 0,
                       penalty, bool(self.logit_bias))

    def require_vocabulary(self, size: int) -> None:
        """Raises `RequestError` for a token outside a vocabulary of `size` tokens."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids"):
            if (bad := max(getattr(self, name) or (), default=0)) >= size:
                raise RequestError(f"{name} has token id {bad}, which is out of vocabulary: {size} tokens",
                                   f"0 to {size - 1}", "use ids of this model's tokenizer")

    @property
    def num_logprobs(self) -> int | None:
        """How many log probabilities a token has besides its own; None without any."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @property
    def needs_masks(self) -> bool:
        """Whether matchers say which tokens may follow."""
        return bool(self.structured_outputs is not None or self.allowed_token_ids or self.bad_words
                    or self.reasoning is not None)

    def numbers(self, seed: int) -> np.ndarray:
        """The parameters of a sampler row, float32 [NUMBERS], in the order of `Number`. Parameters that a
        greedy request does not use are off."""
        made = np.zeros(NUMBERS, np.float32)
        # a parameter that float32 rounds to 0 would divide by 0, or turn off
        for i in _SLOT_NUMBERS:
            made[i] = (x := getattr(self, i.name)) and (max(x, FLOAT32_MIN) if x > 0 else x)
        used = self.filters
        if not used.draw: made[[Number.temperature, Number.min_p]] = 0
        made[Number.top_k] = self.top_k if used.top_k else np.inf
        made[Number.top_p] = max(self.top_p, FLOAT32_MIN) if used.top_p else np.inf
        made[Number.seed:] = [seed >> 16 * i & 0xFFFF for i in range(SEEDS)]
        return made


def _as_list(given: Any) -> Any:
    """Returns a copy of a list, an empty one for None; anything else as it is, for its check to find."""
    return [] if given is None else list(given) if isinstance(given, list | tuple) else given


def _is_number(x: object) -> bool: return isinstance(x, int | float) and not isinstance(x, bool)


def _are_ids(ids: list[Any]) -> bool:
    """Whether these are whole numbers ≥ 0: there may be hundreds of thousands."""
    plain = {*map(type, ids)} <= {int} or all(map(_is_whole, ids))
    return plain and min(ids, default=0) >= 0


def _is_whole(x: object) -> bool: return isinstance(x, int) and not isinstance(x, bool)


def fresh_seed() -> int:
    """A random seed."""
    return secrets.randbits(32)
