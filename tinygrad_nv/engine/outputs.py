"""Outputs of a request while it runs.

Protocol: each step of the core returns `EngineCoreOutput`s: tokens of sequences. The output processor turns
them into `Delta`s: text that can no longer change. The last output of a sequence has a finish reason:

    "stop"      an end token, a stop token or a stop string (the latter two in `stop_reason`), or the
                structured output is complete
    "length"    max_tokens, or the context is full
    "repetition"  the last tokens repeat, as `repetition_detection` says
    "abort"     cancelled
    "error"     the sequence could not continue; `error` says why
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.engine.scheduling.scheduler_output import Logprobs
from tinygrad_nv.errors import NVError


@dataclass(slots=True)
class EngineCoreOutput:
    """Tokens that a step sampled for sequence `index` (0 … n − 1) of a request. `cached_tokens`: prompt
    tokens found in the prefix cache. `complete`: the structured output is complete, and the last token is
    text rather than an end token. `prompt_logprobs`: with the first token of sequence 0, if they were asked
    for, of all prompt tokens but the first. (Not frozen: a step creates one for each sequence, and a frozen
    dataclass takes three times as long.)"""
    request: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: NVError | None = None
    complete: bool = False
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class TokenLogprobs:
    """A sampled token, or a prompt's, with its text, log probability and rank, and the `top` alternatives."""
    token: int
    text: str
    logprob: float
    rank: int
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """Text and tokens that sequence `index` gained since its last delta. `cached_tokens`: prompt tokens found
    in the prefix cache. `prompt_logprobs`: in the first delta of sequence 0, if they were asked for, of all
    prompt tokens but the first."""
    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: NVError | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
