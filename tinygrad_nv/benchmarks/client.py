"""A server of OpenAI's API under load: streams of completions, timed as they arrive.

Protocol: `load(target, asks, …)` sends each request when it arrives, at most so many at a time, and gives an
`Answered` for each; one that fails has an `error` and the load goes on. HTTP is spoken over asyncio's
streams, one connection a request: what is measured is the server, not a client's pool.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tinygrad_nv.benchmarks.figures import Answered
from tinygrad_nv.benchmarks.workload import Ask
from tinygrad_nv.errors import NVError


@dataclass(frozen=True)
class Target:
    """A server: its URL without /v1, the model's name there, and a key if it wants one."""
    url: str
    model: str
    key: str | None = None
    timeout_s: float = 600.0


@contextlib.asynccontextmanager
async def request(target: Target, method: str, path: str, body: object | None = None) \
        -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Status and pieces of the body of one request."""
    parts = urlsplit(target.url)
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(parts.hostname, port,
                                                   ssl=ssl.create_default_context() if secure else None)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1", f"Host: {parts.netloc}",
                "Connection: close", "Content-Type: application/json", f"Content-Length: {len(data)}"]
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


async def fetch(target: Target, path: str) -> Any:
    """A page's JSON."""
    async with request(target, "GET", path) as (status, pieces):
        data = b"".join([piece async for piece in pieces])
    if status != 200: raise NVError(f"{target.url}{path} answers {status}", "200", "look at the server's log")
    return json.loads(data)


async def complete(target: Target, ask: Ask) -> Answered:
    """One streamed completion, to its full length."""
    answered, begun = Answered(len(ask.prompt)), time.perf_counter()
    body = {"model": target.model, "prompt": list(ask.prompt), "max_tokens": ask.output, "temperature": 0.0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(target.timeout_s), \
                request(target, "POST", "/v1/completions", body) as (status, pieces):
            if status != 200:
                text = b"".join([piece async for piece in pieces]).decode(errors="replace")
                answered.error = f"{status}: {text[:500]}"
            else: await _stream(pieces, answered, begun)
    except (OSError, ValueError, IndexError, EOFError, TimeoutError) as error:
        answered.error = f"{type(error).__name__}: {error}"
    if not answered.error and not answered.output_tokens: answered.error = "no token came"
    return answered


async def _stream(pieces: AsyncIterator[bytes], answered: Answered, begun: float) -> None:
    last, held, count, ended = begun, b"", 0, False
    async for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"): continue
            if (data := line[5:].strip()) == b"[DONE]":
                ended = True
                continue
            event, now = json.loads(data), time.perf_counter()
            if "error" in event: answered.error = str(event["error"])[:500]
            if usage := event.get("usage"): answered.output_tokens = usage["completion_tokens"]
            if not event.get("choices"): continue
            answered.text += event["choices"][0].get("text") or ""
            count += 1
            if count == 1: answered.ttft = now - begun
            else: answered.gaps.append(now - last)
            last = answered.latency = now
            answered.latency -= begun
    answered.output_tokens = answered.output_tokens or count
    if not ended and not answered.error: answered.error = "the stream broke off"


async def load(target: Target, asks: Sequence[Ask], at: Sequence[float], concurrency: int | None,
               progress: Callable[[], None] = lambda: None) -> tuple[list[Answered], float]:
    """All answers, and the seconds from the first request to the last answer."""
    places = asyncio.Semaphore(concurrency or len(asks))
    begun = time.perf_counter()

    async def one(ask: Ask, when: float) -> Answered:
        await asyncio.sleep(max(0.0, begun + when - time.perf_counter()))
        async with places: answered = await complete(target, ask)
        progress()
        return answered

    answers = await asyncio.gather(*(one(*pair) for pair in zip(asks, at, strict=True)))
    return list(answers), time.perf_counter() - begun
