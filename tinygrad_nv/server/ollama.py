"""POST /api/chat, /api/generate, /api/show, /api/embed, GET /api/tags, /api/ps, /api/version: Ollama's API.

Protocol: an answer is a stream of JSON objects, one a line, unless `stream` is false; the last one has
`done`, the reason, token counts and durations in ns. Tool calls come whole. An error is {"error": message}.
What the server cannot know, such as a model's size on disk, is 0.
"""
from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.server import embeddings, protocol
from tinygrad_nv.server.chat import logprob
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.leniency import note, translate_names
from tinygrad_nv.server.messages import argument_object
from tinygrad_nv.server.ollama_request import SPELLING, chat_request, generate_request, model_name, sampling
from tinygrad_nv.server.parsers.parser import CallDelta
from tinygrad_nv.server.parsers.table import NONE
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import Chunks, Plain, stream_events, until_disconnect
from tinygrad_nv.version import __version__

FOREVER = "2318-01-01T00:00:00Z"     # until when a model stays loaded


class Lines(Plain):
    """A JSON object a line."""
    end, media_type = b"", "application/x-ndjson"

    def event(self, data: dict[str, Any]) -> bytes:
        """One line."""
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def error(self, error: APIError) -> bytes:
        """The line of an error."""
        return self.event(error.ollama_body())


async def chat(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request of /api/chat; one without messages loads the model, which is loaded."""
    service.require_generator()
    fields = Fields(data)
    if not fields.left.get("messages"):
        return _answer_load(fields, service, {"message": {"role": "assistant", "content": ""}})
    parsed = await service.read(record, lambda: chat_request(fields, service))
    conversation = await Conversation.of(service, parsed, record.size)
    record.stream = parsed.stream
    chunks = _talk(conversation, record, lambda text, thought, calls: {"message": {
        "role": "assistant", "content": text, **_drop_empty(thinking=thought, tool_calls=calls)}})
    return await _respond(request, chunks, record, parsed.stream)


async def generate(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request of /api/generate; one without a prompt loads the model, which is loaded."""
    service.require_generator()
    fields = Fields(data)
    if not fields.left.get("prompt") and not fields.left.get("images"):
        return _answer_load(fields, service, {"response": ""})
    context = await service.read(record, lambda: list(fields.wholes("context") or ()))
    raw = fields.flag("raw")
    if raw or not service.require_tokenizer().template:
        return await _raw(request, service, record, fields, context)
    parsed = await service.read(record, lambda: generate_request(fields, service))
    conversation = await Conversation.of(service, parsed, record.size)
    conversation = replace(conversation, prompt=[*context, *conversation.prompt])
    record.stream = parsed.stream
    chunks = _talk(conversation, record, lambda text, thought, _: {
        "response": text, **_drop_empty(thinking=thought)}, context=True)
    return await _respond(request, chunks, record, parsed.stream)


async def _raw(request: Request, service: Service, record: Record, fields: Fields,
               context: Sequence[int]) -> Response:
    """Goes on with a prompt as it is."""
    parsed, name, stream = await service.read(record, lambda: _raw_request(service, fields))
    text = parsed.prompts[0]
    ids = await service.aside(record.size, lambda: service.model.tokenize(text))
    record.model, record.stream = name, stream

    async def chunks() -> Chunks:
        tokens, reason = [*context, *ids], "stop"
        async for _, delta in service.run([tokens[:]], parsed.params, parsed.priority, record):
            tokens += delta.tokens
            reason = delta.finish_reason or reason
            if delta.text or delta.logprobs:
                yield {**_head(name), "response": delta.text, "done": False, **_logprobs(delta)}
        yield {**_head(name), "response": "", **_end(record, reason), "context": tokens}
    return await _respond(request, chunks(), record, stream)


def _raw_request(service: Service, fields: Fields) -> tuple[protocol.CompletionRequest, str, bool]:
    """The request, the name of its model, and whether the answer is streamed."""
    asked, stream = {**sampling(fields), "prompt": fields.take("prompt")}, fields.flag("stream", True)
    asked["model"] = name = model_name(fields, service)
    asked["logprobs"] = fields.whole("top_logprobs", 0) or 0 if fields.flag("logprobs") else None
    fields.note(("system", "template", "images", "suffix", "keep_alive"))
    fields.finish()
    asked.pop("thinking")
    with translate_names(SPELLING):
        parsed = protocol.completion({key: value for key, value in asked.items() if value is not None},
                                     service.model.defaults, service.limits.without_context(), None)
    return parsed, name, stream


async def _talk(conversation: Conversation, record: Record,
                shape: Callable[[str, str, list[dict[str, Any]]], dict[str, Any]],
                context: bool = False) -> Chunks:
    head, calls, reason = conversation.model, list[CallDelta](), "stop"
    tokens = [*conversation.prompt]
    async for update in conversation.run(record):
        tokens += update.delta.tokens
        for call in update.calls:
            if call.name is not None or not calls: calls.append(call)
            else: calls[-1] = replace(calls[-1], text=calls[-1].text + call.text)
        reason = update.finish_reason or reason
        if update.content or update.reasoning or update.delta.logprobs:
            yield {**_head(head), **shape(update.content, update.reasoning, []), "done": False,
                   **_logprobs(update.delta)}
    if calls:
        made = [{"id": conversation.call_id(), "function": {
            "index": at, "name": call.name, "arguments": argument_object(call.text or "{}")}}
            for at, call in enumerate(calls)]
        yield {**_head(head), **shape("", "", made), "done": False}
    yield {**_head(head), **shape("", "", []), **_end(record, reason),
           **({"context": tokens} if context else {})}


def _drop_empty(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def _logprobs(delta: Delta) -> dict[str, Any]: return _drop_empty(logprobs=[*map(logprob, delta.logprobs)])


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": _write_time(time.time())}


def _write_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _end(record: Record, reason: str) -> dict[str, Any]:
    """The fields of the last line. Durations are ns; the model is loaded."""
    now, first = time.perf_counter(), record.first
    begun = now if first is None else first
    return {"done": True, "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _ns(now - record.started), "load_duration": 0,
            "prompt_eval_count": record.prompt_tokens, "prompt_eval_duration": _ns(begun - record.started),
            "eval_count": record.output_tokens, "eval_duration": _ns(now - begun)}


def _ns(seconds: float) -> int: return max(int(seconds * 1e9), 0)


def _answer_load(fields: Fields, service: Service, answer: dict[str, Any]) -> Response:
    """Answers a request that has nothing to answer: loading or unloading, neither of which happens."""
    name, kept = model_name(fields, service), fields.take("keep_alive")
    if kept is not None: note("keep_alive")
    return JSONAnswer({**_head(name), **answer, "done": True,
                         "done_reason": "unload" if kept in (0, "0", "0s") else "load"})


async def _respond(request: Request, chunks: Chunks, record: Record, stream: bool) -> Response:
    if stream: return await stream_events(request, chunks, record, Lines())
    return await until_disconnect(request, _whole(chunks))


async def _whole(chunks: Chunks) -> Response:
    """One object of all lines."""
    made, whole, logprobs = dict[str, Any](), dict[str, Any](), list[dict[str, Any]]()
    async for chunk in chunks:
        made, inner = chunk, chunk.get("message", chunk)
        logprobs += chunk.get("logprobs", ())
        for name in ("response", "thinking", "content"):
            if name in inner: whole[name] = whole.get(name, "") + inner[name]
        whole |= {name: inner[name] for name in ("role", "tool_calls") if name in inner}
    if "message" in made: whole = {"message": whole}
    return JSONAnswer({**made, **whole, **_drop_empty(logprobs=logprobs)})


async def embed(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request of /api/embed."""
    fields, model = Fields(data), service.require_embedder()
    name, cut = model_name(fields, service), fields.flag("truncate", True)
    asked = {"input": fields.take("input"), "dimensions": fields.take("dimensions")}
    fields.note(("options", "keep_alive"))
    fields.finish()
    if asked["input"] is None: raise invalid("input is missing, expected a text or a list of texts", "input",
                                             "missing_field")
    asked = {key: value for key, value in asked.items() if value is not None}
    if cut: asked["truncate_prompt_tokens"] = -1
    parsed = await service.read(record, lambda: embeddings.parse_request(asked))
    vectors = await embeddings.embed(request, service, model, parsed, record)
    shown = await service.aside(vectors.size, lambda: [each.tolist() for each in vectors])
    return JSONAnswer({"model": name, "embeddings": shown, "load_duration": 0,
                         "total_duration": _ns(time.perf_counter() - record.started),
                         "prompt_eval_count": record.prompt_tokens})


# **** what is served ****

def routes(service: Service) -> list[Route]:
    """Endpoints without a body."""
    def endpoint(made: Callable[[], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(_: Request) -> Response: return JSONAnswer(made())
        return answer
    tags: dict[str, Callable[[], dict[str, Any]]] = {
            "/api/tags": lambda: {"models": [_card(service, name) for name in service.names]},
            "/api/ps": lambda: {"models": [{**_card(service, name), "expires_at": FOREVER, "size_vram": 0,
                                            "context_length": service.model.length}
                                           for name in service.names[:1]]},
            "/api/version": lambda: {"version": __version__}}
    return [Route(path, endpoint(made)) for path, made in tags.items()]


async def show(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The response to a request of /api/show."""
    fields = Fields(data)
    name = model_name(fields, service)
    fields.ignore(("verbose", "system", "template", "options"))
    fields.finish()
    card = _card(service, name)
    kind = card["details"]["family"]
    template = "" if service.embedder is not None else service.require_tokenizer().template or ""
    return JSONAnswer({"modelfile": "", "parameters": "", "template": template, "license": "",
                         "details": card["details"], "modified_at": card["modified_at"],
                         "model_info": {"general.architecture": kind,
                                        f"{kind}.context_length": service.model.length},
                         "capabilities": _capabilities(service, template)})


def _capabilities(service: Service, template: str) -> list[str]:
    if service.embedder is not None: return ["embedding"]
    reasoning, tools = service.parsers.names_for(template)
    found = {"completion": True, "tools": tools != NONE or "tools" in template,
             "thinking": reasoning != NONE, "vision": service.vision is not None}
    return [name for name, there in found.items() if there]


def _card(service: Service, name: str) -> dict[str, Any]:
    family = str(getattr(getattr(service.model, "config", None), "model_type", "") or "transformer")
    return {"name": name, "model": name, "modified_at": _write_time(service.created), "size": 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": {"parent_model": "", "format": "safetensors", "family": family, "families": [family],
                        "parameter_size": "", "quantization_level": ""}}
