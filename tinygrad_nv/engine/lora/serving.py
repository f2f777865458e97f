"""The adapters of a loaded model: files, host memory, device.

Protocol: `open_adapters(model, config)` gives a model room for adapters. `with_adapter(adapters, request,
lora)` attaches an adapter to a request: its matrices, and a salt, so that prefixes are shared only with
requests of the same adapter.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tinygrad_nv.engine.lora.cache import AdapterCache
from tinygrad_nv.engine.lora.request import LoRAConfig, LoRARequest
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import RequestError

if TYPE_CHECKING:
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.lora import ModelAdapters
    from tinygrad_nv.models.peft import Adapter


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
    return replace(request, adapter=adapter, salt=b"lora:" + adapter.digest + request.salt)
