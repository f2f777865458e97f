"""`RequestOutput`: the finished answers to a prompt, in vLLM's fields.

Protocol: a `RequestOutputBuilder` collects the deltas of a request's answers; once it is `is_finished`,
`output` is the whole. Fields of vLLM for what is not here (encoders, transfers, watermarks) are None.
"""
from __future__ import annotations

import time
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from tinygrad_nv.engine.logprobs import Logprob, collect
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import NVError


@dataclass
class CompletionOutput:
    """One of the n answers to a prompt. `finish_reason` is "stop" (end token, stop token or stop string, the
    latter two in `stop_reason`), "length", "repetition", or "error" with an `error`. `logprobs` (logprobs.py)
    and their sum are None where none were asked for."""
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: MutableSequence[dict[int, Logprob]] | None = None
    routed_experts: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None
    error: NVError | None = None

    def finished(self) -> bool:
        """Whether the answer has ended: it has, of a result of `LLM`."""
        return self.finish_reason is not None


@dataclass
class RequestStateStats:
    """Times of a request: `arrival_time` in seconds since 1970, the others of a clock of their own, from
    which `first_token_latency` is taken."""
    num_generation_tokens: int
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float


@dataclass
class RequestOutput:
    """The answers to a prompt; `text`, `token_ids` and `finish_reason` are those of the first. `prompt` is
    the text, None for token ids. `num_cached_tokens`: prompt tokens found in the prefix cache.
    `prompt_logprobs`, if asked for: of each prompt token, None of the first. `metrics` are there with
    `LLM(disable_log_stats=False)`. Times are in seconds: `ttft_s` from the call to the first token,
    `decode_s` from there to the last token."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: MutableSequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    seed: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def text(self) -> str: return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]: return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None: return self.outputs[0].finish_reason

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of the first answer after its first token; 0 if there was only one."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


class RequestOutputBuilder:
    """Collects the deltas of a prompt's answers; `with_metrics`: outputs have `metrics`."""

    def __init__(self, request: Request, with_metrics: bool = False) -> None:
        self.request, self.with_metrics = request, with_metrics
        self.started, self.arrived = time.perf_counter(), time.time()
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
        request, params = self.request, self.request.params
        assert params.seed is not None
        found = [each for delta in self.deltas[0] for each in delta.prompt_logprobs]
        of_prompt = None if params.prompt_logprobs is None else collect(found, params, of_prompt=True)
        answers = [join_deltas(each, params, request.lora) for each in self.deltas]
        return RequestOutput(
            request.id, request.text or None, list(request.prompt), of_prompt, answers, True,
            self._metrics(answers) if self.with_metrics else None, request.lora,
            num_cached_tokens=self.cached, seed=params.seed, ttft_s=self.first - self.started,
            decode_s=self.last - self.first)

    def _metrics(self, answers: Sequence[CompletionOutput]) -> RequestStateStats:
        return RequestStateStats(sum(len(each.token_ids) for each in answers), self.arrived, self.started,
                                 self.first, self.last, self.first - self.started)


def join_deltas(deltas: Sequence[Delta], params: SamplingParams,
                lora: LoRARequest | None) -> CompletionOutput:
    """Joins the deltas of one answer, with log probabilities as `params` ask for them."""
    last, asked = deltas[-1], params.num_logprobs is not None
    assert last.finish_reason is not None
    found = [each for delta in deltas for each in delta.logprobs]
    return CompletionOutput(
        last.index, "".join(each.text for each in deltas),
        [token for each in deltas for token in each.tokens],
        sum(each.logprob for each in found) if asked else None,
        collect(found, params) if asked else None,
        finish_reason=last.finish_reason, stop_reason=last.stop_reason, lora_request=lora, error=last.error)
