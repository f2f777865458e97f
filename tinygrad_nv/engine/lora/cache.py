"""Adapters in host memory.

Protocol: `load(request)` returns an adapter, from memory or from its directory; any thread may call it. At
most `limit` are kept, and the least recently used is dropped; requests that still use it have it until they
end. `is_cached(request)` says whether it is in memory: reading one takes up to seconds. `remove(number)`
drops it. A number belongs to one adapter until that is removed.
"""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.errors import RequestError

if TYPE_CHECKING:
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
