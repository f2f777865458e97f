"""Endpoints that tell of the server: models, tokenizer, health, load, version, metrics, and the chat page.

Protocol: each is a function of the service that returns an endpoint without a body. /ping is /health for
SageMaker; `server_load` counts the requests that are being answered. /tokenizer_info, where it is served, has
the entries of tokenizer_config.json that clients build prompts with.
"""
from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from tinygrad_nv.errors import NVError
from tinygrad_nv.server.conversation import efforts_of
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.service import Service
from tinygrad_nv.version import __version__

Endpoint = Callable[[Request], Awaitable[Response]]
PAGE = Path(__file__).parent / "page"
# the page loads nothing from elsewhere, and runs in no frame
POLICY = "default-src 'self'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
PAGE_HEADERS = {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
# of every model, as vLLM writes it
PERMISSION = {"allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
              "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
              "organization": "*", "group": None, "is_blocking": False}
TOKENIZER_INFO = "/tokenizer_info"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# what browsers ask for, and its file
FILES = {"": "index.html", "favicon.ico": "icon.svg",
         **{path.name: path.name for path in PAGE.iterdir() if path.suffix in TYPES}}


def routes(service: Service) -> list[Route]:
    """All of them."""
    models, health = _models(service), _health(service)
    return [Route("/v1/models", models), Route("/v1/models/{name:path}", models), Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]), Route("/load", _load(service)),
            Route("/version", _version), Route("/kv_event_sources", _kv_event_sources),
            Route(TOKENIZER_INFO, _tokenizer_info(service)),
            Route("/metrics", _metrics(service)),
            *(Route(f"/{name}", _page(PAGE / file)) for name, file in FILES.items())]


def _models(service: Service) -> Endpoint:
    efforts = _efforts(service)
    def model_card(name: str) -> dict[str, Any]:
        lora = None if service.adapters is None else service.adapters.find(name)
        own = service.root or service.names[0]
        root, parent = (own, None) if lora is None else (lora.lora_path, service.names[0])
        return {"id": name, "object": "model", "created": service.created, "owned_by": "tinygrad-nv",
                "root": root, "parent": parent, "max_model_len": service.model.length,
                "permission": [{"id": f"modelperm-{secrets.token_hex(8)}", "object": "model_permission",
                                "created": service.created, **PERMISSION}], "reasoning_efforts": efforts}

    async def endpoint(request: Request) -> Response:
        if name := request.path_params.get("name"):
            return JSONResponse(model_card(service.require_name(name)))
        names = (*service.names, *(service.adapters.names if service.adapters else ()))
        return JSONResponse({"object": "list", "data": [model_card(name) for name in names]})
    return endpoint


def _efforts(service: Service) -> list[str]:
    """Lists the values of `reasoning_effort` that this model takes."""
    try: template = service.model.require_tokenizer().template or ""
    except NVError: return []
    return [] if service.embedder else efforts_of(template)


def _health(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        if service.draining: raise APIError(503, "the server is stopping", "draining")
        if failure := service.engine.failure: raise APIError(503, str(failure), "engine_error")
        return JSONResponse({"status": "ok"})
    return endpoint


def _load(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response: return JSONResponse({"server_load": service.active})
    return endpoint


def _tokenizer_info(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        if not service.tokenizer_info:
            raise APIError(404, "the server does not tell of its tokenizer; to fix: start it with "
                           "--enable-tokenizer-info-endpoint", "not_found")
        tokenizer = service.require_tokenizer()
        special = {name: tokenizer.special.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        return JSONResponse({"tokenizer_class": "PreTrainedTokenizerFast", **special, **tokenizer.special,
                             "model_max_length": service.model.length, "chat_template": tokenizer.template})
    return endpoint


async def _version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


async def _kv_event_sources(_: Request) -> Response:
    """Tells that no events of the KV cache are published, as vLLM without --kv-events-config does."""
    return JSONResponse({})


def _metrics(service: Service) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        await service.engine.refresh_stats()
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
    return endpoint


def _page(file: Path) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return FileResponse(file, media_type=TYPES[file.suffix], headers=PAGE_HEADERS)
    return endpoint
