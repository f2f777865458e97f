"""A server for tests: its own thread, a free port, and an engine that needs no model.

`FakeEngine` answers with the words of its prompt, one a token, over and over; `behave` makes it slow, full or
broken. `live(service)` runs a server around an engine and gives its address.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.engine.prompts import ParsedPrompt, Prompt, parse
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.earlier_calls import render
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import NVError, QueueFull
from tinygrad_nv.models.config import read_config
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.service import EmbeddingEngineClient, Service
from tinygrad_nv.server.serving import HTTP, HTTPOptions, Server, bind, bind_path, serve, url

NAME = "tales"
LENGTH = 512


@dataclass(frozen=True)
class FakeStats:
    """The fields of EngineStats that the server reads."""
    running: int
    waiting: int = 0
    preempted: int = 0
    kv_used: float = 0.25
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    adapters: Any = None


@functools.cache
def _tokenizer() -> Tokenizer: return Tokenizer.load(DEFAULT_MODEL)


class FakeModel:
    """The words of the model in the box, checked as `LLM` does, without its weights. `template` replaces its
    chat template."""

    def __init__(self, template: str | None = None) -> None:
        loaded = _tokenizer()
        self.tokenizer = Tokenizer(loaded.backend, loaded.special, template or loaded.template)
        self.defaults, self.length, self.eos = SamplingParams(temperature=0.0), LENGTH, (1,)
        self.config, self.embedder = read_config(DEFAULT_MODEL), None

    def require_tokenizer(self) -> Tokenizer: return self.tokenizer

    def tokenize(self, prompt: Any, truncate_prompt_tokens: int | None = None,
                 truncation_side: str = "left") -> list[int]:
        return LLM.tokenize(self, prompt, truncate_prompt_tokens, truncation_side)  # type: ignore[arg-type]

    def encode_chat(self, messages: Any, tools: Any = (), /, **extra: Any) -> list[int]:
        text = render(self.tokenizer, messages, tools, **extra)
        self.tokenizer.require_fitting(text, self.length - 1)
        return self.tokenize(self.tokenizer.encode(text, special=False))


@dataclass
class FakeEngine:
    """Says `text`, or `pieces` as they are, or the prompt again, a token at a time, `pause_s` apart. `limit`:
    requests that run. `cached`: tokens of its prompt that it had. `stopped_by`: the stop string or token that
    ends `text` or `pieces`."""
    model: FakeModel
    text: str | None = None
    pieces: Sequence[str] = ()
    stopped_by: str | int | None = None
    cached: int = 0
    pause_s: float = 0.0
    limit: int = 1000
    failure: NVError | None = None
    fails_after: int | None = None
    running: set[str] = field(default_factory=set)
    closed: list[str] = field(default_factory=list)
    generated: int = 0
    refreshed: int = 0      # how often statistics were
    stopping: bool = False
    loras: list[Any] = field(default_factory=list)      # of requests, None where there is none
    asked: list[tuple[ParsedPrompt, SamplingParams]] = field(default_factory=list)

    def stats(self) -> FakeStats: return FakeStats(len(self.running), generated_tokens=self.generated)

    async def refresh_stats(self) -> None: self.refreshed += 1

    async def stop(self, drain_s: float = 0.0) -> None: self.stopping = True

    def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0, lora_request: Any = None) -> AsyncIterator[Delta]:
        self.loras.append(lora_request)
        if len(self.running) >= self.limit: raise QueueFull("1 waits", "less than 1", "come again")
        parsed = parse(prompt)
        self.asked.append((parsed, params))
        return self._answer(parsed.ids or [], params, request_id or "")

    async def _answer(self, prompt: list[int], params: SamplingParams, name: str) -> AsyncIterator[Delta]:
        words = self.model.tokenizer.encode(self.text, special=False) if self.text is not None else prompt
        if self.pieces: words = list(range(len(self.pieces)))
        ends = self.text is not None or bool(self.pieces)
        self.running.add(name)
        try:
            most = params.max_tokens or (len(words) if ends else LENGTH)
            for at in range(most):
                for index in range(params.n):
                    last = at == most - 1 or (ends and at == len(words) - 1)
                    made = self._delta(words[at % len(words)], index, at, params, last, ends
                                       and at == len(words) - 1)
                    if at == index == 0: made.prompt_logprobs = self._of_prompt(prompt, params)
                    yield made
                    self.generated += 1
                if last: return
                await asyncio.sleep(self.pause_s)
        finally:
            self.running.discard(name)
            self.closed.append(name)

    def _of_prompt(self, prompt: list[int], params: SamplingParams) -> tuple[TokenLogprobs, ...]:
        """Token at position i: -i, and the likeliest ones are the ids that follow its own, from -i/2 on."""
        if (most := params.prompt_logprobs) is None: return ()
        text = self.model.tokenizer.token_text
        return tuple(TokenLogprobs(token, text(token), -float(i), 7, tuple(
            (token + j, text(token + j), -i / 2 - j) for j in range(1, most + 1)))
            for i, token in enumerate(prompt) if i)

    def _delta(self, token: int, index: int, at: int, params: SamplingParams, last: bool,
               ends: bool) -> Delta:
        if self.fails_after == at:
            return Delta(index, "", (), (), "error", None, 0, NVError("NaN", "numbers", "other weights"))
        if self.stopping: return Delta(index, "", (), (), "abort")
        text = self.pieces[token] if self.pieces else self.model.tokenizer.decode([token])
        top = tuple((token, text, -0.5) for _ in range(params.logprobs or 0))
        if params.logprob_token_ids:
            top = tuple((each, f"<{each}>", -each / 10) for each in params.logprob_token_ids)
        told = () if params.num_logprobs is None else (TokenLogprobs(token, text, -0.5, 1, top),)
        reason = ("stop" if ends else "length") if last else None
        return Delta(index, text, (token,), told, reason, self.stopped_by if reason == "stop" else None,
                     self.cached)


@dataclass
class Live:
    """A running server."""
    url: str
    service: Service
    server: Server
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    def post(self, asked: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
        """A request with a JSON body, on a connection that stays."""
        return self.http.post(path, json=asked, **more)

    @property
    def port(self) -> int: return int(self.url.rpartition(":")[2])

    def drain(self) -> None: self.loop.call_soon_threadsafe(self.server.drain)


def fake_service(engine: FakeEngine | None = None, limits: RequestLimits | None = None,
                 **more: Any) -> Service:
    """A service of `FakeEngine`."""
    engine = engine or FakeEngine(FakeModel())
    metrics = Metrics(NAME, LENGTH, engine.stats)
    return Service(engine, engine.model, (NAME, "alias"), limits or RequestLimits(), metrics, **more)


def llm_service(llm: LLM, **more: Any) -> Service:
    """A service of a loaded model, as `tinygrad-nv serve` makes it."""
    engine = AsyncEngine(llm) if llm.embedder is None else EmbeddingEngineClient(llm.embedder.engine)
    return Service(engine, llm, (NAME,), RequestLimits(), Metrics(NAME, llm.length, engine.stats),
                   embedder=llm.embedder, **more)


@contextlib.contextmanager
def live(service: Service, options: HTTPOptions = HTTP, path: str | None = None) -> Iterator[Live]:
    """The service, answering; at a Unix socket with `path`."""
    taken, ready = bind("127.0.0.1", 0) if path is None else bind_path(path), threading.Event()
    at = "http://localhost" if path is not None else url(taken, options)
    transport = None if path is None else httpx.HTTPTransport(uds=path)
    box: list[Live] = []

    async def main() -> None:
        server = Server(service, options)
        client = httpx.Client(base_url=at, timeout=60, verify=False, transport=transport)  # no certificates
        box.append(Live(at, service, server, asyncio.get_running_loop(), client))
        real = service.engine if isinstance(service.engine, AsyncEngine) else None
        if real is not None: await real.start()
        await serve(server, [taken], 3600, ready.set)
        if real is not None: await real.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(20)
    try: yield box[0]
    finally:
        box[0].http.close()
        box[0].server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def until(holds: Any, seconds: float = 30.0, pause_s: float = 0.005) -> None:
    """Waits until `holds()`."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not come to hold"
        time.sleep(pause_s)
