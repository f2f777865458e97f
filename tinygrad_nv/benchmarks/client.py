"""An OpenAI-compatible server under load: streamed completions, timed as they arrive.

Protocol: `load(target, requests, …)` sends each request at its arrival time, at most `concurrency` at a time,
and returns a `RequestResult` for each. A failed one has an `error`, and the load continues. HTTP runs over
asyncio streams, one connection a request, so that the server is measured rather than a client library.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from tinygrad_nv.benchmarks.figures import RequestResult
from tinygrad_nv.benchmarks.workload import BenchRequest
from tinygrad_nv.errors import NVError


@dataclass(frozen=True)
class Endpoint:
    """A server: its URL without /v1, the model's name, an API key, the path that requests go to, and more
    fields and headers of them."""
    url: str
    model: str
    key: str | None = None
    timeout_s: float = 600.0
    path: str = "/v1/completions"
    body: Mapping[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    def of(self, model: str) -> Endpoint:
        """Returns the same server for a model."""
        return replace(self, model=model)

    @property
    def chats(self) -> bool:
        """Whether requests are conversations."""
        return self.path.rstrip("/").endswith("chat/completions")


@contextlib.asynccontextmanager
async def request(target: Endpoint, method: str, path: str, body: object | None = None) \
        -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Status and body chunks of one HTTP request."""
    parts = urlsplit(target.url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port,
                                                   ssl=ssl.create_default_context() if secure else None)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}",
                "Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        head += [f"{name}: {value}" for name, value in target.headers]
        if target.key: head.append(f"Authorization: Bearer {target.key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        chunked = False
        while (line := (await reader.readline()).strip()):
            name, _, value = line.decode("latin-1").partition(":")
            chunked = chunked or (name.lower() == "transfer-encoding" and "chunked" in value.lower())
        yield status, _pieces(reader, chunked)
    finally: writer.close()


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    while not chunked and (data := await reader.read(1 << 16)): yield data
    while chunked and (size := int((await reader.readline()).partition(b";")[0] or b"0", 16)):
        yield (await reader.readexactly(size + 2))[:-2]


async def fetch(target: Endpoint, path: str) -> Any:
    """The JSON at a path."""
    async with request(target, "GET", path) as (status, pieces):
        data = b"".join([piece async for piece in pieces])
    if status != 200: raise NVError(f"{target.url}{path} answers {status}", "200", "look at the server's log")
    return json.loads(data)


async def complete(target: Endpoint, one: BenchRequest) -> RequestResult:
    """One streamed answer."""
    result, started = RequestResult(len(one.prompt)), time.perf_counter()
    asked = {"messages": [{"role": "user", "content": one.text}], "max_completion_tokens": one.output} \
        if target.chats else {"prompt": list(one.prompt), "max_tokens": one.output}
    body = {"model": target.model, **asked, "stream": True, "stream_options": {"include_usage": True},
            **target.body}
    try:
        async with asyncio.timeout(target.timeout_s), \
                request(target, "POST", target.path, body) as (status, pieces):
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                result.error = f"{status}: {text[:500]}"
            else: await _stream(pieces, result, started)
    except (OSError, ValueError, IndexError, EOFError, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"
    if not result.error and not result.output_tokens: result.error = "no token came"
    return result


async def _stream(pieces: AsyncIterator[bytes], result: RequestResult, started: float) -> None:
    last, held, count, ended = started, b"", 0, False
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"): continue
            if (data := line[5:].strip()) == b"[DONE]":
                ended = True
                continue
            event, now = json.loads(data), time.perf_counter()
            if "error" in event: result.error = str(event["error"])[:500]
            if usage := event.get("usage"):
                result.output_tokens = usage["completion_tokens"]
                result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
            if not event.get("choices"): continue
            choice = event["choices"][0]
            result.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            count += 1
            if count == 1: result.ttft = now - started
            else: result.gaps.append(now - last)
            last = result.latency = now
            result.latency -= started
    result.output_tokens = result.output_tokens or count
    if not ended and not result.error: result.error = "the stream broke off"


async def load(target: Endpoint, workload: Sequence[BenchRequest], at: Sequence[float],
               concurrency: int | None,
               progress: Callable[[], None] = lambda: None) -> tuple[list[RequestResult], float]:
    """All results, and the seconds from the first request to the last answer."""
    slots = asyncio.Semaphore(concurrency or len(workload))
    started = time.perf_counter()

    async def send(one: BenchRequest, when: float) -> RequestResult:
        await asyncio.sleep(max(0.0, started + when - time.perf_counter()))
        async with slots: result = await complete(target, one)
        progress()
        return result

    answers = await asyncio.gather(*(send(*pair) for pair in zip(workload, at, strict=True)))
    return list(answers), time.perf_counter() - started
