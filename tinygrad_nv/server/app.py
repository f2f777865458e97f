"""The ASGI application: routes, and OpenAI-style responses for every error.

Protocol: endpoints of `ANSWERS` get the JSON object of the body; status.py has those that tell of the server.
gate.py stands in front of all, and says which requests are admitted.

    POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/embeddings
    POST /v1/chat/completions/batch; /invocations: one of these, by its fields, as SageMaker asks
    POST /v1/images/generations
    POST /pooling, /classify, /score, /v1/score, /rerank, /v1/rerank, /v2/rerank, /tokenize, /detokenize
    POST /generative_scoring
    POST /v1/audio/transcriptions, /v1/audio/translations: a form, transcription_request.py
    POST /api/chat, /api/generate, /api/embed, /api/show, GET /api/tags, /api/ps, /api/version: ollama.py
    POST /completion, GET /props: llama_cpp.py
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    POST /sleep, /wake_up, GET /is_sleeping
    POST /inference/v1/generate, /v1/completions/render, …: scale_out/
    GET  /v1/models, /v1/models/{id}, /health, /ping, /load, /version, /tokenizer_info, /metrics, / (the page)
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tinygrad_nv import collection
from tinygrad_nv.server import (
    adapters,
    batched_chat,
    chat,
    completions,
    embeddings,
    generative_scoring,
    images,
    llama_cpp,
    messages,
    ollama,
    pooling,
    responses,
    sleeping,
    status,
    tokenization,
    transcriptions,
)
from tinygrad_nv.server.body import require_bounded
from tinygrad_nv.server.errors import APIError, internal
from tinygrad_nv.server.fields import parse
from tinygrad_nv.server.gate import Gate, route_path
from tinygrad_nv.server.limits import read_body
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.response_store import ResponseStore
from tinygrad_nv.server.scale_out import derendering, generating, rendering
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.sse import until_disconnect
from tinygrad_nv.server.workers import INLINE_BYTES, aside

Answer = Callable[[Request, Service, Record, dict[str, Any]], Awaitable[Response]]
# endpoints with a JSON body, and the prefixes of their ids
ANSWERS: dict[str, tuple[Answer, str]] = {
    "/v1/completions": (completions.answer, "cmpl-"), "/v1/chat/completions": (chat.answer, "chatcmpl-"),
    "/v1/chat/completions/batch": (batched_chat.answer, "chatcmpl-"),
    "/v1/responses": (responses.answer, "resp_"), "/v1/messages": (messages.answer, "msg_"),
    "/v1/messages/count_tokens": (messages.count, "req_"), "/v1/embeddings": (embeddings.answer, "embd-"),
    "/v1/images/generations": (images.answer, "img-"),
    "/pooling": (pooling.pooling, "pool-"), "/classify": (pooling.classify, "classify-"),
    **dict.fromkeys(("/score", "/v1/score"), (pooling.score, "score-")),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (pooling.rerank, "rerank-")),
    "/generative_scoring": (generative_scoring.answer, generative_scoring.PREFIX),
    "/api/chat": (ollama.chat, "chat-"), "/api/generate": (ollama.generate, "gen-"),
    "/api/embed": (ollama.embed, "embd-"), "/api/show": (ollama.show, "show-"),
    "/completion": (llama_cpp.completion, "cmpl-"),
    "/tokenize": (tokenization.tokenize, "tok-"), "/detokenize": (tokenization.detokenize, "tok-")}
# those of --enable-scale-out
SCALE_OUT: dict[str, tuple[Answer, str]] = {
    "/inference/v1/generate": (generating.generate, "generate-tokens-"),
    "/inference/v1/abort_requests": (generating.abort_requests, "abort-"),
    "/v1/completions/render": (rendering.render_completion, "cmpl-"),
    "/v1/chat/completions/render": (rendering.render_chat, "chatcmpl-"),
    "/v1/messages/render": (rendering.render_message, "chatcmpl-"),
    "/v1/responses/render": (rendering.render_response, "resp_"),
    "/v1/completions/derender": (derendering.derender_completion, "cmpl-"),
    "/v1/chat/completions/derender": (derendering.derender_chat, "chatcmpl-")}
UNTYPED = ("/api/chat", "/api/generate", "/api/embed", "/api/show", "/completion")
# paths of other servers, and what does the same here
ELSEWHERE = {**dict.fromkeys(("/generate", "/generate_stream", "/infer"), "/v1/completions"),
             **dict.fromkeys(("/chat", "/v1/chat"), "/v1/chat/completions"),
             **dict.fromkeys(("/api/embeddings", "/embedding"), "/api/embed"),
             **dict.fromkeys(("/api/pull", "/api/create", "/api/copy", "/api/delete", "/api/push", "/models"),
                             "/v1/models"),
             **dict.fromkeys(("/infill", "/completions"), "/completion"),
             **dict.fromkeys(("/slots", "/server_info", "/get_server_info"), "/load"),
             "/get_model_info": "/v1/models", "/apply-template": "/tokenize", "/reranking": "/rerank",
             "/lora-adapters": "/v1/load_lora_adapter"}
INVOCATIONS = "/invocations"
KEPT = [("GET", "", responses.retrieve), ("DELETE", "", responses.delete),
        ("GET", "/input_items", responses.input_items), ("POST", "/cancel", responses.cancel)]


def application(service: Service) -> ASGIApp:
    """The application that serves `service`."""
    routes = [Route(path, _post(service, answer, prefix), methods=["POST"])
              for path, (answer, prefix) in ANSWERS.items()]
    routes += [Route(path, _post(service, _require_scale_out(answer), prefix), methods=["POST"])
               for path, (answer, prefix) in SCALE_OUT.items()]
    routes.append(Route(INVOCATIONS, _post(service, _invoke, ""), methods=["POST"]))
    routes += [Route("/v1/responses/{id}" + path, _response_endpoint(service, task), methods=[method])
               for method, path, task in KEPT]
    routes += [Route(f"/v1/{name}_lora_adapter", _post(service, _adapter(change), "lora-"), methods=["POST"])
               for name, change in (("load", adapters.load), ("unload", adapters.unload))]
    routes += [Route(path, transcriptions.endpoint(service, task), methods=["POST"])
               for path, task in transcriptions.PATHS.items()]
    routes += [*ollama.routes(service), *llama_cpp.routes(service), *status.routes(service),
               *sleeping.routes(service.sleeping)]
    handlers = {HTTPException: _answer_http_error, APIError: _api_error, ClientDisconnect: _client_gone,
                Exception: _answer_internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False     # to an absolute address, which the header Host would make up
    return Gate(app, service, (*ANSWERS, *SCALE_OUT, *sleeping.PATHS, INVOCATIONS,
                              status.TOKENIZER_INFO, "/props"))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    request.scope["record"].error = error.code
    return error.response(route_path(request.scope), request.scope["record"].id)


async def _client_gone(request: Request, _: Exception) -> Response:
    """The client disconnected: only the log and the metrics see this response."""
    request.scope["record"].error = "client_gone"
    return Response(status_code=499)


async def _answer_internal_error(request: Request, _: Exception) -> Response:
    return internal().response(route_path(request.scope), request.scope["record"].id)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answers requests of unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, headers = route_path(request.scope)[:200], error.headers
    if error.status_code == 405:
        made = APIError(405, f"{request.method} is not served at {path}; expected: "
                        f"{(headers or {}).get('Allow', '')}", "method_not_allowed", None, headers)
    else:
        made = APIError(error.status_code, f"there is nothing at {path}{_nearest(path, request.app.routes)}",
                        "not_found", None, headers)
    request.scope["record"].error = made.code
    return made.response(path, request.scope["record"].id)


def _nearest(path: str, routes: Sequence[Route]) -> str:
    """The path that does the same, or the most similar one, for a message; "" if there is none."""
    served = [each.path for each in routes if each.path.count("/") <= 3 and each.path != "/"]
    found = ELSEWHERE.get(path) or next((each for each in served if each.endswith(path)), None) \
        or next(iter(get_close_matches(path, served, 1)), None)
    return f"; to fix: {found} is the nearest that is served" if found else ""


def _post(service: Service, answer: Answer, prefix: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        record: Record = request.scope["record"]
        record.id = prefix + record.id
        # clients of Ollama and llama.cpp, curl among them, need not say what a body is
        if request.scope.get("cross_origin") or not route_path(request.scope).endswith(UNTYPED):
            _require_json(request.headers)
        _require_plain(request.headers)
        with service.body_budget.hold(service.limits) as count:
            return await respond(request, record, await read_body(request, service.limits, count))

    async def respond(request: Request, record: Record, body: bytes) -> Response:
        record.size = len(body)
        if record.size <= INLINE_BYTES: return await answer(request, service, record, parse(body))

        async def large() -> Response:
            def parse_large() -> dict[str, Any]:
                require_bounded(body, service.limits)
                with collection.pause(): return parse(body)
            return await answer(request, service, record, await aside(record.size, parse_large))
        # reading it takes long enough for the client to leave
        return await until_disconnect(request, large())
    return endpoint


async def _invoke(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """Answers as the endpoint that has the fields of a request, among those of the model's task."""
    if service.embedder is None: path = "/v1/chat/completions" if "messages" in data else "/v1/completions"
    elif "documents" in data and "query" in data: path = "/rerank"
    elif any(data.keys() >= {*pair} for pair in pooling.SIDES): path = "/score"
    else: path = "/v1/embeddings" if service.embedder.classifier is None else "/classify"
    answer, prefix = ANSWERS[path]
    record.id = prefix + record.id
    return await answer(request, service, record, data)


def _response_endpoint(service: Service, task: Callable[[ResponseStore, str], Awaitable[Response]]
          ) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await task(service.responses_of(request.scope["record"]), request.path_params["id"])
    return endpoint


def _require_plain(headers: Mapping[str, str]) -> None:
    if (coding := headers.get("content-encoding", "identity").lower()) != "identity":
        raise APIError(415, f"the body's encoding is {coding[:100]!r}; expected: no header Content-Encoding; "
                       "to fix: send it as it is", "unsupported_media_type")


def _require_json(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise APIError(400, f"the body's type is {kind[:100]!r}; expected: the header Content-Type: "
                       "application/json", "unsupported_media_type")


def _require_scale_out(task: Answer) -> Answer:
    async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
        if service.scale_out: return await task(request, service, record, data)
        raise APIError(404, f"{route_path(request.scope)} is not served; to fix: start the server with "
                       "--enable-scale-out", "not_found")
    return answer


def _adapter(change: Callable[..., Awaitable[Response]]) -> Answer:
    async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
        return await change(request, service.adapters, data)
    return answer
