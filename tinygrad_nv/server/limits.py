"""Sizes and timeouts that protect the server from a client.

Protocol: `RequestLimits` are set at startup. `read_body` reads a body, and raises 413 for one that is too
large (at once if Content-Length says so), and 408 for one that does not arrive in time. `Guarded` is
uvicorn's HTTP protocol with timeouts that uvicorn lacks: for headers, for an unread body, and for clients
that do not read. It answers invalid HTTP with OpenAI-style errors.
"""
from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinygrad_nv.engine.sampling import MAX_LOGPROBS
from tinygrad_nv.server.errors import APIError


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests. `output_tokens`: of an answer."""
    choices: int = 128              # limit: texts of one request, prompts × n
    logprobs: int = MAX_LOGPROBS    # limit: log probabilities of each token (--max-logprobs)
    images: int = 256               # limit: images of one request (--max-images)
    image_pixels: int = 1 << 27     # limit: pixels of the images of one request (--max-image-pixels)
    audio_s: float = 7200.0         # limit: seconds of a recording (--max-audio-seconds)
    audio_samples: int = 400_000_000    # limit: samples of a recording's channels, before they are resampled
    body_bytes: int = 4 << 20       # limit: bytes of a request's body (--max-body-bytes)
    schema_bytes: int = 64 << 10    # limit: bytes of a JSON schema in a request
    header_s: float = 10.0          # limit: seconds for headers to arrive (--header-timeout)
    body_s: float = 30.0            # limit: seconds for a body to arrive (--body-timeout)
    request_s: float = 600.0        # limit: seconds for an answer (--request-timeout)
    drain_s: float = 30.0           # limit: seconds for running requests at shutdown (--drain-timeout)
    output_tokens: int | None = None


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The body. Raises `APIError` 413 or 408, and starlette's `ClientDisconnect`."""
    too_large = APIError(413, f"the body has more than {limits.body_bytes} bytes; to fix: send less, or "
                         "raise --max-body-bytes", "body_too_large", None, {"Connection": "close"})
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.body_bytes: raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > limits.body_bytes: raise too_large
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {limits.body_s:g} s", "body_timeout", None,
                       {"Connection": "close"}) from error
    return b"".join(parts)


async def disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    try:
        while (await request.receive())["type"] != "http.disconnect": pass
    except ClientDisconnect: return


class Guarded(H11Protocol):
    """HTTP/1.1 whose headers must be complete within `header_s` seconds of the connection, or of the first
    byte of a further request. The same holds for the rest of the body of an answered request. A client that
    reads no pending output for `body_s` seconds is disconnected."""
    header_s: ClassVar[float] = RequestLimits.header_s
    body_s: ClassVar[float] = RequestLimits.body_s
    waiting: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the header timeout."""
        super().connection_made(transport)
        # pause writing as soon as the socket is full: tokens generated meanwhile become one delta
        # (1, not 0: asyncio's TLS counts an empty buffer as full then, and stays paused)
        transport.set_write_buffer_limits(1, 0)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Stops the header timeout once headers are complete, and restarts it with the next request."""
        super().data_received(data)
        owed = self.conn.their_state is h11.IDLE or self._answered()
        if owed and not self.transport.is_closing(): self._wait()
        else: self._stop_waiting()

    def pause_writing(self) -> None:
        """Starts the timeout of the client's reading."""
        super().pause_writing()
        self._look(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """Stops the timeout of the client's reading."""
        self._stop_looking()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timeouts."""
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """For invalid HTTP, or more than 64 KiB of headers."""
        self._refuse(APIError(400, f"{msg} Expected HTTP/1.1, with headers of at most 64 KiB.",
                              "invalid_http"))

    def _wait(self) -> None:
        if self.waiting is None: self.waiting = self.loop.call_later(self.header_s, self._too_late)

    def _stop_waiting(self) -> None:
        if self.waiting is not None: self.waiting.cancel()
        self.waiting = None

    def _answered(self) -> bool:
        """Whether the rest of an answered request's body is still arriving."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _look(self, before: int) -> None:
        if (left := self.transport.get_write_buffer_size()) >= before: return self.transport.abort()
        self.writing = self.loop.call_later(self.body_s, self._look, left)

    def _stop_looking(self) -> None:
        if self.writing is not None: self.writing.cancel()
        self.writing = None

    def _too_late(self) -> None:
        if self._answered(): self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(APIError(408, f"the headers did not arrive within {self.header_s:g} s",
                                  "header_timeout"))

    def _refuse(self, error: APIError) -> None:
        # bypasses h11, which may be in an error state
        body = json.dumps(error.body()).encode()
        reason = {400: "Bad Request", 408: "Request Timeout"}[error.status]
        head = (f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        self.transport.write(head.encode() + body)
        self.transport.close()


def guarded(limits: RequestLimits) -> type[Any]:
    """`Guarded` with these limits, for uvicorn's configuration."""
    return type("Guarded", (Guarded,), {"header_s": limits.header_s, "body_s": limits.body_s})
