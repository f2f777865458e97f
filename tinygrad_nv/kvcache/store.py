"""Pages of keys and values on the device, and of the host, and copies between them.

Protocol: `PageStore` owns the tensors of every layer, [P, page_size, H_kv, D] of keys and of values, and a
host's pages for those that are away. `move` puts copies of whole pages, all layers, into the order of the
device's work, before what is launched next; on a device with a driver it does not wait for them, and the
host's pages are page-locked. On a CPU pages are copied at once.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.kvcache.pages import Move, Where
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Copy, Download, Fill, HostMemory, Upload
from tinygrad_nv.runtime.memory import allocate, host_bytes, write
from tinygrad_nv.runtime.memory_pool import labelled
from tinygrad_nv.tile.decode.spec import BYTES

CACHE = "KV cache"  # the label of its memory


@dataclass(frozen=True)
class Pages:
    """A layer's keys and values: [P, page_size, H_kv, D] each, and float32 scales [P, H_kv] of those of 8
    bits."""
    keys: Tensor
    values: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class PagedCache:
    """The pages of every layer."""
    layers: tuple[Pages, ...]


class Extents(Protocol):
    """What of a model's config says how large pages are."""
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class PageStore:
    """`pages` pages of `size` tokens on the device, and `host_pages` of the host."""

    def __init__(self, config: Extents, device: str, dtype: DType, pages: int, size: int,
                 host_pages: int = 0) -> None:
        self.device, self.pages, self.size, self.host_pages = device, pages, size, host_pages
        shape = (pages, size, config.num_kv_heads, config.head_dim)
        def made() -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        def scale() -> Tensor | None:
            if dtype not in BYTES: return None
            return Tensor.ones(pages, config.num_kv_heads, device=device).contiguous().realize()
        with labelled(CACHE):
            layers = [Pages(made(), made(), scale(), scale()) for _ in range(config.num_layers)]
        self.cache = PagedCache(tuple(layers))
        self.tensors = [each for layer in self.cache.layers for each in (layer.keys, layer.values)]
        with labelled(CACHE):
            for tensor in self.tensors: allocate(tensor)
        self.page_bytes = int(np.prod(shape[1:])) * dtype.itemsize   # of one tensor
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.host: HostMemory | None = None
        self.away = np.empty((0, len(self.tensors), self.page_bytes), np.uint8)
        self.views: list[np.ndarray] = []
        total = host_pages * self.stored_bytes
        if isinstance(opened, NVDevice):
            if total:
                self.host = opened.pool.host(total)
                self._given_back = weakref.finalize(self, self.host.free)
            # kernels of tinygrad's, which GPUs run in float32, weigh places that nobody wrote with 0
            filled = self.tensors if dtype == dtypes.float32 else []
            for each in filled: opened.driver.submit(Fill(each.uop.buffer._buf, 0, pages * self.page_bytes))
        else:
            self.away = np.empty((host_pages, *self.away.shape[1:]), np.uint8)
            for tensor in self.tensors:
                memory = host_bytes(tensor)
                assert memory is not None, f"{device} has no memory that the host can address"
                self.views.append(np.frombuffer(memory, np.uint8).reshape(pages, self.page_bytes))

    def scale(self, found: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Sets the scales of each layer's keys and values, by head."""
        for layer, each in zip(self.cache.layers, found, strict=True):
            for scales, numbers in zip((layer.k_scale, layer.v_scale), each, strict=True):
                assert scales is not None, "floats have no scales"
                rows = np.broadcast_to(numbers.astype(np.float32), scales.shape)
                write(scales, 0, np.ascontiguousarray(rows).data.cast("B"))

    @property
    def stored_bytes(self) -> int:
        """Bytes of a page, all layers."""
        return len(self.tensors) * self.page_bytes

    def move(self, moves: Iterable[Move]) -> None:
        """Copies pages, one after the other."""
        for each in moves:
            if self.driver is None: self._copy(each)
            else: self._submit(each)

    def _copy(self, move: Move) -> None:
        Device[self.device].synchronize()
        for k, view in enumerate(self.views):
            if move.where is Where.WITHIN: view[move.target] = view[move.source]
            elif move.where is Where.OUT: self.away[move.target, k] = view[move.source]
            else: view[move.target] = self.away[move.source, k]

    def _submit(self, move: Move) -> None:
        driver, nbytes = self.driver, self.page_bytes
        assert driver is not None
        for k, tensor in enumerate(self.tensors):
            base = tensor.uop.buffer._buf
            def at(page: int, base: int = base) -> int: return base + page * nbytes
            def away(page: int, k: int = k) -> int: return (page * len(self.tensors) + k) * nbytes
            if move.where is Where.WITHIN: driver.submit(Copy(at(move.target), at(move.source), nbytes))
            elif move.where is Where.OUT:
                assert self.host is not None, "there are no pages of the host"
                driver.submit(Download(self.host, away(move.target), at(move.source), nbytes))
            else:
                assert self.host is not None, "there are no pages of the host"
                driver.submit(Upload(at(move.target), self.host, away(move.source), nbytes))

    def close(self) -> None:
        """Gives page-locked memory back."""
        if self.host is not None: self._given_back()
        self.host = None
