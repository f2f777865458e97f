"""Server-sent events: `data: {…}` and an empty line for each chunk.

Protocol: `streamed(request, chunks, record, style)` waits for the first chunk before it responds, so that an
invalid request gets an error status. A `Style` says how chunks, a later error and the end are written:
`Plain` has `data: [DONE]` at the end and {"error": …} as an error; `Typed` events have names.
When the client disconnects, `chunks` is closed, even in the middle of an await.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tinygrad_nv.server.errors import APIError, internal
from tinygrad_nv.server.limits import wait_for_disconnect
from tinygrad_nv.server.log import LOG
from tinygrad_nv.server.record import Record

T = TypeVar("T")
Chunks = AsyncGenerator[dict[str, Any], None]
# of Unicode: a client that splits a stream into lines as Python splits texts would cut an event there
SEPARATORS = str.maketrans({each: f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"})
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Plain:
    """The style of completions."""
    end = b"data: [DONE]\n\n"
    media_type = "text/event-stream"

    def event(self, data: dict[str, Any]) -> bytes:
        """One event."""
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        if not text.isascii(): text = text.translate(SEPARATORS)
        return b"data: " + text.encode() + b"\n\n"

    def error(self, error: APIError) -> bytes:
        """The event of an error."""
        return self.event(error.body())


class Typed(Plain):
    """Events that are named by their type. `failed` makes the one of an error."""
    end = b""

    def __init__(self, failed: Callable[[APIError], dict[str, Any]]) -> None: self.failed = failed

    def event(self, data: dict[str, Any]) -> bytes:
        """One event."""
        return f"event: {data['type']}\n".encode() + super().event(data)

    def error(self, error: APIError) -> bytes:
        """The event of an error."""
        return self.event(self.failed(error))


async def stream_events(request: Request, chunks: Chunks, record: Record,
                        style: Plain | None = None) -> Response:
    """Returns the response with `chunks` as its events."""
    style = style or Plain()
    try: first = await until_disconnect(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise

    async def events() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(chunks):
            record.error = "client_gone"  # until the end is reached
            try:
                yield style.event(first)
                async for chunk in chunks: yield style.event(chunk)
                record.error = None
            except APIError as error:
                record.error = error.code
                yield style.error(error)
            except Exception as error:
                LOG.exception("internal_error id=%s", record.id)
                record.error = type(error).__name__
                yield style.error(internal())
            if style.end: yield style.end

    return _Closing(events(), headers=HEADERS, media_type=style.media_type)


class _Closing(StreamingResponse):
    """A stream that closes its iterator when the client disconnects, instead of at garbage collection."""

    def __init__(self, events: AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(events, **options)
        self.events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream."""
        try: await super().__call__(scope, receive, send)
        finally: await self.events.aclose()


async def until_disconnect(request: Request, task: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """The result of `task`. If the client disconnects first, cancels it and raises `ClientDisconnect`."""
    task, disconnect = asyncio.ensure_future(task), asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done(): raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, disconnect): each.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
