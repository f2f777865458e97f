"""POST /v1/completions.

Protocol: every prompt gives n choices, numbered prompt × n + index. A stream has a chunk for each delta, and
with `stream_options.include_usage` a last one with the usage and no choices.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.logprobs import of_token
from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.engine.prompts import TextOrTokens
from tinygrad_nv.engine.text.detokenizer import Echo
from tinygrad_nv.server import protocol
from tinygrad_nv.server.beams import beam_deltas
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import ChunksOrEvents, Template, stream_events, until_disconnect
from tinygrad_nv.server.usage import Usage
from tinygrad_nv.server.workers import checkpoint


async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    service.add_defaults(data)
    parsed = await service.read(record, lambda: protocol.completion(data, service.model.defaults,
                                                                    service.limits))
    name = record.model = service.require_name(parsed.model)
    prompts, echoes = await service.aside(record.size, lambda: tokenize_prompts(service, parsed))
    shared = {"id": record.answer_id("cmpl-", data.get("request_id")), "object": "text_completion",
              "created": int(time.time()), "model": name}
    record.stream = parsed.stream
    chunks = _chunks(service, parsed, prompts, echoes, record, shared)
    if parsed.stream: return await stream_events(request, chunks, record)
    count = len(prompts) * parsed.params.n
    return await until_disconnect(request, whole_answer(service, chunks, shared, count, record))


async def _chunks(service: Service, parsed: protocol.CompletionRequest, prompts: Sequence[list[int]],
                  echoes: Sequence[str], record: Record, shared: dict[str, Any]) -> ChunksOrEvents:
    offsets, shown = dict[int, int](), dict[int, Echo]()
    top, n = parsed.params.num_logprobs, parsed.params.n
    deltas = beam_deltas(service, prompts, parsed, record) if parsed.beams is not None else \
        service.run(prompts, parsed.params, parsed.priority, record, parsed.salt)
    if parsed.params.prompt_logprobs is not None: deltas = prompt_first(deltas, n)
    # most chunks of a stream differ in their text alone
    more = parsed.silent or parsed.echo or parsed.ids or parsed.usages
    is_text_only = parsed.stream and top is None and not more
    templates = dict[int, Template]()
    async for at, delta in deltas:
        if is_text_only and delta.finish_reason is None:
            if at not in templates: templates[at] = Template({**shared, "choices": [_choice(at, "\0")]})
            yield templates[at].fill(delta.text)
            continue
        first, prompt = at not in offsets, prompts[at // n]
        if parsed.silent: delta = replace(delta, text="", logprobs=(), finish_reason="length",
                                          stop_reason=None)
        offset, parts = offsets.setdefault(at, 0), list[dict[str, Any]]()
        if first and parsed.echo and top is not None:
            own, offset = _prompt_logprobs(service, prompt, delta.prompt_logprobs,
                                           parsed.params.logprobs or 0, parsed.ids_for_texts)
            parts.append(own)
        if top is not None and delta.logprobs:
            own, offset = completion_logprobs(delta.logprobs, offset, top, parsed.ids_for_texts)
            parts.append(own)
        offsets[at] = offset
        text = delta.text
        if parsed.echo:
            if first: shown[at] = Echo(service.require_tokenizer().decode, echoes[at // n], prompt)
            text = shown[at].push(text, delta.tokens, delta.finish_reason is not None)
        choice = {**_choice(at, text), "logprobs": _join_logprobs(parts),
                  "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason,
                  "prompt_token_ids": prompt if first and (parsed.ids or parsed.echo) else None,
                  "token_ids": list(delta.tokens) if parsed.ids else None}
        # those of an echo, too, where no number of their own was asked for
        most = parsed.params.prompt_logprobs if parsed.prompt_logprobs is None else parsed.prompt_logprobs
        if first and not parsed.stream and most is not None:
            choice["prompt_logprobs"] = prompt_dictionaries(delta.prompt_logprobs, most)
        chunk = {**shared, "choices": [choice]}
        if parsed.usages:
            used = record.answers[at].tokens if at in record.answers else 0
            chunk["usage"] = Usage(len(prompt), used).fields(whole=False)
        if delta.finish_reason and not parsed.usage: chunk["system_fingerprint"] = service.fingerprint
        yield chunk
    if parsed.usage:
        yield {**shared, "choices": [], "usage": service.usage(record).fields(whole=False),
               "system_fingerprint": service.fingerprint}


def _choice(at: int, text: str) -> dict[str, Any]:
    return {"index": at, "text": text, **dict.fromkeys(("logprobs", "finish_reason", "stop_reason",
                                                        "prompt_token_ids", "token_ids"))}


async def prompt_first(deltas: AsyncGenerator[tuple[int, Delta], None],
                       n: int) -> AsyncGenerator[tuple[int, Delta], None]:
    """The same deltas, but the first one of every choice has the log probabilities of its prompt, which the
    engine gives to the first choice of a prompt: others wait for that one."""
    found: dict[int, tuple[TokenLogprobs, ...]] = {}
    held: dict[int, list[tuple[int, Delta]]] = {}
    begun = set[int]()
    async with contextlib.aclosing(deltas):
        async for at, delta in deltas:
            prompt = at // n
            if prompt not in found:
                held.setdefault(prompt, []).append((at, delta))
                if at % n: continue
                found[prompt] = delta.prompt_logprobs
            for choice, its in held.pop(prompt, [(at, delta)]):
                if choice in begun: yield choice, its
                else: yield choice, replace(its, prompt_logprobs=found[prompt])
                begun.add(choice)


async def whole_answer(service: Service, chunks: ChunksOrEvents, shared: dict[str, Any], count: int,
                       record: Record) -> Response:
    """The answer of `count` choices that `chunks` add up to."""
    choices: list[dict[str, Any]] = [
        {"index": at, "text": "", **dict.fromkeys(
            ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids",
             "routed_experts"))} for at in range(count)]
    async for chunk in chunks:
        assert isinstance(chunk, dict), "a stream's chunks alone are written"
        for part in chunk["choices"]:
            whole = choices[part["index"]]
            whole["text"] += part["text"]
            if (new := part["logprobs"]) is not None:
                old = whole["logprobs"]
                whole["logprobs"] = new if old is None else _join_logprobs([old, new])
            whole |= {key: part[key] for key in ("finish_reason", "stop_reason")}
            if "prompt_logprobs" in part: whole["prompt_logprobs"] = part["prompt_logprobs"]
            if (ids := part["token_ids"]) is None: continue
            whole["token_ids"] = (whole["token_ids"] or []) + ids
            whole["prompt_token_ids"] = whole["prompt_token_ids"] or part["prompt_token_ids"]
    return JSONAnswer({**shared, "choices": choices, "service_tier": None,
                       "system_fingerprint": service.fingerprint, "usage": service.usage(record).fields(),
                       **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))})


def tokenize_prompts(service: Service,
                     parsed: protocol.CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Returns the tokens of all prompts, and the texts to prepend to their choices."""
    prompts = [_ids(service, parsed, prompt) for prompt in parsed.prompts]
    return prompts, [_echo(service, parsed, prompts, at) for at in range(len(prompts))]


def _ids(service: Service, parsed: protocol.CompletionRequest, prompt: TextOrTokens) -> list[int]:
    """The tokens of a prompt."""
    checkpoint()
    if isinstance(prompt, str) and not parsed.special:
        tokenizer = service.model.require_tokenizer()
        tokenizer.require_fitting(prompt, service.model.length - 1,
                                  parsed.params.truncate_prompt_tokens is not None)
        prompt = tokenizer.encode(prompt, special=False)
    return service.model.tokenize(prompt, parsed.params.truncate_prompt_tokens, parsed.side)


def _echo(service: Service, parsed: protocol.CompletionRequest, prompts: Sequence[list[int]], at: int) -> str:
    """The text to prepend to the choices of a prompt; none, as vLLM's, where its token ids are returned. That
    of ids has the names of special tokens, which a client has put there."""
    if not parsed.echo or parsed.ids: return ""
    prompt = parsed.prompts[at]
    if isinstance(prompt, str) and parsed.params.truncate_prompt_tokens is None: return prompt
    return service.model.require_tokenizer().decode(prompts[at], isinstance(prompt, str))


def token_name(token: int, text: str, by_id: bool) -> str:
    """Returns how log probabilities name a token: by its text or, where the request asks for it, its id."""
    return f"token_id:{token}" if by_id else text


def completion_logprobs(logprobs: Sequence[TokenLogprobs], offset: int, top: int,
                        by_id: bool) -> tuple[dict[str, Any], int]:
    """Logprobs in the format of /v1/completions, and the length of the text after them. `top_logprobs` has
    the token itself, then the likeliest; of several with the same text the first of these."""
    out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for each in logprobs:
        name = token_name(each.token, each.text, by_id)
        out["text_offset"].append(offset)
        out["token_logprobs"].append(each.logprob)
        out["tokens"].append(name)
        likeliest = {name: each.logprob}
        for token, text, value in each.top[:top]: likeliest.setdefault(token_name(token, text, by_id), value)
        out["top_logprobs"].append(likeliest)
        offset += len(name)
    return out, offset


def _prompt_logprobs(service: Service, prompt: Sequence[int], found: Sequence[TokenLogprobs],
                     top: int, by_id: bool) -> tuple[dict[str, Any], int]:
    """`completion_logprobs` of an echoed prompt: None for its first token, which nothing predicts."""
    text = token_name(prompt[0], service.model.require_tokenizer().token_text(prompt[0]), by_id)
    first = {"text_offset": [0], "token_logprobs": [None], "tokens": [text], "top_logprobs": [None]}
    rest, offset = completion_logprobs(found, len(text), top, by_id)
    return {key: first[key] + rest[key] for key in rest}, offset


def prompt_dictionaries(found: Sequence[TokenLogprobs], most: int) -> list[dict[int, Any] | None]:
    """vLLM's prompt_logprobs: a dictionary for each token, None for the first."""
    tokens = [of_token(replace(each, top=each.top[:most])) for each in found]
    return [None, *({token: vars(its) for token, its in each.items()} for each in tokens)]


def _join_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return {key: [item for part in parts for item in part[key]] for key in parts[0]} if parts else None

