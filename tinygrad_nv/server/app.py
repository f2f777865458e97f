"""The ASGI application: routes, API keys, and OpenAI-style responses for every error.

Protocol: `Gate` is the outermost middleware. It gives each request an id (x-request-id), rejects /v1 while
the server drains (503) and without an API key (401), turns `APIError`s and unexpected exceptions (500) into
responses, counts and logs. A client that disconnected is logged with status 499.

    POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/embeddings
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    GET  /v1/models, /v1/models/{id}
    GET  /health (200, or 503 while it drains), /metrics, / (the page)
"""
from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinygrad_nv.server import adapters, chat, completions, embeddings, messages, responses
from tinygrad_nv.server.errors import APIError, internal
from tinygrad_nv.server.fields import parse
from tinygrad_nv.server.limits import read_body
from tinygrad_nv.server.log import LOG, request_line
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service

PAGE = Path(__file__).parent / "page"
# the page loads nothing from elsewhere, and runs in no frame
POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
PAGE_HEADERS = {"Content-Security-Policy": POLICY,
                "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
FILES = {"page.js": "text/javascript", "page.css": "text/css"}
Answer = Callable[[Request, Service, Record, dict[str, Any]], Awaitable[Response]]
# endpoints with a JSON body, and the prefixes of their ids
ANSWERS: dict[str, tuple[Answer, str]] = {
    "/v1/completions": (completions.answer, "cmpl-"), "/v1/chat/completions": (chat.answer, "chatcmpl-"),
    "/v1/responses": (responses.answer, "resp_"), "/v1/messages": (messages.answer, "msg_"),
    "/v1/messages/count_tokens": (messages.count, "req_"), "/v1/embeddings": (embeddings.answer, "embd-")}
KEPT = [("GET", "", responses.retrieve), ("DELETE", "", responses.delete),
        ("GET", "/input_items", responses.input_items), ("POST", "/cancel", responses.cancel)]


def application(service: Service) -> ASGIApp:
    """The application that serves `service`."""
    routes = [Route(path, _post(service, answer, prefix), methods=["POST"])
              for path, (answer, prefix) in ANSWERS.items()]
    routes += [Route("/v1/responses/{id}" + path, _kept(service, task), methods=[method])
               for method, path, task in KEPT]
    routes += [Route(f"/v1/{name}_lora_adapter", _post(service, _adapter(change), "lora-"), methods=["POST"])
               for name, change in (("load", adapters.load), ("unload", adapters.unload))]
    routes += [Route("/v1/models", _models(service)), Route("/v1/models/{name:path}", _models(service)),
              Route("/health", _health(service)), Route("/metrics", _metrics(service)), Route("/", _page)]
    routes += [Route(f"/{name}", _page) for name in FILES]
    handlers = {HTTPException: _refused, APIError: _api_error, ClientDisconnect: _client_gone,
                Exception: _unexpected}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Gate(app, service)


class Gate:
    """Middleware around `app`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http": return await self.app(scope, receive, send)
        record = scope["record"] = Record(secrets.token_hex(12))
        status = 499

        async def recorded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            await send(message)

        served = scope["path"].startswith("/v1/")
        self.service.active += served
        try:
            try:
                _require_framing(scope)
                if served: self._admit(scope)
                await self.app(scope, receive, recorded_send)
            except APIError as error:
                record.error = error.code
                await error.response(scope["path"], record.id)(scope, receive, recorded_send)
            except Exception as error:  # `_unexpected` has responded
                LOG.exception("internal_error id=%s", record.id)
                record.error = type(error).__name__
        finally:
            self.service.active -= served
            self._ended(scope, record, status)

    def _admit(self, scope: Scope) -> None:
        if self.service.keys:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("latin-1")
            kind, _, key = given.partition(" ")
            # the header of Anthropic's clients
            if not given and (given := headers.get(b"x-api-key", b"").decode("latin-1")):
                kind, key = "bearer", given
            known = [hmac.compare_digest(key.strip().encode(), each.encode()) for each in self.service.keys]
            if kind.lower() != "bearer" or not any(known):
                what = "is wrong" if given else "is missing"
                raise APIError(401, f"the API key {what}; expected: the header Authorization: Bearer KEY, or "
                               "x-api-key: KEY",
                               "invalid_api_key", None, {"WWW-Authenticate": "Bearer"})
        if self.service.draining:
            raise APIError(503, "the server is stopping and takes no new requests", "draining", None,
                           {"Retry-After": "5", "Connection": "close"})

    def _ended(self, scope: Scope, record: Record, status: int) -> None:
        self.service.metrics.finished(record)
        route = scope.get("route")
        path = "other" if route is None else route.path
        self.service.metrics.http_requests.labels(_method(scope), path, str(status)).inc()
        # /health and /metrics, requested every few seconds, would flood the log
        if scope["path"].startswith("/v1/") or status >= 400:
            LOG.info(request_line(record, scope["method"], scope["path"], status))


def _require_framing(scope: Scope) -> None:
    # a proxy may have used the other header, and taken the rest of the body for another request
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise APIError(400, "the headers have Content-Length and Transfer-Encoding, expected one of them",
                       "invalid_http", None, {"Connection": "close"})


def _method(scope: Scope) -> str:
    # bounds the number of label values
    return scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    request.scope["record"].error = error.code
    return error.response(request.url.path, request.scope["record"].id)


async def _client_gone(request: Request, _: Exception) -> Response:
    """The client disconnected: only the log and the metrics see this response."""
    request.scope["record"].error = "client_gone"
    return Response(status_code=499)


async def _unexpected(request: Request, _: Exception) -> Response:
    return internal().response(request.url.path, request.scope["record"].id)


async def _refused(request: Request, error: Exception) -> Response:
    """Responses for unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path[:200], error.headers
    if error.status_code == 405:
        made = APIError(405, f"{request.method} is not served at {path}; expected: "
                        f"{(headers or {}).get('Allow', '')}", "method_not_allowed", None, headers)
    else: made = APIError(error.status_code, f"there is nothing at {path}", "not_found", None, headers)
    request.scope["record"].error = made.code
    return made.response(path, request.scope["record"].id)


def _post(service: Service, answer: Answer, prefix: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        record: Record = request.scope["record"]
        record.id = prefix + record.id
        _require_json(request.headers)
        return await answer(request, service, record, parse(await read_body(request, service.limits)))
    return endpoint


def _kept(service: Service, task: Callable[[Service, str], Awaitable[Response]]
          ) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response: return await task(service, request.path_params["id"])
    return endpoint


def _require_json(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise APIError(415, f"the body's type is {kind[:100]!r}; expected: the header Content-Type: "
                       "application/json", "unsupported_media_type")


def _adapter(change: Callable[..., Awaitable[Response]]) -> Answer:
    async def answer(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
        return await change(request, service.adapters, data)
    return answer


def _models(service: Service) -> Callable[[Request], Awaitable[Response]]:
    def model_card(name: str) -> dict[str, Any]:
        lora = None if service.adapters is None else service.adapters.find(name)
        root, parent = (service.names[0], None) if lora is None else (lora.lora_path, service.names[0])
        return {"id": name, "object": "model", "created": service.created, "owned_by": "tinygrad-nv",
                "root": root, "parent": parent, "max_model_len": service.model.length}

    async def endpoint(request: Request) -> Response:
        if name := request.path_params.get("name"):
            return JSONResponse(model_card(service.require_name(name)))
        names = (*service.names, *(service.adapters.names if service.adapters else ()))
        return JSONResponse({"object": "list", "data": [model_card(name) for name in names]})
    return endpoint


def _health(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        if service.draining: raise APIError(503, "the server is stopping", "draining")
        if failure := service.engine.failure: raise APIError(503, str(failure), "engine_error")
        return JSONResponse({"status": "ok"})
    return endpoint


def _metrics(service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
    return endpoint


async def _page(request: Request) -> Response:
    name = request.url.path[1:]
    return FileResponse(PAGE / (name or "index.html"), media_type=FILES.get(name, "text/html"),
                        headers=PAGE_HEADERS)
