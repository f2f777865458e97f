"""Server-sent events: `data: {…}` and an empty line for each chunk, `data: [DONE]` at the end.

Protocol: `streamed(request, chunks, record)` waits for the first chunk before it answers, so that what is
wrong with a request is told by its status. After that an error is an event {"error": …}, and the stream ends
with [DONE] all the same. When the client goes away, `chunks` is closed, now or in the middle of an await.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tinygrad_nv.server.errors import APIError, internal
from tinygrad_nv.server.limits import gone
from tinygrad_nv.server.log import LOG
from tinygrad_nv.server.record import Record

T = TypeVar("T")
Chunks = AsyncGenerator[dict[str, Any], None]
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def streamed(request: Request, chunks: Chunks, record: Record) -> Response:
    """The answer whose events are `chunks`."""
    try: first = await present(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise

    async def events() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(chunks):
            record.error = "client_gone"  # until the end is reached
            try:
                yield event(first)
                async for chunk in chunks: yield event(chunk)
                record.error = None
            except APIError as error:
                record.error = error.code
                yield event(error.body())
            except Exception as error:
                LOG.exception("internal_error id=%s", record.id)
                record.error = type(error).__name__
                yield event(internal().body())
            yield b"data: [DONE]\n\n"

    return _Closing(events(), headers=HEADERS, media_type="text/event-stream")


class _Closing(StreamingResponse):
    """A stream whose iterator is closed when the client is gone, and not when garbage is collected."""

    def __init__(self, events: AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(events, **options)
        self.events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream."""
        try: await super().__call__(scope, receive, send)
        finally: await self.events.aclose()


async def present(request: Request, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """What `work` gives, unless the client goes away first: then it is cancelled, and `ClientDisconnect`
    is raised."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done(): raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, leaving): each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
