"""Endpoints that have the model give memory back, and take it again (engine/sleep.py).

Protocol: as vLLM's in its development mode. The server refuses them (403) unless it was started with
--enable-sleep-mode. While the model sleeps, requests get 503. Pages of other origins are refused
(origins.py).

    POST /sleep?level=1&mode=abort    ends running requests, and gives memory back
    POST /wake_up?tags=weights&tags=kv_cache
    GET  /is_sleeping                 {"is_sleeping": false}
"""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinygrad_nv.errors import ConfigError, NVError
from tinygrad_nv.server.errors import APIError, api_error, invalid

PATHS = ("/sleep", "/wake_up", "/is_sleeping")


class SleepingLLM(Protocol):
    """The part of `LLM` that these endpoints use."""
    def sleep(self, level: int = 1, mode: str = "abort") -> None: ...
    def wake_up(self, tags: list[str] | None = None) -> None: ...
    def is_sleeping(self) -> bool: ...


def routes(model: SleepingLLM | None) -> list[Route]:
    """All of them; without a model they are refused."""
    def endpoint(task: Callable[[SleepingLLM, Request], Awaitable[Response]]
                 ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            if model is None:
                raise APIError(404, "this server's model does not sleep for clients; to fix: start it with "
                               "--enable-sleep-mode", "sleep_disabled")
            try: return await task(model, request)
            except ConfigError as error: raise invalid(api_error(error).message) from error
            except NVError as error: raise api_error(error) from error
        return answer
    return [Route(path, endpoint(task), methods=[method]) for path, task, method in
            zip(PATHS, (_sleep, _wake_up, _is_sleeping), ("POST", "POST", "GET"), strict=True)]


async def _sleep(model: SleepingLLM, request: Request) -> Response:
    given = request.query_params
    level = given.get("level", "1")
    if not (level.isascii() and level.isdigit()):
        raise invalid(f"level is {level[:40]!r}; expected: 1 or 2", "level")
    await asyncio.to_thread(model.sleep, int(level[:4]), given.get("mode", "abort"))
    return Response(status_code=200)


async def _wake_up(model: SleepingLLM, request: Request) -> Response:
    await asyncio.to_thread(model.wake_up, request.query_params.getlist("tags") or None)
    return Response(status_code=200)


async def _is_sleeping(model: SleepingLLM, request: Request) -> Response:
    return JSONResponse({"is_sleeping": model.is_sleeping()})
