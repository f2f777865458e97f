"""The outermost middleware: request ids, CORS, API keys, and a response for every error.

Protocol: `Gate` gives each request an id, the client's own if it sent X-Request-Id, and returns it in that
header; another one names fields that have no effect (leniency.py). It rejects requests for other hosts and
of pages that may not (origins.py), what computes while the server drains (503) and without an API key (401).
It turns `APIError`s and unexpected exceptions (500) into responses, counts and logs. A client that
disconnected is logged with status 499. Preflights of browsers need no key, and every response has the headers
of CORS.
"""
from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinygrad_nv.server.errors import OLLAMA, APIError
from tinygrad_nv.server.leniency import HEADER, MOST_LOGGED, Ignored, collect
from tinygrad_nv.server.log import LOG, line, request_line
from tinygrad_nv.server.origins import require_host, require_origin
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service

MAX_ID = 128    # limit: characters of a client's X-Request-Id; a longer one is replaced
EXPOSED = ("X-Request-Id", "Retry-After", "X-Ignored-Fields")   # what scripts of other origins may read


class Gate:
    """Middleware around `app`. `guarded`: paths that need a key, besides those under /v1/ and /api/."""

    def __init__(self, app: ASGIApp, service: Service, guarded: Collection[str]) -> None:
        self.app, self.service, self.guarded = app, service, frozenset(guarded)
        cors = service.cors
        self.inner = CORSMiddleware(self._serve, cors.origins, cors.methods, cors.headers,
                                    cors.credentials, expose_headers=EXPOSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http": return await self.app(scope, receive, send)
        # a proxy may leave --root-path on paths: served is what is behind it, unless that begins so, too
        root = scope.get("root_path", "")
        if root and not root.startswith(("/v1", "/api")) and scope["path"].startswith(f"{root}{root}/"):
            scope["path"] = scope["path"][len(root):]
        given = client_id(scope)
        record = scope["record"] = Record(secrets.token_hex(12), client_id=given)
        status = 499

        async def record_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", (given or record.id).encode()),
                                      *self._report_ignored(ignored)]
            await send(message)

        scope["send_body"] = send   # past all middleware, which has nothing to do for a part of a body
        served = self._guards(scope)
        self.service.active += served
        try:
            with collect(self.service.strict) as ignored: await self._receive(scope, receive, record_and_send)
        except Exception as error:  # `app` has responded
            LOG.exception("internal_error id=%s", record.id)
            record.error = type(error).__name__
        finally:
            self.service.active -= served
            self._record_end(scope, record, status)

    async def _receive(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.service
        try:
            _require_framing(scope)
            require_host(scope, service.hosts, bool(service.keys))
        except APIError as error: await self._refuse(error, scope, receive, send)
        else: await self.inner(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self.service
        try:
            require_origin(scope, route_path(scope), service.cors.origins, service.hosts, bool(service.keys))
            if self._guards(scope): self._admit(scope)
            await self.app(scope, receive, send)
        except APIError as error: await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope["record"]
        record.error = error.code
        await error.response(route_path(scope), record.id)(scope, receive, send)

    def _report_ignored(self, ignored: Ignored) -> list[tuple[bytes, bytes]]:
        """Returns the header of a request's fields without effect. Logs those that are seen for the first
        time."""
        logged = self.service.ignored
        for name, near in ignored.names.items():
            if name in logged or len(logged) >= MOST_LOGGED: continue
            logged.add(name)
            LOG.warning(line("ignored_field", name=name, **({"nearest": near} if near else {})))
        return [(HEADER.encode(), ignored.header.encode())] if ignored.names else []

    def _guards(self, scope: Scope) -> bool:
        """Whether the path computes, or tells of what did."""
        return (path := route_path(scope)).startswith(("/v1/", OLLAMA)) or path in self.guarded

    def _admit(self, scope: Scope) -> None:
        if self.service.keys:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"").decode("latin-1")
            kind, _, key = given.partition(" ")
            # the header of Anthropic's clients
            if not given and (given := headers.get(b"x-api-key", b"").decode("latin-1")):
                kind, key = "bearer", given
            key = key.strip()
            known = [hmac.compare_digest(key.encode(), each.encode()) for each in self.service.keys]
            if kind.lower() != "bearer" or not any(known):
                what = "is wrong" if given else "is missing"
                raise APIError(401, f"the API key {what}; expected: the header Authorization: Bearer KEY, or "
                               "x-api-key: KEY",
                               "invalid_api_key", None, {"WWW-Authenticate": "Bearer"})
            scope["record"].owner = self.service.owner(key)
        if self.service.draining:
            raise APIError(503, "the server is stopping and takes no new requests", "draining", None,
                           {"Retry-After": "5", "Connection": "close"})

    def _record_end(self, scope: Scope, record: Record, status: int) -> None:
        self.service.metrics.record_end(record)
        if self.service.tracer is not None: self.service.tracer.record_end(record, scope["headers"], status)
        route = scope.get("route")
        path = "other" if route is None else route.path
        self.service.metrics.http_requests.labels(_method(scope), path, str(status)).inc()
        # /health and /metrics, requested every few seconds, would flood the log
        if self._guards(scope) or status >= 400:
            LOG.info(request_line(record, scope["method"], route_path(scope), status))


def route_path(scope: Scope) -> str:
    """The path without --root-path, which uvicorn puts in front."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def client_id(scope: Scope) -> str | None:
    """Returns the client's X-Request-Id; None without one, and for one that is too long or not printable
    ASCII."""
    found = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return found if 0 < len(found) <= MAX_ID and found.isascii() and found.isprintable() else None


def _require_framing(scope: Scope) -> None:
    if scope["http_version"] not in ("1.0", "1.1"):
        raise APIError(400, f"the request is of HTTP/{scope['http_version']}, expected: HTTP/1.1",
                       "invalid_http", None, {"Connection": "close"})
    # a proxy may have used the other header, and taken the rest of the body for another request
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise APIError(400, "the headers have Content-Length and Transfer-Encoding, expected one of them",
                       "invalid_http", None, {"Connection": "close"})


def _method(scope: Scope) -> str:
    # bounds the number of label values
    return scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
