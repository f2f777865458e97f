"""Adapters by name: those of --lora-modules, and those that clients load and unload.

Protocol: a request whose `model` is an adapter's name is answered with that adapter. As in vLLM:

    POST /v1/load_lora_adapter    {"lora_name": …, "lora_path": …, "load_inplace": false}
    POST /v1/unload_lora_adapter  {"lora_name": …}

read a directory of the server's machine, so the server refuses them (403) unless it was started with
--allow-runtime-lora-updating. Running requests keep an adapter that is unloaded until they end.
"""
from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.errors import ModelError, NVError, RequestError
from tinygrad_nv.server.errors import APIError, api_error, invalid
from tinygrad_nv.server.fields import Fields

MOST_NAME = 256     # characters


class AdapterLoader(Protocol):
    """The part of `AdapterCache` that the server uses."""
    def load(self, request: LoRARequest) -> Any: ...
    def remove(self, number: int) -> bool: ...


class AdapterNames:
    """Adapters of a model that is served under `taken` names. `changes`: whether clients may load some."""

    def __init__(self, loader: AdapterLoader, taken: tuple[str, ...], changes: bool = False) -> None:
        self.loader, self.taken, self.changes = loader, taken, changes
        self._found: dict[str, LoRARequest] = {}
        self._numbers, self._lock = itertools.count(1), threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of adapters that may be asked for."""
        return tuple(self._found)

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of a name."""
        return self._found.get(name)

    def add(self, name: str, path: str, replace: bool = False) -> None:
        """Reads an adapter, and serves it under a name. Raises `RequestError` for a name that is taken,
        `ModelError` for what is no adapter of this model."""
        with self._lock:
            if not name or len(name) > MOST_NAME or not name.isprintable():
                raise RequestError(f"an adapter's name is {name[:40]!r}",
                                   f"1 to {MOST_NAME} printable characters", "name it otherwise")
            before = self._found.get(name)
            if name in self.taken or (before is not None and not replace):
                raise RequestError(f"the name {name!r} is served already", "a name of its own",
                                   "unload that first, or name the adapter otherwise")
            made = LoRARequest(name, next(self._numbers), path)
            self.loader.load(made)
            self._found[name] = made
            if before is not None: self.loader.remove(before.lora_int_id)

    def remove(self, name: str) -> None:
        """Serves an adapter no longer. Raises `RequestError` for a name that is none's."""
        with self._lock:
            if (found := self._found.pop(name, None)) is None:
                raise RequestError(f"no adapter {name[:200]!r} is served",
                                   ", ".join(self._found) or "an adapter that was loaded", "check the name")
            self.loader.remove(found.lora_int_id)


def require_changes(adapters: AdapterNames | None) -> AdapterNames:
    """The adapters, where clients may change them. Raises `APIError`."""
    if adapters is None:
        raise APIError(404, "the model is served without adapters; to fix: start the server with "
                       "--enable-lora", "lora_disabled")
    if not adapters.changes:
        raise APIError(403, "this server loads no adapters for clients; to fix: start it with "
                       "--allow-runtime-lora-updating", "lora_updating_disabled")
    return adapters


async def load(request: Request, adapters: AdapterNames | None, data: dict[str, Any]) -> Response:
    """The response to /v1/load_lora_adapter."""
    found, fields = require_changes(adapters), Fields(data)
    name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
    replace = bool(fields.flag("load_inplace"))
    fields.finish()
    try: await asyncio.to_thread(found.add, name, path, replace)
    except ModelError as error:
        raise invalid(api_error(error).message, "lora_path", "not_an_adapter") from error
    except NVError as error: raise api_error(error, "lora_name") from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: Request, adapters: AdapterNames | None, data: dict[str, Any]) -> Response:
    """The response to /v1/unload_lora_adapter."""
    found, fields = require_changes(adapters), Fields(data)
    name = _text(fields, "lora_name")
    fields.whole("lora_int_id", 0, 1 << 31)
    fields.finish()
    try: found.remove(name)
    except RequestError as error:
        raise APIError(404, api_error(error).message, "model_not_found", "lora_name") from error
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _text(fields: Fields, name: str) -> str:
    if found := fields.text(name): return found
    raise invalid(f"{name} is missing; expected: a text", name)
