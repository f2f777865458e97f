"""The adapters of a loaded model: files, host memory, device.

Protocol: `open_adapters(model, config)` gives a model room for adapters. `with_adapter(adapters, request,
lora)` attaches an adapter to a request: its matrices, and a salt, so that prefixes are shared only with
requests of the same adapter.

`AdapterCache` has adapters in host memory. `load(request)` returns an adapter, from memory or from its
directory; any thread may call it. At most `limit` are kept, and the least recently used is dropped; requests
that still use it have it until they end. `is_cached(request)` says whether it is in memory: reading one takes
up to seconds. `remove(number)` drops it. A number belongs to one adapter until that is removed.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinygrad_nv.engine.lora.request import LoRAConfig, LoRARequest
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import RequestError

if TYPE_CHECKING:
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.lora import ModelAdapters
    from tinygrad_nv.models.peft import Adapter


class AdapterCache:
    """Adapters by number. `read` reads one."""

    def __init__(self, limit: int, read: Callable[[LoRARequest], Adapter]) -> None:
        self.limit, self.read = limit, read
        self.loads = 0      # so far
        self._held: OrderedDict[int, tuple[LoRARequest, Adapter]] = OrderedDict()
        self._lock = threading.Lock()

    def is_cached(self, request: LoRARequest) -> bool:
        """Whether an adapter is in memory."""
        with self._lock: return request.lora_int_id in self._held

    def load(self, request: LoRARequest) -> Adapter:
        """The adapter. Raises `ModelError` for one that cannot be served, `RequestError` for a number that
        another has."""
        with self._lock:    # also while it is read: callers that wait for one get the same
            if (found := self._held.get(request.lora_int_id)) is not None:
                known, adapter = found
                if known != request:
                    raise RequestError(f"adapter {request.lora_name!r} of {request.lora_path} has number "
                                       f"{request.lora_int_id}, which {known.lora_name!r} of "
                                       f"{known.lora_path} has", "a number of its own",
                                       "change lora_int_id, or remove the other first")
                self._held.move_to_end(request.lora_int_id)
                return adapter
            adapter = self.read(request)
            self.loads += 1
            self._held[request.lora_int_id] = request, adapter
            while len(self._held) > self.limit: self._held.popitem(last=False)
            return adapter

    def remove(self, number: int) -> bool:
        """Drops an adapter. Returns whether it was in memory."""
        with self._lock: return self._held.pop(number, None) is not None

    def numbers(self) -> list[int]:
        """Lists the numbers of adapters in memory, least recently used first."""
        with self._lock: return list(self._held)


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters on the device and in host memory."""
    config: LoRAConfig
    model: ModelAdapters
    cache: AdapterCache


def open_adapters(model: Llama, config: LoRAConfig) -> ServedAdapters:
    """Gives a model adapter slots."""
    from tinygrad_nv.models.lora import ModelAdapters, adaptable
    from tinygrad_nv.models.peft import read_adapter
    shapes = {each.name: each.shape for each in adaptable(model)}

    def read(request: LoRARequest) -> Adapter:
        return read_adapter(request.lora_name, request.directory, shapes, config.rank, config.dtype)
    made = ModelAdapters(model, config.slots, config.rank, config.dtype)
    return ServedAdapters(config, made, AdapterCache(config.cached, read))


def with_adapter(adapters: ServedAdapters | None, request: Request, lora: LoRARequest | None) -> Request:
    """The request with its adapter, which is read if it is not in memory. Raises `RequestError`, and
    `ModelError` for an adapter that cannot be served."""
    if lora is None: return request
    if not isinstance(lora, LoRARequest):
        raise RequestError(f"lora_request of type {type(lora).__name__}",
                           "LoRARequest(name, number, path) or None", "pass a LoRARequest")
    if adapters is None:
        raise RequestError(f"a request with adapter {lora.lora_name!r}, and the model is served without",
                           "a model that was loaded with enable_lora=True", "add it, or --enable-lora")
    adapter = adapters.cache.load(lora)
    return replace(request, adapter=adapter, lora=lora, salt=b"lora:" + adapter.digest + request.salt)
