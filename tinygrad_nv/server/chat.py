"""POST /v1/chat/completions.

Protocol: the conversation goes through the model's chat template, with its tools. A stream starts with a
chunk that names the role of each choice, then has one for each delta: of the reasoning, the content, and the
arguments of tool calls. The first delta of a call has its id and name.
"""
from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.outputs import TokenLogprobs
from tinygrad_nv.server.chat_protocol import chat
from tinygrad_nv.server.completions import prompt_dictionaries, token_name
from tinygrad_nv.server.conversation import Conversation, Update
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.parsers.parser import CallDelta
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, stream_events, until_disconnect
from tinygrad_nv.server.usage import Usage

# names of reasoning in a message: vLLM's, and the older one
REASONING = ("reasoning", "reasoning_content")
# fields of a prompt, in an answer that tells nothing of it
NO_PROMPT_FIELDS: Mapping[str, Any] = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    service.add_defaults(data)
    parsed = await service.read(record, lambda: chat(data, service.model.defaults, service.limits))
    conversation = await Conversation.of(service, parsed, record.size)
    shared = {"id": record.answer_id("chatcmpl-", data.get("request_id")),
              "object": "chat.completion.chunk" if parsed.stream else "chat.completion",
              "created": int(time.time()), "model": conversation.model}
    record.stream = parsed.stream
    chunks = _chunks(conversation, record, shared)
    if parsed.stream: return await stream_events(request, chunks, record)
    return await until_disconnect(request, _whole(conversation, chunks, shared, record))


async def whole_answer(conversation: Conversation, updates: AsyncGenerator[Update, None],
                       shared: dict[str, Any], record: Record) -> Response:
    """The answer that `updates` add up to."""
    return await _whole(conversation, _chunks(conversation, record, shared, updates), shared, record)


async def _chunks(conversation: Conversation, record: Record, shared: dict[str, Any],
                  updates: AsyncGenerator[Update, None] | None = None) -> Chunks:
    request, begun, service = conversation.request, False, conversation.service
    counts: dict[int, tuple[int, int]] = {}     # tokens of a choice, and those of reasoning among them

    def usage_of(at: int) -> dict[str, Any]:
        """The usage of a choice so far, in a chunk."""
        if not request.usages: return {}
        tokens, reasoning = counts.get(at, (0, 0))
        made = Usage(len(conversation.prompt), tokens, None, reasoning if conversation.reasons else None)
        return {"usage": {name: each for name, each in made.fields().items()
                          if name != "prompt_tokens_details"}}

    async for update in conversation.run(record) if updates is None else updates:
        at, delta = update.at, update.delta
        if at == 0 and delta.prompt_logprobs and request.prompt_logprobs is not None:
            yield {"choices": [], "prompt_logprobs": prompt_dictionaries(delta.prompt_logprobs,
                                                                         request.prompt_logprobs)}
        for choice in () if begun else range(request.params.n):
            yield {**shared, "choices": [{"index": choice, "delta": {"role": request.role, "content": ""},
                                          "logprobs": None, "finish_reason": None}], **usage_of(choice),
                   "prompt_token_ids": conversation.prompt if request.ids else None,
                   "prompt_text": conversation.prompt_text()}
            if request.echoed: yield {**shared, "choices": [echo_entry(conversation, choice)]}
        begun, tokens = True, counts.get(at, (0, 0))[0] + len(delta.tokens)
        counts[at] = tokens, update.reasoning_tokens
        entry = chunk_entry(update, conversation)
        # no chunk while text that may become a tool call is held back
        if not (entry["delta"] or entry["finish_reason"] or entry["logprobs"]) and entry["token_ids"] is None:
            continue
        ended = entry["finish_reason"] and not request.usage
        yield {**shared, "choices": [entry], **usage_of(at),
               **({"system_fingerprint": service.fingerprint} if ended else {})}
    if request.usage:
        whole = service.usage(record, conversation.reasons)
        yield {**shared, "choices": [], "usage": whole.fields(whole=False),
               "system_fingerprint": service.fingerprint}


def echo_entry(conversation: Conversation, choice: int) -> dict[str, Any]:
    """The chunk's entry for the text that `echo` puts in front of a choice."""
    return {"index": choice, "delta": {"content": conversation.request.echoed}, "logprobs": None,
            "finish_reason": None}


def chunk_entry(update: Update, conversation: Conversation) -> dict[str, Any]:
    """The chunk's entry for an update."""
    delta, request = update.delta, conversation.request
    # logprobs and token ids would tell of reasoning that is not shown
    hidden = conversation.reasons and not request.show_reasoning
    found = delta.logprobs and request.params.logprobs is not None and not hidden
    sent: dict[str, Any] = {}
    calls, reason = update.calls, update.finish_reason
    if (text := update.content) or calls: sent["content"] = text or None
    if text := update.reasoning: sent |= dict.fromkeys(REASONING, text)
    if calls:
        if request.legacy: sent["function_call"] = _call(calls[0], conversation)["function"]
        else: sent["tool_calls"] = [_call(call, conversation) for call in calls]
    if request.legacy and reason == "tool_calls": reason = "function_call"
    # of a named tool, as OpenAI has it
    elif reason == "tool_calls" and request.choice.mode == "named": reason = "stop"
    logprobs = [logprob(each, request.ids_for_texts, bool(request.params.logprob_token_ids))
                for each in delta.logprobs] if found else None
    return {"index": update.at, "delta": sent,
            "logprobs": None if logprobs is None else {"content": logprobs},
            "finish_reason": reason, **({"stop_reason": delta.stop_reason} if reason else {}),
            "token_ids": list(delta.tokens) if request.ids and not hidden else None,
            **({"unfinished": update.unfinished} if update.unfinished and not request.stream else {})}


def _call(call: CallDelta, conversation: Conversation) -> dict[str, Any]:
    if call.name is None: return {"index": call.index, "function": {"arguments": call.text}}
    return {"id": conversation.call_id(), "type": "function", "index": call.index,
            "function": {"name": call.name, "arguments": call.text}}


class Message:
    """A message that chunks add up to."""

    def __init__(self) -> None:
        self.texts = dict.fromkeys(("content", *REASONING), "")
        self.calls: list[dict[str, Any]] = []
        self.function: dict[str, Any] | None = None
        self.logprobs: list[dict[str, Any]] | None = None
        self.ids: list[int] | None = None
        self.reasons: dict[str, Any] = {}

    def add(self, part: dict[str, Any]) -> None:
        """Adds a chunk's entry."""
        delta = part["delta"]
        for name in self.texts: self.texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if "id" in call: self.calls.append({key: call[key] for key in ("id", "type", "function")})
            else: self.calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        if (call := delta.get("function_call")) is not None:
            if self.function is None: self.function = call
            else: self.function["arguments"] += call["arguments"]
        # calls that are cut are text
        if text := part.get("unfinished"): self.texts["content"], self.calls, self.function = text, [], None
        if part["logprobs"]: self.logprobs = [*(self.logprobs or ()), *part["logprobs"]["content"]]
        if (ids := part.get("token_ids")) is not None: self.ids = [*(self.ids or ()), *ids]
        self.reasons = {key: part.get(key) for key in ("finish_reason", "stop_reason")}

    def choice(self, at: int, role: str, forced: bool) -> dict[str, Any]:
        """The choice of a response. The content of a message that has calls alone, or reasoning alone, is
        null, but a text where calls were `forced`."""
        texts = self.texts
        alone = (self.calls or self.function or texts["reasoning"]) and not (texts["content"] or forced)
        message: dict[str, Any] = {
            "role": role, "content": None if alone else texts["content"],
            **dict.fromkeys(("refusal", "annotations", "audio")), "function_call": self.function}
        if self.calls: message["tool_calls"] = self.calls
        message["reasoning"] = texts["reasoning"] or None
        if texts["reasoning"]: message["reasoning_content"] = texts["reasoning"]
        logprobs = None if self.logprobs is None else {"content": self.logprobs}
        return {"index": at, "message": message, "logprobs": logprobs, **self.reasons, "token_ids": self.ids,
                "routed_experts": None}


async def _whole(conversation: Conversation, chunks: Chunks, shared: dict[str, Any],
                 record: Record) -> Response:
    request = conversation.request
    messages, told = [Message() for _ in range(request.params.n)], None
    async for chunk in chunks:
        told = chunk.get("prompt_logprobs", told)
        for part in chunk["choices"]: messages[part["index"]].add(part)
    forced = request.choice.is_forced
    choices = [message.choice(at, request.role, forced) for at, message in enumerate(messages)]
    return make_answer(conversation, choices, shared, record, {
        "prompt_logprobs": told, "prompt_token_ids": conversation.prompt if request.ids else None,
        "prompt_text": conversation.prompt_text()})


def make_answer(conversation: Conversation, choices: list[dict[str, Any]], shared: dict[str, Any],
                record: Record, of_prompt: Mapping[str, Any] = NO_PROMPT_FIELDS) -> Response:
    """The answer with these choices, and what is told of the prompt."""
    service = conversation.service
    more = dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
    return JSONAnswer({**shared, "choices": choices, "service_tier": None,
                       "system_fingerprint": service.fingerprint,
                       "usage": service.usage(record, conversation.reasons).fields(), **of_prompt, **more})


def logprob(each: TokenLogprobs, by_id: bool = False, named: bool = False) -> dict[str, Any]:
    """A token's entry in logprobs. With ids its bytes are still those of its text, as vLLM's. Beside `named`
    tokens, which the request asks for, is the token itself."""
    shown = each.top
    if named: shown = ((each.token, each.text, each.logprob), *(one for one in shown if one[0] != each.token))
    likeliest = [_token(token_name(token, text, by_id), value) for token, text, value in shown]
    return {"token": token_name(each.token, each.text, by_id), "logprob": each.logprob,
            "bytes": list(each.text.encode()), "top_logprobs": likeliest}


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
