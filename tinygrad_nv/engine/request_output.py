"""`RequestOutput`: the finished answers to a prompt, in vLLM's fields.

Protocol: a `RequestOutputBuilder` collects the deltas of a request's answers; once it is `is_finished`,
`output` is the whole. Log probabilities are a dictionary for each token, from token ids to `Logprob`s: the
sampled token, or the prompt's, first, then the likeliest.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import NVError


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token, its rank (1: the likeliest), and its text."""
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One of the n answers to a prompt. `finish_reason` is "stop" (end token, stop token or stop string, the
    latter two in `stop_reason`), "length", or "error" with an `error`. `logprobs` and their sum are None
    where none were asked for."""
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    cumulative_logprob: float | None = None
    error: NVError | None = None

    def finished(self) -> bool:
        """True: outputs are made of answers that have ended."""
        return True


@dataclass(frozen=True)
class RequestOutput:
    """The answers to a prompt; `text`, `token_ids` and `finish_reason` are those of the first. `prompt` is
    the text, None for token ids. `num_cached_tokens`: prompt tokens found in the prefix cache.
    `prompt_logprobs`, if asked for: of each prompt token, None of the first. Times are in seconds: `ttft_s`
    from the call to the first token, `decode_s` from there to the last token."""
    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    seed: int
    num_cached_tokens: int
    ttft_s: float
    decode_s: float
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finished: bool = True

    @property
    def text(self) -> str: return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]: return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str: return self.outputs[0].finish_reason

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the first answer after its first token; 0 if there was only one."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


class RequestOutputBuilder:
    """Collects the deltas of a prompt's answers."""

    def __init__(self, request: Request) -> None:
        self.request, self.started = request, time.perf_counter()
        self.first = self.last = 0.0
        self.cached = 0
        self.deltas: list[list[Delta]] = [[] for _ in range(request.params.n)]
        self.going = request.params.n

    @property
    def is_finished(self) -> bool: return not self.going

    def push(self, delta: Delta) -> None:
        """Adds a delta."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.cached = max(self.cached, delta.cached_tokens)
        self.deltas[delta.index].append(delta)
        self.going -= delta.finish_reason is not None

    def output(self) -> RequestOutput:
        """The answers, once they are finished."""
        request, seed = self.request, self.request.params.seed
        assert seed is not None
        with_logprobs = request.params.logprobs is not None
        found = [each for delta in self.deltas[0] for each in delta.prompt_logprobs]
        of_prompt = None if request.params.prompt_logprobs is None else (None, *map(of_token, found))
        return RequestOutput(request.id, request.text, tuple(request.prompt),
                             tuple(join_deltas(each, with_logprobs)
                                   for each in self.deltas), seed, self.cached,
                             self.first - self.started, self.last - self.first, of_prompt)


def join_deltas(deltas: Sequence[Delta], with_logprobs: bool) -> CompletionOutput:
    """Joins the deltas of one answer; `with_logprobs`: with log probabilities."""
    last = deltas[-1]
    assert last.finish_reason is not None
    found = [each for delta in deltas for each in delta.logprobs]
    return CompletionOutput(last.index, "".join(each.text for each in deltas),
                            tuple(token for each in deltas for token in each.tokens), last.finish_reason,
                            last.stop_reason, tuple(map(of_token, found)) if with_logprobs else None,
                            sum(each.logprob for each in found) if with_logprobs else None, last.error)


def of_token(found: TokenLogprobs) -> dict[int, Logprob]:
    """The dictionary of a token."""
    made = {found.token: Logprob(found.logprob, found.rank, found.text)}
    likeliest = {token: Logprob(value, rank, text) for rank, (token, text, value) in enumerate(found.top, 1)}
    return made | {token: each for token, each in likeliest.items() if token not in made}
