"""POST /v1/chat/completions.

Protocol: the conversation goes through the model's chat template, with its tools. A stream starts with a
chunk that names the role of each choice, then has one for each delta. A tool call is sent whole, in one
chunk, when it is complete.
"""
from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.server import protocol
from tinygrad_nv.server.completions import usage
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, streamed, until_disconnect
from tinygrad_nv.server.tools import Call, CallParser, ToolChoice, call_style, forced_calls


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    parsed = protocol.chat(data, service.model.defaults, service.limits)
    name = record.model = service.require_name(parsed.model)
    tools = () if parsed.choice.mode == "none" else parsed.tools
    size = sum(len(message["content"]) for message in parsed.messages)
    prompt = await service.aside(size, lambda: service.model.encode_chat(parsed.messages, tools,
                                                                         **parsed.extra))
    shared = {"id": record.id, "object": "chat.completion.chunk" if parsed.stream else "chat.completion",
              "created": int(time.time()), "model": name}
    record.stream = parsed.stream
    style = call_style(service.model.require_tokenizer().template) if tools else ""
    chunks = _chunks(service, parsed, prompt, record, shared, style)
    if parsed.stream: return await streamed(request, chunks, record)
    return await until_disconnect(request, _whole(chunks, shared, parsed.params.n, record))


class ChatChoice:
    """One choice in progress: its text, parsed for tool calls."""

    def __init__(self, at: int, style: str, choice: ToolChoice) -> None:
        self.at, self.calls, self.choice = at, 0, choice
        self.parser = CallParser(style if choice.mode == "auto" else "")
        self.all = ""

    def push(self, delta: Delta, logprobs: bool) -> dict[str, Any]:
        """The chunk's entry for a delta."""
        content, calls = self._read(delta)
        if not self.choice.several: calls = calls[:1 - self.calls]
        sent: dict[str, Any] = {"content": content} if content or not calls else {}
        if calls:
            sent["tool_calls"] = [call.to_json(self.calls + i) for i, call in enumerate(calls)]
            self.calls += len(calls)
        reason = delta.finish_reason
        if reason == "stop" and self.calls: reason = "tool_calls"
        return {"index": self.at, "delta": sent, "finish_reason": reason, "stop_reason": delta.stop_reason,
                "logprobs": {"content": [_logprob(each) for each in delta.logprobs]} if logprobs else None}

    def _read(self, delta: Delta) -> tuple[str, list[Call]]:
        if self.choice.forced:
            # the whole text is tool calls, sent when complete or truncated by max_tokens
            self.all += delta.text
            return "", [] if delta.finish_reason is None else forced_calls(self.all, self.choice)
        content, calls = self.parser.push(delta.text)
        if delta.finish_reason is not None:
            rest, more = self.parser.flush()
            content, calls = content + rest, calls + more
        return content, calls


async def _chunks(service: Service, parsed: protocol.ChatRequest, prompt: list[int], record: Record,
                  shared: dict[str, Any], style: str) -> Chunks:
    choices: dict[int, ChatChoice] = {}
    logprobs = parsed.params.logprobs is not None
    async for at, delta in service.run([prompt], parsed.params, parsed.priority, record):
        if at not in choices:
            choices[at] = ChatChoice(at, style, parsed.choice)
            yield {**shared, "choices": [{"index": at, "delta": {"role": "assistant", "content": ""},
                                          "logprobs": None, "finish_reason": None}]}
        entry = choices[at].push(delta, logprobs)
        # no chunk while text that may become a tool call is held back
        if entry["delta"] != {"content": ""} or entry["finish_reason"] or delta.logprobs:
            yield {**shared, "choices": [entry], **({"usage": usage(record)} if parsed.usages else {})}
    if parsed.usage: yield {**shared, "choices": [], "usage": usage(record)}


async def _whole(chunks: Chunks, shared: dict[str, Any], count: int, record: Record) -> Response:
    texts = [""] * count
    calls: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    choices: list[dict[str, Any]] = [{} for _ in range(count)]
    sent = False
    async for chunk in chunks:
        for part in chunk["choices"]:
            at, delta = part["index"], part["delta"]
            texts[at] += delta.get("content", "")
            calls[at] += [{key: call[key] for key in call if key != "index"}
                          for call in delta.get("tool_calls", [])]
            if part["logprobs"]: logprobs[at] += part["logprobs"]["content"]
            sent = sent or part["logprobs"] is not None
            choices[at] = {key: part.get(key) for key in ("finish_reason", "stop_reason")}
    for at in range(count):
        content = None if calls[at] and not texts[at] else texts[at]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls[at]: message["tool_calls"] = calls[at]
        choices[at] |= {"index": at, "message": message,
                        "logprobs": {"content": logprobs[at], "refusal": None} if sent else None}
    return JSONResponse({**shared, "choices": choices, "usage": usage(record)})


def _logprob(each: TokenLogprobs) -> dict[str, Any]:
    return {**_token(each.text, each.logprob),
            "top_logprobs": [_token(text, value) for _, text, value in each.top]}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
