"""`LLM`: a model directory, ready to generate.

Protocol: `LLM(directory)` loads everything and refuses what it cannot run. `stream(prompt, params)` yields
`Piece`s of text as they are certain and ends with one that has a finish reason; `generate(prompts, params)`
collects them into `Completion`s. One sequence runs at a time.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.engine.decoder import CHUNKS, Decoder
from tinygrad_nv.engine.fit import require_room
from tinygrad_nv.engine.opening import (
    context_length,
    generation_defaults,
    open_device,
    optional_tokenizer,
    resolve_dtype,
)
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text import Detokenizer, StopStrings
from tinygrad_nv.engine.tokenizer import Message, Tokenizer, Tools
from tinygrad_nv.errors import ModelError, RequestError, TokenizerError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory_pool import UTILIZATION

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Piece:
    """Text that became certain, the tokens chosen since the last piece, and at the end why it ended."""
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. `finish_reason` is "stop" (end token or stop string) or "length". Times in seconds."""
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    ttft_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token; 0 when there was only one."""
        return (len(self.token_ids) - 1) / self.decode_s if self.decode_s > 0 else 0.0


class LLM:
    """A loaded model. `directory` is a Hugging Face directory; `progress(done, total)` follows the weights'
    bytes. Of a GPU's memory this process holds at most `gpu_memory_utilization`, 0 < x <= 1; on a CPU that
    has no effect."""

    def __init__(self, directory: str | Path, dtype: str = "auto", max_model_len: int | None = None,
                 device: str | None = None, progress: Callable[[int, int], None] | None = None,
                 gpu_memory_utilization: float = UTILIZATION) -> None:
        self.directory, self.device = Path(directory), open_device(device)
        self.config = read_config(self.directory)
        self.dtype = resolve_dtype(dtype, self.config, self.directory)
        self.length = context_length(self.config, self.dtype, max_model_len)
        self.defaults, self.eos = generation_defaults(self.directory, self.config)
        self.tokenizer, self.tokenizer_error = optional_tokenizer(self.directory)
        capacity = self.length + CHUNKS[-1]
        require_room(self.device, self.config, self.dtype, self.length, capacity, gpu_memory_utilization)
        self.model = Llama(self.config, self.dtype, self.device, positions=capacity)
        weights.load(self.model, self.directory, progress)
        self.decoder = Decoder(self.model, self.length)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights a decode step reads: every parameter, of an untied embedding only one row."""
        skipped = 0 if self.config.tied else self.config.vocab_size * self.config.hidden_size
        return (self.config.parameters - skipped) * self.dtype.itemsize

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context."""
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty", "at least one character", "write a prompt")
            ids = self.require_tokenizer().encode(prompt)
        else: ids = list(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens", "at least one token id", "pass a longer prompt")
        if bad := [i for i in ids if not 0 <= i < self.config.vocab_size]:
            raise RequestError(f"token id {bad[0]} is not in the vocabulary",
                               f"0 to {self.config.vocab_size - 1}", "use ids of this model's tokenizer")
        if len(ids) >= self.length:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {self.length}",
                               f"at most {self.length - 1}, so that one can be added",
                               "shorten the prompt or raise --max-model-len")
        return ids

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or the reason why there is none."""
        if self.tokenizer is None: raise self.tokenizer_error or TokenizerError("no tokenizer")
        return self.tokenizer

    def encode_chat(self, messages: Sequence[Message], tools: Tools = (), **extra: Any) -> list[int]:
        """Token ids of a conversation, through the model's chat template, which is told `tools` and the
        variables `extra`."""
        return self.encode(self.require_tokenizer().encode_chat(messages, tools, **extra))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields text as it becomes certain. Raises `RequestError` at once for a bad prompt, and from an
        older stream that is read on after another request has begun: there is one KV cache.
        """
        params = self.defaults if params is None else params
        ids = self.encode(prompt)
        self.decoder.start(params, ids)
        return self._pieces(ids, params, self.decoder.requests)

    def _pieces(self, ids: list[int], params: SamplingParams, request: int) -> Iterator[Piece]:
        decode: Callable[[Sequence[int]], str] = self.tokenizer.decode if self.tokenizer else lambda _: ""
        text, stops = Detokenizer(decode, ids), StopStrings(params.stop)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos))
        room = self.length - len(ids)
        budget = room if params.max_tokens is None else min(params.max_tokens, room)
        self._require_turn(request)
        token, count, reason = self.decoder.prefill(ids), 1, None
        while reason is None:
            self._require_token(token)
            if token in ends: reason = "stop"
            shown = "" if token in ends else stops.push(text.push(token))
            if stops.found is not None: reason = "stop"
            elif reason is None and count == budget: reason = "length"
            if reason is not None and stops.found is None: shown += stops.push(text.flush()) + stops.flush()
            yield Piece(shown, (token,), reason)
            if reason is None:
                self._require_turn(request)
                token, count = self.decoder.decode(), count + 1

    def _require_turn(self, request: int) -> None:
        if self.decoder.requests != request:
            raise RequestError("another request has taken the model", "one stream at a time",
                               "read a stream to its end before the next request")

    def _require_token(self, token: int) -> None:
        # the maximum of logits that are not numbers is at no place, and argmax says so with one past the last
        if token >= self.config.vocab_size:
            raise ModelError("the model computed NaN, so there is no likeliest token",
                             "weights that are finite, and a dtype that holds what is computed with them",
                             "try --dtype bfloat16 or float32; if that does not help, the weights are "
                             "damaged: download them again")

    def complete(self, prompt: Prompt, params: SamplingParams | None = None,
                 on_piece: Callable[[Piece], None] = lambda _: None) -> Completion:
        """One whole answer; `on_piece` sees it grow."""
        begun = time.perf_counter()
        params = self.defaults if params is None else params
        ids = self.encode(prompt)
        seed = self.decoder.start(params, ids)
        tokens: list[int] = []
        text, reason, first = "", "length", 0.0
        for piece in self._pieces(ids, params, self.decoder.requests):
            first = first or time.perf_counter()
            on_piece(piece)
            text, reason = text + piece.text, piece.finish_reason or reason
            tokens += piece.token_ids
        return Completion(tuple(ids), tuple(tokens), text, reason, seed, first - begun,
                          time.perf_counter() - first)

    def generate(self, prompts: Prompt | Sequence[str],
                 params: SamplingParams | None = None) -> list[Completion]:
        """Answers to one prompt or to a list of texts, in order."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            return [self.complete(prompts, params)]  # type: ignore[arg-type]
        return [self.complete(prompt, params) for prompt in prompts]  # type: ignore[arg-type]
