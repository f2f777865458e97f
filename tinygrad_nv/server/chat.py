"""POST /v1/chat/completions.

Protocol: the conversation goes through the model's chat template, with its tools. A stream starts with a
chunk that names the role of each choice, then has one for each delta: of the reasoning, the content, and the
arguments of tool calls. The first delta of a call has its id and name.
"""
from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.server.chat_protocol import chat
from tinygrad_nv.server.completions import prompt_dictionaries, token_name, usage
from tinygrad_nv.server.conversation import Conversation, Update
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.parsers.parser import CallDelta
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, stream_events, until_disconnect

# names of reasoning in a message: vLLM's, and the older one
REASONING = ("reasoning", "reasoning_content")


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    parsed = await service.read(record, lambda: chat(data, service.model.defaults, service.limits))
    conversation = await Conversation.of(service, parsed, record.size)
    shared = {"id": record.id, "object": "chat.completion.chunk" if parsed.stream else "chat.completion",
              "created": int(time.time()), "model": conversation.model}
    record.stream = parsed.stream
    chunks = _chunks(conversation, record, shared)
    if parsed.stream: return await stream_events(request, chunks, record)
    return await until_disconnect(request, _whole(chunks, shared, parsed.params.n, record))


def chat_usage(record: Record) -> dict[str, Any]:
    """Tokens of a request so far, those of reasoning among them."""
    return {**usage(record), "completion_tokens_details": {"reasoning_tokens": record.reasoning_tokens}}


async def _chunks(conversation: Conversation, record: Record, shared: dict[str, Any]) -> Chunks:
    request, seen = conversation.request, set[int]()
    async for update in conversation.run(record):
        at = update.at
        if at == 0 and at not in seen and request.prompt_logprobs is not None:
            told = prompt_dictionaries(update.delta.prompt_logprobs, request.prompt_logprobs)
            yield {**shared, "prompt_logprobs": told, "choices": []}
        if at not in seen:
            ids = {"prompt_token_ids": conversation.prompt} if request.ids and not seen else {}
            seen.add(at)
            yield {**shared, **ids, "choices": [{"index": at, "delta": {"role": "assistant", "content": ""},
                                                 "logprobs": None, "finish_reason": None}]}
        entry = _entry(update, conversation)
        if request.ids: entry["token_ids"] = list(update.delta.tokens)
        # no chunk while text that may become a tool call is held back
        if entry["delta"] or entry["finish_reason"] or update.delta.logprobs or request.ids:
            yield {**shared, "choices": [entry], **({"usage": chat_usage(record)} if request.usages else {})}
    if request.usage: yield {**shared, "choices": [], "usage": chat_usage(record)}


def _entry(update: Update, conversation: Conversation) -> dict[str, Any]:
    """The chunk's entry for an update."""
    delta, legacy = update.delta, conversation.request.legacy
    logprobs = conversation.request.params.logprobs is not None
    sent: dict[str, Any] = {}
    if text := update.reasoning: sent |= dict.fromkeys(REASONING, text)
    if text := update.content: sent["content"] = text
    reason = update.finish_reason
    if calls := update.calls:
        if legacy: sent["function_call"] = _call(calls[0], conversation)["function"]
        else: sent["tool_calls"] = [_call(call, conversation) for call in calls]
    if legacy and reason == "tool_calls": reason = "function_call"
    return {"index": update.at, "delta": sent, "finish_reason": reason, "stop_reason": delta.stop_reason,
            "logprobs": {"content": [logprob(each, conversation.request.ids_for_texts)
                                     for each in delta.logprobs]} if logprobs else None}


def _call(call: CallDelta, conversation: Conversation) -> dict[str, Any]:
    if call.name is None: return {"index": call.index, "function": {"arguments": call.text}}
    return {"index": call.index, "id": conversation.call_id(), "type": "function",
            "function": {"name": call.name, "arguments": call.text}}


class Message:
    """A message that chunks add up to."""

    def __init__(self) -> None:
        self.texts = dict.fromkeys(("content", *REASONING), "")
        self.calls: list[dict[str, Any]] = []
        self.function: dict[str, Any] | None = None
        self.logprobs: list[dict[str, Any]] | None = None
        self.ids: list[int] = []
        self.reasons: dict[str, Any] = {}

    def add(self, part: dict[str, Any]) -> None:
        """Adds a chunk's entry."""
        delta = part["delta"]
        for name in self.texts: self.texts[name] += delta.get(name, "")
        for call in delta.get("tool_calls", []):
            if "id" in call: self.calls.append({key: call[key] for key in ("id", "type", "function")})
            else: self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if (call := delta.get("function_call")) is not None:
            if self.function is None: self.function = call
            else: self.function["arguments"] += call["arguments"]
        if part["logprobs"]: self.logprobs = [*(self.logprobs or ()), *part["logprobs"]["content"]]
        self.ids += part.get("token_ids", [])
        self.reasons = {key: part.get(key) for key in ("finish_reason", "stop_reason")}

    def choice(self, at: int) -> dict[str, Any]:
        """The choice of a response."""
        called = self.calls or self.function
        content = None if called and not self.texts["content"] else self.texts["content"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.texts["reasoning"]: message |= {name: self.texts[name] for name in REASONING}
        if self.calls: message["tool_calls"] = self.calls
        if self.function: message["function_call"] = self.function
        logprobs = None if self.logprobs is None else {"content": self.logprobs, "refusal": None}
        return {**self.reasons, "index": at, "message": message, "logprobs": logprobs}


async def _whole(chunks: Chunks, shared: dict[str, Any], count: int, record: Record) -> Response:
    messages, ids, more = [Message() for _ in range(count)], list[int](), dict[str, Any]()
    async for chunk in chunks:
        if "prompt_logprobs" in chunk: more["prompt_logprobs"] = chunk["prompt_logprobs"]
        ids = chunk.get("prompt_token_ids", ids)
        for part in chunk["choices"]: messages[part["index"]].add(part)
    choices = [message.choice(at) for at, message in enumerate(messages)]
    for choice, message in zip(choices, messages, strict=True):
        if ids: choice["token_ids"] = message.ids
    if ids: more["prompt_token_ids"] = ids
    return JSONAnswer({**shared, "choices": choices, "usage": chat_usage(record), **more})


def logprob(each: TokenLogprobs, by_id: bool = False) -> dict[str, Any]:
    """A token's entry in logprobs."""
    def entry(token: int, text: str, value: float) -> dict[str, Any]:
        return {"token": token_name(token) if by_id else text, "logprob": value, "bytes": list(text.encode())}
    return {**entry(each.token, each.text, each.logprob), "top_logprobs": [entry(*top) for top in each.top]}
