"""What requests say while they run.

Protocol: a step of the engine gives `Chosen`s, tokens of requests; the processor of outputs makes `Delta`s
of them, with text that is certain. The last of a sequence has a finish reason:

    "stop"      an end token, a stop string or a stop token, which is `stop_reason`; or its form is complete
    "length"    max_tokens, or the context is full
    "abort"     cancelled
    "error"     it could not go on; `error` says why
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.engine.scheduling.batch import Logprobs
from tinygrad_nv.errors import NVError


@dataclass(slots=True)
class Chosen:
    """Tokens that a step chose for sequence `index` (0 … n − 1) of a request. `cached_tokens` of its prompt
    were in the cache already. `complete`: the form it must have is, and the last token belongs to the text,
    as an end token does not. (Not frozen: a step makes one for each sequence, in a third of the time.)"""
    request: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: NVError | None = None
    complete: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """A chosen token with its text and logarithm of probability, and the likeliest in its place."""
    token: int
    text: str
    logprob: float
    rank: int
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(slots=True)
class Delta:
    """What became certain of sequence `index` since its last delta. `cached_tokens` of the prompt were in
    the cache already."""
    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    error: NVError | None = None
