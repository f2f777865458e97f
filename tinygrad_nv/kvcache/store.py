"""KV cache pages of the device and the host, and copies between them.

Protocol: `PageStore` owns the tensors of every layer, [P, page_size, H_kv, D] for keys and, unless they are
a part of these, for values, and host memory for offloaded pages. `copy` queues copies of whole pages, with
all layers in them, ahead of the next launch. On a device with a driver it does not wait, and host memory is
page-locked. On a CPU pages are copied at once.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.kvcache.groups import CacheGroups, one_group
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.kvcache.shape import KVShape
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Copy, Download, Fill, HostMemory, Upload
from tinygrad_nv.runtime.memory import allocate, discard, host_bytes, write
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.tile.decode.spec import BYTES

CACHE = "KV cache"  # label of its memory


@dataclass(frozen=True)
class LayerPages:
    """A layer's keys and values: [P, page_size, H_kv, D] each, and float32 scales [P, H_kv] of 8-bit dtypes.
    A latent cache has no values beside its keys.
    """
    keys: Tensor
    values: Tensor | None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class LayerStates:
    """A layer's states, in the place of keys and values: [P, …] each (state_table.py)."""
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerBoth:
    """Keys and values of a layer that has states, too."""
    pages: LayerPages
    states: LayerStates


@dataclass(frozen=True)
class PagedCache:
    """The pages of every layer, and of each layer its group (groups.py); () if there is one group."""
    layers: tuple[LayerPages, ...]
    groups: tuple[int, ...] = ()

    def group(self, layer: int) -> int:
        """The group of a layer, whose block tables say which pages are its."""
        return self.groups[layer] if self.groups else 0


@dataclass(frozen=True)
class HybridCache:
    """Pages and states of every layer, where some have states, and of each its group."""
    layers: tuple[LayerPages | LayerStates | LayerBoth, ...]
    groups: tuple[int, ...]

    def group(self, layer: int) -> int:
        """The group of a layer, as of `PagedCache`."""
        return self.groups[layer]


class KVDimensions(Protocol):
    """The part of a model's config that determines page sizes."""
    @property
    def num_layers(self) -> int: ...
    @property
    def kv_shape(self) -> KVShape: ...


class PageStore:
    """`pages` pages of `size` tokens on the device, and `host_pages` on the host. Layers of different
    `groups` have the same tensors, where they have the same place in a page; by default all layers are one
    group."""

    def __init__(self, config: KVDimensions, device: str, dtype: DType, pages: int, size: int,
                 host_pages: int = 0, groups: CacheGroups | None = None) -> None:
        groups = groups or one_group(config.num_layers)
        self.device, self.pages, self.size, self.host_pages = device, pages, size, host_pages
        shape = config.kv_shape
        def make_pages(width: int) -> Tensor:
            return Tensor.empty(pages, size, shape.heads, width, dtype=dtype, device=device)

        def scale(width: int) -> Tensor | None:
            if dtype not in BYTES or not width: return None
            return Tensor.ones(pages, shape.heads, device=device).contiguous().realize()
        keys, values = shape.keys, shape.values
        with label_allocations(CACHE):
            stored = [(make_pages(keys), make_pages(values) if values else None)
                      for _ in range(groups.layers_per_page)]
            layers = [LayerPages(*stored[place], scale(keys), scale(values)) for _, place in groups.places]
        self.cache = PagedCache(tuple(layers), tuple(group for group, _ in groups.places))
        self.tensors = [each for pair in stored for each in pair if each is not None]
        with label_allocations(CACHE):
            for tensor in self.tensors: allocate(tensor)
        assert values in (0, keys), "keys and values of two widths"
        self.page_bytes = size * shape.heads * keys * dtype.itemsize    # of one tensor
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.host: HostMemory | None = None
        self.host_array = np.empty((0, len(self.tensors), self.page_bytes), np.uint8)
        self.views: list[np.ndarray] = []
        total = host_pages * self.bytes_per_page
        if isinstance(opened, NVDevice):
            if total:
                self.host = opened.pool.host(total)
                self._given_back = weakref.finalize(self, self.host.free)
            # float32 runs tinygrad's own kernels, which multiply unwritten positions by 0: NaN would spread
            filled = self.tensors if dtype == dtypes.float32 else []
            for each in filled: opened.driver.submit(Fill(each.uop.buffer._buf, 0, pages * self.page_bytes))
        else:
            self.host_array = np.empty((host_pages, *self.host_array.shape[1:]), np.uint8)
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
    def bytes_per_page(self) -> int:
        """Bytes of a page, all layers that it holds."""
        return len(self.tensors) * self.page_bytes

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in order."""
        for each in copies:
            if self.driver is None: self._copy_page(each)
            else: self._submit_copy(each)

    def _copy_page(self, copy: PageCopy) -> None:
        Device[self.device].synchronize()
        for k, view in enumerate(self.views):
            if copy.where is CopyKind.DEVICE_TO_DEVICE: view[copy.target] = view[copy.source]
            elif copy.where is CopyKind.DEVICE_TO_HOST: self.host_array[copy.target, k] = view[copy.source]
            else: view[copy.target] = self.host_array[copy.source, k]

    def _submit_copy(self, copy: PageCopy) -> None:
        driver, nbytes = self.driver, self.page_bytes
        assert driver is not None
        for k, tensor in enumerate(self.tensors):
            base = tensor.uop.buffer._buf
            def at(page: int, base: int = base) -> int: return base + page * nbytes
            def host_array(page: int, k: int = k) -> int: return (page * len(self.tensors) + k) * nbytes
            if copy.where is CopyKind.DEVICE_TO_DEVICE:
                driver.submit(Copy(at(copy.target), at(copy.source), nbytes))
            elif copy.where is CopyKind.DEVICE_TO_HOST:
                assert self.host is not None, "there are no host pages"
                driver.submit(Download(self.host, host_array(copy.target), at(copy.source), nbytes))
            else:
                assert self.host is not None, "there are no host pages"
                driver.submit(Upload(at(copy.target), self.host, host_array(copy.source), nbytes))

    def discard(self) -> None:
        """Gives the memory of all pages back, on a CPU. What they held is lost."""
        discard(self.tensors)

    def close(self) -> None:
        """Frees page-locked memory."""
        if self.host is not None: self._given_back()
        self.host = None
