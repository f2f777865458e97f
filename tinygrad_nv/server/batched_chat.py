"""POST /v1/chat/completions/batch: several conversations in one request.

Protocol: the fields are those of /v1/chat/completions, but `messages` is a list of conversations, which run
beside each other: choice i answers conversation i. As in vLLM `n` is 1, there are no beams, and `stream` says
nothing: the answer is a whole one.
"""
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.server.chat import Message, chunk_entry, echo_entry, make_answer
from tinygrad_nv.server.chat_protocol import ChatRequest, chat
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.leniency import note, translate_names
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service, merge_streams
from tinygrad_nv.server.sse import until_disconnect

# an answer has one place for what these return of a prompt; a stream is none
WITHOUT_EFFECT = ("prompt_logprobs", "return_prompt_text", "stream", "stream_options")


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    requests = await service.read(record, lambda: _requests(data, service.model.defaults, service.limits))
    conversations = [await Conversation.of(service, each, record.size) for each in requests]
    shared = {"id": record.answer_id("chatcmpl-", data.get("request_id")), "object": "chat.completion",
              "created": int(time.time()), "model": conversations[0].model}
    return await until_disconnect(request, _answer(conversations, shared, record))


def _requests(data: Mapping[str, Any], defaults: SamplingParams, limits: RequestLimits) -> list[ChatRequest]:
    """The requests of the conversations."""
    fields = Fields(data)
    conversations = fields.take("messages")
    if conversations is None:
        raise invalid("messages is missing, expected a list of conversations", "messages", "missing_field")
    if not isinstance(conversations, list):
        raise fields.wrong("messages", conversations, "a list of conversations")
    for at, each in enumerate(conversations):
        if not isinstance(each, list): raise fields.wrong(f"messages[{at}]", each, "a list of messages")
    if not conversations: raise invalid("messages is empty, expected at least one conversation", "messages")
    if len(conversations) > limits.choices:
        raise invalid(f"messages has {len(conversations)} conversations, expected at most {limits.choices}",
                      "messages")
    fields.as_usual({"n": 1, "use_beam_search": False})
    for name in WITHOUT_EFFECT:
        if fields.take(name): note(name)
    made = []
    for at, messages in enumerate(conversations):
        spelling = {"messages": f"messages[{at}]"}
        with translate_names(spelling):
            made.append(replace(chat({**fields.left, "messages": messages}, defaults, limits),
                                spelling=spelling))
    return made


async def _answer(conversations: Sequence[Conversation], shared: dict[str, Any], record: Record) -> Response:
    messages = [Message() for _ in conversations]
    parts = [replace(record, id=f"{record.id}-{at}", answers={}, reasons=[])
             for at in range(len(conversations))]
    for at, each in enumerate(conversations):
        if each.request.echoed: messages[at].add(echo_entry(each, at))
    runs = [each.run(part) for each, part in zip(conversations, parts, strict=True)]
    try:
        async for at, update in merge_streams(runs):
            messages[at].add(chunk_entry(update, conversations[at]))
    finally: _sum_up(record, parts)
    choices = [message.choice(at, each.request.role, each.request.choice.is_forced)
               for at, (message, each) in enumerate(zip(messages, conversations, strict=True))]
    return make_answer(conversations[0], choices, shared, record)


def _sum_up(record: Record, parts: Sequence[Record]) -> None:
    """Puts what the records of the conversations say into that of the request."""
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "choices"):
        setattr(record, name, sum(getattr(each, name) for each in parts))
    record.params, record.model = parts[0].params, parts[0].model
    record.answers = {at: times for at, each in enumerate(parts) for times in each.answers.values()}
    record.reasons = [reason for each in parts for reason in each.reasons]
