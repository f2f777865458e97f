"""`JSONAnswer`: a response of JSON, however long.

Protocol: as starlette's JSONResponse, but the text is made when it is sent: a long one in a thread, slice by
slice, so that neither the event loop nor the engine waits for all of it.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinygrad_nv.server.workers import LARGE, aside, checkpoint

SLICE = 2048            # values that are written at a time: about 1 ms of floats
INLINE_VALUES = 4096    # of an answer that is written in the event loop


class JSONAnswer(Response):
    """See above."""
    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200) -> None:
        self.content, self.status_code, self.background = content, status_code, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response."""
        if weight(self.content, INLINE_VALUES) <= INLINE_VALUES: self.body = dumps(self.content).encode()
        else: self.body = await aside(LARGE, lambda: "".join(pieces(self.content)).encode())
        self.init_headers()
        await super().__call__(scope, receive, send)


def weight(value: Any, most: int) -> int:
    """About how many values there are; where there are more than `most`, at least `most`. 64 characters of a
    text are one."""
    if isinstance(value, str): return 1 + len(value) // 64
    if not isinstance(value, Mapping | list | tuple): return 1
    total = 1 + len(value)
    for each in value.values() if isinstance(value, Mapping) else value:
        if total > most: break
        total += weight(each, most - total)
    return total


def pieces(value: Any) -> Iterator[str]:
    """The text of JSON, in pieces of about `SLICE` values."""
    checkpoint()
    if weight(value, SLICE) <= SLICE or not isinstance(value, Mapping | list | tuple): yield dumps(value)
    elif isinstance(value, Mapping):
        for at, (name, each) in enumerate(value.items()):
            yield f"{',' if at else '{'}{dumps({name: None})[1:-6]}:"
            yield from pieces(each)
        yield "}"
    else:
        yield "["
        yield from _elements(value)
        yield "]"


def _elements(values: Sequence[Any]) -> Iterator[str]:
    first, total, comma = 0, 0, ""
    for at, each in enumerate(values):
        heavy = weight(each, SLICE)
        if at > first and total + heavy > SLICE:
            yield comma + dumps(values[first:at])[1:-1]
            first, total, comma = at, 0, ","
        total += heavy
        if heavy <= SLICE: continue
        yield comma
        yield from pieces(each)
        first, total, comma = at + 1, 0, ","
    if first < len(values): yield comma + dumps(values[first:])[1:-1]


def dumps(value: Any) -> str:
    """JSON as starlette writes it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
