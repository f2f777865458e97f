"""POST /v1/responses, and the responses that are kept.

    POST   /v1/responses                    a response, streamed with typed events, or in the background
    GET    /v1/responses/{id}               as it is now
    GET    /v1/responses/{id}/input_items   what it was asked
    POST   /v1/responses/{id}/cancel        ends one in the background
    DELETE /v1/responses/{id}

Protocol: a response is kept unless `store` is false, and later requests go on with it by
`previous_response_id`. A response in the background is answered at once, and has its answer when it is
complete.
"""
from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.text.earlier_calls import render
from tinygrad_nv.engine.text.template_budget import run_metered
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.chat_protocol import ChatRequest
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import APIError, internal, invalid
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.log import LOG
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.response_events import ResponseBuilder
from tinygrad_nv.server.response_store import ResponseStore, Stored
from tinygrad_nv.server.responses_request import ResponseRequest, messages_of, response_request
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, Typed, stream_events, until_disconnect
from tinygrad_nv.server.workers import INLINE, INLINE_BYTES, aside, checkpoint


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    kept = service.responses_of(record)
    before = kept.size(data.get("previous_response_id"))
    parsed = await service.read(record, lambda: response_request(
        data, kept, service.model.defaults, service.limits), before)
    size = record.size + parsed.size_before
    chat = await _drop_oldest(service, parsed.chat, size) if parsed.truncate else parsed.chat
    conversation = await Conversation.of(service, chat, size)
    record.stream = parsed.chat.stream
    builder = ResponseBuilder(record.id, conversation, parsed)
    events = _events(service, conversation, builder, parsed, record)
    if parsed.background: return await _in_background(service, builder, parsed, record, events)
    if parsed.chat.stream: return await stream_events(request, events, record, Typed(builder.fail))
    return await until_disconnect(request, _whole(events, builder))


async def _events(service: Service, conversation: Conversation, builder: ResponseBuilder,
                  parsed: ResponseRequest, record: Record) -> Chunks:
    begun, reason, unfinished = False, None, ""
    async for update in conversation.run(record):
        # not before the engine has taken the request
        for event in () if begun else builder.begin(): yield event
        begun, reason, unfinished = True, update.finish_reason, update.unfinished
        for event in builder.push(update): yield event
    last = builder.finish(reason, record, unfinished)
    if parsed.store: service.responses_of(record).put(await _measure_stored(builder, parsed, record))
    for event in last: yield event


async def _whole(events: Chunks, builder: ResponseBuilder) -> Response:
    async for _ in events: pass
    return JSONAnswer(builder.response)


async def _measure_stored(builder: ResponseBuilder, parsed: ResponseRequest, record: Record) -> Stored:
    made = Stored(builder.response, parsed.items, [*parsed.messages, *messages_of(builder.output)])
    return await aside(record.size + parsed.size_before, made.measure, INLINE_BYTES)


async def _in_background(service: Service, builder: ResponseBuilder, parsed: ResponseRequest,
                         record: Record, events: Chunks) -> Response:
    async def run() -> None:
        service.active += 1
        try:
            async for _ in events: pass
        except asyncio.CancelledError: builder.response["status"] = "cancelled"
        except APIError as error: builder.fail(error)
        except Exception:
            LOG.exception("internal_error id=%s", builder.response["id"])
            builder.fail(internal())
        finally:
            await events.aclose()
            service.active -= 1

    shown = {**builder.response, "status": "queued"}
    stored = await _measure_stored(builder, parsed, record)
    stored.task = asyncio.ensure_future(run())
    service.responses_of(record).put(stored)
    return JSONAnswer(shown)


async def _drop_oldest(service: Service, request: ChatRequest, size: int) -> ChatRequest:
    """Returns `request`, of `size` bytes, without so many of its oldest messages that the prompt fits:
    instructions stay, and the last message."""
    system = [each for each in request.messages if each["role"] == "system"]
    others = [each for each in request.messages if each["role"] != "system"]
    tokenizer, length, used = service.require_tokenizer(), service.model.length, 0.0

    def fits(dropped: int) -> bool:
        nonlocal used
        checkpoint()
        began, messages = time.thread_time(), [*system, *others[dropped:]]
        text = run_metered(lambda: render(tokenizer, messages, request.tools, **(request.extra or {})), used)
        used += time.thread_time() - began
        try: tokenizer.require_fitting(text, length - 1)
        except RequestError: return False
        return len(tokenizer.encode(text, special=False)) < length

    def search() -> int:
        low, high = 0, max(len(others) - 1, 0)
        while low < high:
            middle = (low + high) // 2
            if fits(middle): high = middle
            else: low = middle + 1
        return low

    # about fifteen renderings: not in the event loop
    dropped = await (service.aside(size, search) if size > INLINE else service.render(size, search, True))
    # a result without its call
    while dropped < len(others) - 1 and others[dropped]["role"] == "tool": dropped += 1
    return replace(request, messages=(*system, *others[dropped:])) if dropped else request


# **** responses that are kept ****

async def retrieve(store: ResponseStore, name: str) -> Response:
    """The response as it is now."""
    return JSONAnswer(store.get(name).response)


async def input_items(store: ResponseStore, name: str) -> Response:
    """Its input items, the newest first."""
    items = store.get(name).items[::-1]
    return JSONAnswer({"object": "list", "data": items, "first_id": items[0]["id"],
                         "last_id": items[-1]["id"], "has_more": False})


async def cancel(store: ResponseStore, name: str) -> Response:
    """Ends a response in the background."""
    stored = store.get(name)
    if stored.task is None:
        raise invalid(f"the response {name!r} does not run in the background, expected one that was asked "
                      "for "
                      "with background true")
    stored.task.cancel()
    await asyncio.gather(stored.task, return_exceptions=True)
    # one that was cancelled before it ran
    if stored.response["status"] == "in_progress": stored.response["status"] = "cancelled"
    return JSONAnswer(stored.response)


async def delete(store: ResponseStore, name: str) -> Response:
    """Forgets a response."""
    store.get(name)
    store.drop(name)
    return JSONAnswer({"id": name, "object": "response", "deleted": True})
