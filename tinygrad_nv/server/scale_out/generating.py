"""POST /inference/v1/generate: token ids in, token ids out; and abort_requests, which ends such requests.

Protocol: fields and answers are vLLM's. `sampling_params` has the parameters; without `max_tokens` an answer
may fill the context. `output_mode` "text" adds the text, and log probabilities as conversations have them.
A constraint holds after the reasoning, where the prompt leaves one open, unless `reasoning_ended` is true.
An aborted request ends with finish reason "abort"; with several API keys only its own key may abort it.
"""
from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.logprobs import of_token
from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import NVError
from tinygrad_nv.server.chat import logprob
from tinygrad_nv.server.completions import prompt_dictionaries
from tinygrad_nv.server.conversation import TAIL_TOKENS, reasoning_tokens
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.parsers.table import Answer
from tinygrad_nv.server.protocol import Common, common_fields, logprob_token_ids
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, stream_events, until_disconnect

# fields of the request that are not in its sampling_params
OUTER = ("model", "stream", "stream_options", "cache_salt", "priority", "return_token_ids")
# of sampling_params: how vLLM's engine passes outputs on
INTERNAL = ("output_kind", "skip_clone", "skip_reading_prefix_cache", "extra_args", "flat_logprobs")
MAX_ABORTED = 1 << 16      # limit: ids of one request to abort
ABSENT = dict.fromkeys(("routed_experts", "sampling_mask"))


@dataclass(frozen=True)
class GenerateRequest:
    """Request of /inference/v1/generate. `text`: the answer has it, too. `constrained`: a constraint holds
    from the first token on. `budget`: tokens of reasoning at most."""
    common: Common
    tokens: list[int]
    text: bool
    name: str | None
    constrained: bool
    budget: int | None


def generate_request(data: dict[str, Any], limits: RequestLimits) -> GenerateRequest:
    """Parses a request. Raises `APIError`."""
    fields = Fields(data)
    if not (tokens := fields.wholes("token_ids")):
        raise invalid("token_ids is missing or empty, expected a list of token ids", "token_ids",
                      "missing_field")
    for each in ("features", "content_parts"):
        if fields.take(each):
            raise invalid(f"{each} is not served: images are read in conversations; to fix: POST "
                          "/v1/chat/completions", each, "unsupported")
    fields.as_usual({"kv_transfer_params": {}, "ec_transfer_params": {}})
    if (given := fields.object("sampling_params")) is None:
        raise invalid("sampling_params is missing, expected an object", "sampling_params", "missing_field")
    text = fields.one_of("output_mode", ("tokens", "text")) == "text"
    name, ended = fields.text("request_id"), fields.flag("reasoning_ended")
    fields.ignore(("token_offsets", "reasoning_parser_kwargs"))
    inner = Fields({each: value for each, value in given.items() if each not in OUTER}
                   | {each: fields.take(each) for each in OUTER})
    fields.finish()
    if not inner.flag("detokenize", True) and text:
        raise invalid("output_mode is 'text', and sampling_params.detokenize false, expected true",
                      "output_mode", "wrong_type")
    most, logprobs = inner.whole("max_tokens", 1), inner.whole("logprobs", 0, limits.logprobs)
    budget = inner.whole("thinking_token_budget", -1)
    inner.ignore(INTERNAL)
    # not in a stream, as vLLM's
    if inner.left.get("stream"): inner.take("prompt_logprobs")
    common = common_fields(inner, SamplingParams(), limits, 1, {
        "max_tokens": most, "logprobs": logprobs, "logprob_token_ids": logprob_token_ids(inner, True)})
    inner.finish()
    return GenerateRequest(common, [*tokens], text, name, ended, None if budget == -1 else budget)


async def generate(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request with body `data`."""
    service.require_generator()
    asked = await service.read(record, lambda: generate_request(data, service.limits))
    record.model = service.require_name(asked.common.model)
    record.stream = asked.common.stream
    prompt = await service.aside(record.size, lambda: service.model.tokenize(asked.tokens))
    asked = await service.aside(record.size, lambda: _after_reasoning(service, asked, prompt))
    given = record.client_id or asked.name
    name = record.id if given is None else f"generate-tokens-{given}"
    chunks = _chunks(service, asked, prompt, name, record)
    if asked.common.stream: return await stream_events(request, chunks, record)
    return await until_disconnect(request, _whole(chunks, asked, prompt, name, record))


def _after_reasoning(service: Service, asked: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    """Leaves reasoning that the prompt begins, or the answer may begin, free of the constraint."""
    params, budget = asked.common.params, asked.budget
    if asked.constrained or (params.structured_outputs is None and budget is None): return asked
    tokenizer = service.require_tokenizer()
    try: name = service.parsers.names_for(tokenizer.chat_template(False))[0]
    except NVError: return asked
    answer = Answer(tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False), False, {})
    params = replace(params, reasoning=reasoning_tokens(name, answer, tokenizer, budget))
    return replace(asked, common=replace(asked.common, params=params))


async def _chunks(service: Service, asked: GenerateRequest, prompt: list[int], name: str,
                  record: Record) -> Chunks:
    common, begun, counts = asked.common, False, dict[int, int]()
    key, aborted = (record.owner, name), asyncio.Event()
    service.generating.setdefault(key, []).append(aborted)
    shared = {"request_id": name, "output_mode": "text" if asked.text else "tokens"}
    deltas = service.run([prompt], common.params, common.priority, record, common.salt)
    try:
        async for at, delta in until_aborted(deltas, aborted, common.params.n):
            counts[at] = counts.get(at, 0) + len(delta.tokens)
            chunk: dict[str, Any] = {
                **shared, "usage": usage(len(prompt), counts[at]) if common.usages else None,
                "choices": [_choice(at, delta, asked, counts[at])]}
            if not begun and common.ids: chunk["prompt_token_ids"] = prompt
            if delta.prompt_logprobs: chunk["prompt_logprobs"] = delta.prompt_logprobs
            begun = True
            yield chunk
        if common.usage:
            told = usage(len(prompt), sum(counts.values()))
            yield {**shared, "choices": [],
                   "usage": {each: value for each, value in told.items() if value is not None}}
    finally:
        service.generating[key].remove(aborted)
        if not service.generating[key]: del service.generating[key]


async def until_aborted(deltas: AsyncGenerator[tuple[int, Delta], None], aborted: asyncio.Event,
                        n: int) -> AsyncGenerator[tuple[int, Delta], None]:
    """`deltas`, until the event is set: sequences that are not complete then end with "abort"."""
    stop, left = asyncio.ensure_future(aborted.wait()), dict.fromkeys(range(n))
    async with contextlib.aclosing(deltas):
        try:
            while not aborted.is_set():
                step = asyncio.ensure_future(anext(deltas, None))
                try: await asyncio.wait((step, stop), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not step.done():
                        step.cancel()
                        await asyncio.gather(step, return_exceptions=True)
                if step.cancelled(): break
                if (found := step.result()) is None: return
                if found[1].finish_reason is not None: left.pop(found[0], None)
                yield found
        finally: stop.cancel()
    for at in left: yield at, Delta(at, "", (), finish_reason="abort")


def _choice(at: int, delta: Delta, asked: GenerateRequest, count: int) -> dict[str, Any]:
    shown, versions = None, None
    # weights are those that the server has loaded
    if delta.finish_reason is not None: versions = [{"version": "default", "start": 0, "end": count}]
    if asked.common.params.num_logprobs is not None:
        shown = {"content": [(logprob if asked.text else by_id)(each) for each in delta.logprobs]}
    return {"index": at, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason,
            "token_ids": [*delta.tokens], **ABSENT, "weight_versions": versions,
            **({"text": delta.text} if asked.text else {}), "logprobs": shown}


def by_id(found: TokenLogprobs) -> dict[str, Any]:
    """A token's entry in logprobs, with ids for texts: the sampled token is the first of the likeliest."""
    likeliest = [{"token_id": token, "logprob": each.logprob, "rank": each.rank}
                 for token, each in of_token(found).items()]
    return {**likeliest[0], "top_logprobs": likeliest}


async def _whole(chunks: Chunks, asked: GenerateRequest, prompt: list[int], name: str,
                 record: Record) -> Response:
    choices: dict[int, dict[str, Any]] = {}
    told: list[Any] | None = None
    async for chunk in chunks:
        if found := chunk.get("prompt_logprobs"):
            told = prompt_dictionaries(found, asked.common.params.prompt_logprobs or 0)
        for part in chunk["choices"]:
            if (whole := choices.setdefault(part["index"], part)) is part: continue
            for key in ("token_ids", "text"):
                if key in part: whole[key] += part[key]
            if part["logprobs"]: whole["logprobs"]["content"] += part["logprobs"]["content"]
            whole |= {key: part[key] for key in ("finish_reason", "stop_reason", "weight_versions")}
    made = usage(len(prompt), sum(len(each["token_ids"]) for each in choices.values()))
    return JSONAnswer({
        "request_id": name, "model": record.model, "created": int(time.time()), "usage": made,
        "prompt_logprobs": told, "prompt_token_id_logprobs": None,
        "prompt_token_ids": prompt if asked.common.ids else None,
        **dict.fromkeys(("mm_placeholders", "metrics", "kv_transfer_params", "ec_transfer_params")),
        "output_mode": "text" if asked.text else "tokens",
        "choices": [choices[at] for at in sorted(choices)]})


def usage(prompt: int, answer: int) -> dict[str, Any]:
    """Numbers of tokens."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer,
            "prompt_tokens_details": None, "completion_tokens_details": None}


async def abort_requests(request: Request, service: Service, record: Record,
                         data: dict[str, Any]) -> Response:
    """Ends requests of /inference/v1/generate by their ids; others are not known."""
    fields = Fields(data)
    names = fields.take("request_ids")
    if names is None:
        raise invalid("request_ids is missing, expected a list of ids", "request_ids", "missing_field")
    fields.finish()
    if isinstance(names, list) and len(names) > MAX_ABORTED:
        raise invalid(f"request_ids has {len(names)} entries, expected at most {MAX_ABORTED}", "request_ids")
    # as in vLLM, what is no id is one that is not known
    for name in [names] if isinstance(names, str) else names if isinstance(names, list) else ():
        if not isinstance(name, str): continue
        for event in service.generating.get((record.owner, name), ()): event.set()
    return Response(status_code=200)
