"""POST /v1/messages, and /v1/messages/count_tokens: the shape of Anthropic's API.

Protocol: reasoning is a block "thinking", content a block "text", and each tool call a block "tool_use", in
the order in which the model writes them. A stream has an event for the start, each delta and the end of a
block. Errors have Anthropic's shape (errors.py).
"""
from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.server.conversation import Conversation, Update
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.messages_request import message_request
from tinygrad_nv.server.parsers.parser import CallDelta, Event, Reasoning
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, Typed, stream_events, until_disconnect

STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    parsed = await service.read(record, lambda: message_request(data, service.model.defaults, service.limits))
    conversation = await Conversation.of(service, parsed, record.size)
    record.stream = parsed.stream
    builder = MessageBuilder(record, conversation)
    events = _events(conversation, builder, record)
    style = Typed(lambda error: error.message_body(record.id))
    if parsed.stream: return await stream_events(request, events, record, style)
    return await until_disconnect(request, _whole(events, builder))


async def count(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The number of tokens of a prompt."""
    service.require_generator()
    parsed = await service.read(record, lambda: message_request(data, service.model.defaults, service.limits,
                                                                counted=True))
    conversation = await Conversation.of(service, parsed, record.size)
    tokens = len(conversation.prompt)
    return JSONAnswer({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


async def _events(conversation: Conversation, builder: MessageBuilder, record: Record) -> Chunks:
    begun, last = False, None
    async for update in conversation.run(record):
        # not before the engine has taken the request
        if not begun: yield builder.begin()
        begun, last = True, update
        for gained in update.events:
            for event in builder.push(gained): yield event
    for event in builder.finish(last): yield event


async def _whole(events: Chunks, builder: MessageBuilder) -> Response:
    async for _ in events: pass
    return JSONAnswer(builder.message)


def argument_object(text: str) -> dict[str, Any]:
    """The object that `text` is; empty where it is cut, or has half a surrogate pair, which no response can
    carry."""
    try:
        made = json.loads(text)
        json.dumps(made, ensure_ascii=False).encode()
    except (ValueError, RecursionError): return {}
    return made if isinstance(made, dict) else {}


class MessageBuilder:
    """A message as it grows, and the events of its stream."""

    def __init__(self, record: Record, conversation: Conversation) -> None:
        self.call_id = conversation.call_id
        self.service, self.stream = conversation.service, conversation.request.stream
        self.record, self.open, self.call, self.arguments = record, False, -1, ""
        self.message: dict[str, Any] = {"id": record.id, "type": "message", "role": "assistant",
                                        "content": [], "model": conversation.model,
                                        "stop_reason": None, "stop_sequence": None}

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The content so far."""
        return self.message["content"]

    def begin(self) -> dict[str, Any]:
        """The first event."""
        started = {**self.message, "content": [], "usage": {**self._usage(), "output_tokens": 0}}
        return {"type": "message_start", "message": started}

    def push(self, event: Event) -> list[dict[str, Any]]:
        """Adds what the answer gained."""
        if isinstance(event, CallDelta): return self._push_call(event)
        kind = "thinking" if isinstance(event, Reasoning) else "text"
        fits = self.open and self.blocks[-1]["type"] == kind
        events = [] if fits else self._begin({"type": kind, kind: ""})
        self.blocks[-1][kind] += event.text
        return [*events, self._delta({"type": f"{kind}_delta", kind: event.text})]

    def finish(self, last: Update | None) -> list[dict[str, Any]]:
        """The last events."""
        events = self._close()
        if last and last.unfinished and not self.stream:
            kept = [block for block in self.blocks if block["type"] != "tool_use"]
            self.message["content"] = [*kept, {"type": "text", "text": last.unfinished}]
        reason = STOPS.get((last and last.finish_reason) or "stop", "end_turn")
        word = last.delta.stop_reason if last else None
        if isinstance(word, str) and reason == "end_turn":
            reason, self.message["stop_sequence"] = "stop_sequence", word
        self.message |= {"stop_reason": reason, "usage": self._usage()}
        told = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [*events, {"type": "message_delta", "delta": told, "usage": self._usage()},
                {"type": "message_stop"}]

    def _push_call(self, call: CallDelta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if call.name is not None or not self.open or self.call != call.index:
            events = self._begin({"type": "tool_use", "id": self.call_id(),
                                  "name": call.name or "", "input": {}})
            self.call, self.arguments = call.index, ""
        self.arguments += call.text
        if not call.text: return events
        return [*events, self._delta({"type": "input_json_delta", "partial_json": call.text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._close()
        self.blocks.append(block)
        self.open = True
        return [*events, {"type": "content_block_start", "content_block": {**block},
                          "index": len(self.blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "delta": delta, "index": len(self.blocks) - 1}

    def _close(self) -> list[dict[str, Any]]:
        """Ends the last block. Arguments that are cut are no object: the input is empty. The signature of
        thinking is one of vLLM's, which says nothing: clients send it back."""
        if not self.open: return []
        self.open = False
        block, signed = self.blocks[-1], list[dict[str, Any]]()
        if block["type"] == "tool_use":
            block["input"] = argument_object(self.arguments or "{}")
        if block["type"] == "thinking":
            block["signature"] = secrets.token_hex(16)
            signed = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        return [*signed, {"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _usage(self) -> dict[str, Any]:
        """Tokens so far: those that the prefix cache had are counted apart, where they are told."""
        used = self.service.usage(self.record)
        told = {} if used.cached is None else {"cache_creation_input_tokens": 0,
                                               "cache_read_input_tokens": used.cached}
        return {"input_tokens": used.prompt - (used.cached or 0), "output_tokens": used.completion, **told}
