"""POST /v1/completions.

Protocol: every prompt gives n choices, numbered prompt × n + index. A stream has a chunk for each delta, and
with `stream_options.include_usage` a last one with the usage and no choices.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.server import protocol
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, streamed, until_disconnect


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    parsed = protocol.completion(data, service.model.defaults, service.limits)
    name = record.model = service.require_name(parsed.model)
    size = sum(map(len, parsed.prompts))
    prompts = await service.aside(size, lambda: [service.model.tokenize(prompt) for prompt in parsed.prompts])
    echoes = await service.aside(size, lambda: [_echo(service, parsed, prompts, at)
                                                for at in range(len(prompts))])
    shared = {"id": record.id, "object": "text_completion", "created": int(time.time()), "model": name}
    record.stream = parsed.stream
    chunks = _chunks(service, parsed, prompts, echoes, record, shared)
    if parsed.stream: return await streamed(request, chunks, record)
    return await until_disconnect(request, _whole(chunks, shared, len(prompts) * parsed.params.n, record))


async def _chunks(service: Service, parsed: protocol.CompletionRequest, prompts: Sequence[list[int]],
                  echoes: Sequence[str], record: Record, shared: dict[str, Any]) -> Chunks:
    offsets: dict[int, int] = {}
    async for at, delta in service.run(prompts, parsed.params, parsed.priority, record, parsed.salt):
        first = at not in offsets
        offset = offsets.setdefault(at, 0)
        logprobs = None
        if parsed.params.logprobs is not None and delta.logprobs:
            logprobs, offsets[at] = completion_logprobs(delta.logprobs, offset, parsed.params.logprobs)
        echo = echoes[at // parsed.params.n] if first else ""
        choice = _choice(at, echo + delta.text, delta, logprobs)
        if parsed.ids:
            if first: choice["prompt_token_ids"] = prompts[at // parsed.params.n]
            choice["token_ids"] = list(delta.tokens)
        yield {**shared, "choices": [choice], **({"usage": usage(record)} if parsed.usages else {})}
    if parsed.usage: yield {**shared, "choices": [], "usage": usage(record)}


async def _whole(chunks: Chunks, shared: dict[str, Any], count: int, record: Record) -> Response:
    choices: list[dict[str, Any]] = [{"index": at, "text": "", "logprobs": None} for at in range(count)]
    async for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices[part["index"]]
            whole["text"] += part["text"]
            if (new := part["logprobs"]) is not None:
                old = whole["logprobs"]
                whole["logprobs"] = new if old is None else {key: old[key] + new[key] for key in new}
            whole |= {key: part[key] for key in ("finish_reason", "stop_reason")}
            for key in ("prompt_token_ids", "token_ids"):
                if key in part: whole[key] = whole.get(key, []) + part[key]
    return JSONResponse({**shared, "choices": choices, "usage": usage(record)})


def _choice(at: int, text: str, delta: Delta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason}


def _echo(service: Service, parsed: protocol.CompletionRequest, prompts: Sequence[list[int]], at: int) -> str:
    """The text to prepend to the choices of a prompt."""
    if not parsed.echo: return ""
    prompt = parsed.prompts[at]
    return prompt if isinstance(prompt, str) else service.model.require_tokenizer().decode(prompts[at])


def completion_logprobs(logprobs: Sequence[TokenLogprobs], offset: int,
                        top: int) -> tuple[dict[str, Any], int]:
    """Logprobs in the format of /v1/completions, and the length of the text after them."""
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if top else None,
                           "text_offset": []}
    for each in logprobs:
        out["tokens"].append(each.text)
        out["token_logprobs"].append(each.logprob)
        out["text_offset"].append(offset)
        offset += len(each.text)
        if top: out["top_logprobs"].append({text: value for _, text, value in each.top})
    if not top: del out["top_logprobs"]
    return out, offset


def usage(record: Record) -> dict[str, Any]:
    """Tokens of a request so far."""
    return {"prompt_tokens": record.prompt_tokens, "completion_tokens": record.output_tokens,
            "total_tokens": record.prompt_tokens + record.output_tokens,
            "prompt_tokens_details": {"cached_tokens": record.cached_tokens}}
