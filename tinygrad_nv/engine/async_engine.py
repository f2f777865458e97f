"""`AsyncEngine`: an LLM for many callers of one asyncio loop.

Protocol: `await start()` loads the model if it is not loaded yet, without blocking the loop. `generate`
checks a request at once (`RequestError`, `QueueFull`) and returns an iterator of `Delta`s, which ends when
all sequences of the request have ended. Closing the iterator, or cancelling the task that awaits it, aborts
the request. A slow caller gets everything generated meanwhile as one delta per sequence. `await
stop(drain_s)` refuses new requests, lets running ones continue for `drain_s` seconds, and then aborts the
rest.

The core runs in its own thread (thread.py) and wakes the loop once a step. Detokenization runs in the loop.
"""
from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tinygrad_nv.engine.failures import stopping
from tinygrad_nv.engine.lora.serving import with_adapter
from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput
from tinygrad_nv.engine.prompts import Prompt
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.errors import NVError, QueueFull, RequestError

if TYPE_CHECKING:
    from tinygrad_nv.engine.core import EngineStats
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.lora.request import LoRARequest


class DeltaStream:
    """The deltas of one request, queued for its caller."""

    def __init__(self, processor: OutputProcessor) -> None:
        self.processor, self.deltas, self.started = processor, list[Delta](), False
        self.arrived: asyncio.Future[None] | None = None    # awaited by the caller

    def put(self, delta: Delta) -> None:
        """Appends a delta, merged with a queued delta of the same sequence."""
        at = next((i for i, each in enumerate(self.deltas) if each.index == delta.index), None) \
            if self.deltas else None
        if at is None: self.deltas.append(delta)
        else: self.deltas[at] = merge_deltas(self.deltas[at], delta)
        if self.arrived is not None and not self.arrived.done(): self.arrived.set_result(None)

    async def take(self) -> list[Delta]:
        """Returns all queued deltas; waits for the first one."""
        if not self.deltas:
            self.arrived = asyncio.get_running_loop().create_future()
            await self.arrived
        deltas, self.deltas = self.deltas, []
        return deltas


class AsyncEngine:
    """Requests of many callers over one model. `llm` is a loaded model, or a function that loads it."""

    def __init__(self, llm: LLM | Callable[[], LLM]) -> None:
        self._load = llm if callable(llm) else None
        self._llm: LLM | None = None if callable(llm) else llm
        self._streams: dict[str, DeltaStream] = {}
        self._waiting, self._stopping, self._idle = 0, False, asyncio.Event()
        self._request_numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def llm(self) -> LLM:
        """The model. `start` must have returned."""
        assert self._llm is not None, "start() comes first"
        return self._llm

    @property
    def failure(self) -> NVError | None:
        """The error that stopped the engine, or None."""
        return None if self._llm is None else self._llm.engine.failure

    async def start(self) -> None:
        """Loads the model if needed. Errors of loading are raised here."""
        self._loop = asyncio.get_running_loop()
        if self._load is not None: self._llm = await asyncio.to_thread(self._load)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Refuses new requests. Returns when no request is left; requests that still run after `drain_s` are
        aborted."""
        self._stopping = True
        ends = time.monotonic() + drain_s
        while self._streams and (left := ends - time.monotonic()) > 0 and self.failure is None:
            self._idle.clear()
            try: await asyncio.wait_for(self._idle.wait(), left)
            except TimeoutError: break
        for request in list(self._streams): self._abort(request)
        if self._llm is not None: await asyncio.to_thread(self._llm.engine.join)

    def stats(self) -> EngineStats:
        """Statistics of the engine: current ones, of several replicas those of the last `refresh_stats`."""
        return self.llm.engine.stats()

    async def refresh_stats(self) -> None:
        """Asks other replicas for their statistics, and waits for them for a second at most."""
        if self.llm.ranks is not None: await asyncio.to_thread(self.llm.ranks.refresh_stats)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, *,
                 request_id: str | None = None, priority: int = 0,
                 lora_request: LoRARequest | None = None) -> AsyncIterator[Delta]:
        """The deltas of an answer. Raises `RequestError` for an invalid request, `QueueFull` when
        `queue_limit` requests wait for their first token, `EngineError` when the engine has stopped."""
        if (error := self.failure or self.llm.engine.refusal) is not None: raise error
        if self._stopping:
            raise stopping()
        limit = self.llm.queue_limit
        if self._waiting >= limit:
            raise QueueFull(f"{self._waiting} requests wait for their first token", f"less than {limit}",
                            "retry later, or raise --max-queue")
        name = f"request-{next(self._request_numbers)}" if request_id is None else request_id
        self._require_new(name)
        return self._generate(self.llm.request(name, prompt, params, priority, matched=False), lora_request)

    def _require_new(self, name: str) -> None:
        if name in self._streams:
            raise RequestError(f"request {name!r} is running", "an id of its own", "change request_id")

    async def _generate(self, request: Request, lora: LoRARequest | None) -> AsyncIterator[Delta]:
        self._require_new(request.id)   # another request may have taken the id since `generate`
        stream = DeltaStream(OutputProcessor(self.llm.tokenizer, request.prompt, request.params))
        self._streams[request.id], self._waiting = stream, self._waiting + 1
        try:
            if lora is not None:        # reading an adapter may take seconds
                request = await asyncio.to_thread(with_adapter, self.llm.adapters, request, lora)
            if request.params.needs_masks:   # compiling a new grammar may take seconds
                matchers = await asyncio.to_thread(self.llm.matchers, request.params)
                request = replace(request, matchers=matchers)
            self.llm.engine.submit(request, self._on_outputs)
            while stream.deltas or not stream.processor.is_finished:
                for delta in await stream.take(): yield delta
        finally:
            del self._streams[request.id]
            self._waiting -= not stream.started
            if not stream.processor.is_finished: self.llm.engine.abort(request.id)
            if not self._streams: self._idle.set()

    def _on_outputs(self, chosen: list[EngineCoreOutput]) -> None:
        assert self._loop is not None
        # a closed loop has no waiting callers
        with contextlib.suppress(RuntimeError): self._loop.call_soon_threadsafe(self._process_outputs, chosen)

    def _process_outputs(self, step: list[EngineCoreOutput]) -> None:
        """Detokenizes the output of a step."""
        for chosen in step:
            if (stream := self._streams.get(chosen.request)) is None: continue
            if not stream.started: stream.started, self._waiting = True, self._waiting - 1
            if (delta := stream.processor.process(chosen)) is None: continue
            if delta.finish_reason is not None and chosen.finish_reason is None:
                self.llm.engine.finish(chosen.request, chosen.index, delta.stop_reason)
            stream.put(delta)

    def _abort(self, request: str) -> None:
        """Aborts a request whose caller still waits."""
        stream = self._streams[request]
        self.llm.engine.abort(request)
        self._process_outputs([EngineCoreOutput(request, index, (), finish_reason="abort")
                               for index in list(stream.processor.texts)])


def merge_deltas(first: Delta, then: Delta) -> Delta:
    """Two consecutive deltas of one sequence as one."""
    return replace(then, text=first.text + then.text, tokens=first.tokens + then.tokens,
                   logprobs=first.logprobs + then.logprobs,
                   prompt_logprobs=first.prompt_logprobs + then.prompt_logprobs,
                   cached_tokens=max(first.cached_tokens, then.cached_tokens))
