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
from tinygrad_nv.server.body import MAX_VALUES
from tinygrad_nv.server.chat import Message, chunk_entry, echo_entry, make_answer
from tinygrad_nv.server.chat_protocol import IMAGE, ChatRequest, chat
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.leniency import note, translate_names
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service, merge_streams
from tinygrad_nv.server.sse import until_disconnect
from tinygrad_nv.server.workers import checkpoint

# a batch's answer has one place for a prompt's fields, and is never streamed
WITHOUT_EFFECT = ("prompt_logprobs", "return_prompt_text", "stream", "stream_options")


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    given = data.get("messages")
    times = len(given) if isinstance(given, list) else 1    # the fields are read so often
    defaults, limits = service.model.defaults, service.limits
    requests = await service.read(record, lambda: _read_requests(data, defaults, limits),
                                  record.size * max(0, times - 1))
    conversations = [await Conversation.of(service, each, record.size * times) for each in requests]
    shared = {"id": record.answer_id("chatcmpl-", data.get("request_id")), "object": "chat.completion",
              "created": int(time.time()), "model": conversations[0].model}
    return await until_disconnect(request, _answer(conversations, shared, record))


def _read_requests(data: Mapping[str, Any], defaults: SamplingParams,
                   limits: RequestLimits) -> list[ChatRequest]:
    """Returns the requests of the conversations."""
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
    entries = sum(len(each) for each in fields.left.values() if isinstance(each, list | dict))
    if entries * len(conversations) > MAX_VALUES:
        raise invalid(f"{len(conversations)} conversations share fields of {entries} entries, expected at "
                      f"most {MAX_VALUES} entries in all; to fix: send them in several requests", "messages")
    made: list[ChatRequest] = []
    for at, messages in enumerate(conversations):
        checkpoint()
        spelling = {"messages": f"messages[{at}]"}
        with translate_names(spelling):
            one = chat({**fields.left, "messages": messages}, defaults, limits)
            if len(conversations) > 1: _require_texts(one)
        # the same for all, and without what an echo alone would return of a prompt
        params = made[0].params if made else replace(one.params, prompt_logprobs=None)
        made.append(replace(one, params=params, prompt_logprobs=None, spelling=spelling))
    return made


def _require_texts(request: ChatRequest) -> None:
    """Raises `APIError` for images: their limits are those of one conversation."""
    contents = [message["content"] for message in request.messages]
    if any(part["type"] == IMAGE for each in contents if isinstance(each, list) for part in each):
        raise invalid("images in a batch of conversations, expected texts; to fix: send each conversation "
                      "that has images in a request of its own", "messages", "unsupported")


async def _answer(conversations: Sequence[Conversation], shared: dict[str, Any], record: Record) -> Response:
    messages = [Message() for _ in conversations]
    records = [replace(record, id=f"{record.id}-{at}", answers={}, reasons=[])
             for at in range(len(conversations))]
    for at, each in enumerate(conversations):
        if each.request.echoed: messages[at].add(echo_entry(each, at))
    runs = [each.run(part) for each, part in zip(conversations, records, strict=True)]
    try:
        async for at, update in merge_streams(runs):
            messages[at].add(chunk_entry(update, conversations[at]))
    finally: _sum_up(record, records)
    choices = [message.choice(at, each.request.role, each.request.choice.is_forced)
               for at, (message, each) in enumerate(zip(messages, conversations, strict=True))]
    return make_answer(conversations[0], choices, shared, record)


def _sum_up(record: Record, records: Sequence[Record]) -> None:
    """Puts what the records of the conversations say into that of the request."""
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "choices"):
        setattr(record, name, sum(getattr(each, name) for each in records))
    record.params, record.model = records[0].params, records[0].model
    record.answers = {at: times for at, each in enumerate(records) for times in each.answers.values()}
    record.reasons = [reason for each in records for reason in each.reasons]
