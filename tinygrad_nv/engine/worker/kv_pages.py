"""KV cache pages of the device and the host, and copies between them.

Protocol: `PageStore` owns the tensors of every layer, [P, page_size, H_kv, D] for keys and for values, and
host memory for offloaded pages. `copy` queues copies of whole pages, all layers, ahead of the next launch. On
a device with a driver it does not wait, and host memory is page-locked. On a CPU pages are copied at once.

Values are stored in the model's dtype or in one of `CACHE_DTYPES`. 8-bit dtypes have scales, equal for all
pages of a layer's head. fp8 scales are 1, as in vLLM: e4m3 holds up to 448, far more than keys and values.
int8 scales are calibrated: `calibrate_scales` runs some tokens through the model.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.engine.memory_planning import CACHE
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, CopyKind, PageCopy
from tinygrad_nv.errors import RequestError
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.paged import LayerPages, PagedBatch, PagedCache, SequenceGroup
from tinygrad_nv.patterns.decode.paged import FLOATS
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Copy, Download, Fill, HostMemory, Upload
from tinygrad_nv.runtime.memory import allocate, host_bytes, write
from tinygrad_nv.runtime.memory_pool import labelled
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.expression import short

CACHE_DTYPES = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16,
                "fp8": dtypes.fp8e4m3, "int8": dtypes.int8}
DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
                 "fp8_e4m3": "fp8"}


def resolve_kv_cache_dtype(name: str, model: DType) -> DType:
    """The dtype of keys and values for "auto" (the model's) or one of `CACHE_DTYPES`, short forms included.
    """
    if name == "auto": return model
    if (found := CACHE_DTYPES.get(DTYPE_ALIASES.get(name, name))) is None:
        raise RequestError(f"unknown KV cache dtype {name!r}", f"auto, {', '.join(CACHE_DTYPES)}",
                           "change --kv-cache-dtype")
    # attention computes in the dtype of keys and values
    if found in FLOATS and found.itemsize > model.itemsize:
        raise RequestError(f"a KV cache of {name} for a model of {short(model)}",
                           "one that is not wider than the model", "use --kv-cache-dtype auto")
    return found


class Extents(Protocol):
    """The part of a model's config that determines page sizes."""
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class PageStore:
    """`pages` pages of `size` tokens on the device, and `host_pages` on the host."""

    def __init__(self, config: Extents, device: str, dtype: DType, pages: int, size: int,
                 host_pages: int = 0) -> None:
        self.device, self.pages, self.size, self.host_pages = device, pages, size, host_pages
        shape = (pages, size, config.num_kv_heads, config.head_dim)
        def made() -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        def scale() -> Tensor | None:
            if dtype not in BYTES: return None
            return Tensor.ones(pages, config.num_kv_heads, device=device).contiguous().realize()
        with labelled(CACHE):
            layers = [LayerPages(made(), made(), scale(), scale()) for _ in range(config.num_layers)]
        self.cache = PagedCache(tuple(layers))
        self.tensors = [each for layer in self.cache.layers for each in (layer.keys, layer.values)]
        with labelled(CACHE):
            for tensor in self.tensors: allocate(tensor)
        self.page_bytes = int(np.prod(shape[1:])) * dtype.itemsize   # of one layer's keys or values
        opened = Device[device]
        self.driver = opened.driver if isinstance(opened, NVDevice) else None
        self.host: HostMemory | None = None
        self.host_array = np.empty((0, len(self.tensors), self.page_bytes), np.uint8)
        self.views: list[np.ndarray] = []
        total = host_pages * self.stored_bytes
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
    def stored_bytes(self) -> int:
        """Bytes of a page, all layers."""
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

    def close(self) -> None:
        """Frees page-locked memory."""
        if self.host is not None: self._given_back()
        self.host = None


CALIBRATION_TOKENS = 256    # tokens used to calibrate scales
HEADROOM = 1.25             # factor by which other tokens may exceed the calibration maximum


def calibrate_scales(model: Llama, device: str, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """int8 scales for keys and values of each layer and KV head. The largest magnitude over
    `CALIBRATION_TOKENS` tokens, spaced evenly over the vocabulary and shuffled, times `HEADROOM`, maps to
    127."""
    held = min(CALIBRATION_TOKENS, model.positions) // size
    count = held * size // GROUP * GROUP
    random = np.random.default_rng(0)
    tokens = random.permutation(np.linspace(0, model.config.vocab_size - 1, count).astype(np.int32))
    store = PageStore(model.config, device, model.dtype, held, size)
    def given(x: np.ndarray) -> Tensor: return Tensor(x.astype(np.int32), device=device).realize()
    groups = count // GROUP
    table = given(np.broadcast_to(np.arange(held), (groups, held)))
    group = SequenceGroup(GROUP, table, given(np.arange(GROUP, count + 1, GROUP)))
    batch = PagedBatch((group,), model.rope_tables)
    model.step_paged(given(tokens), batch, store.cache, given(np.zeros(1))).realize()
    def largest(pages: Tensor) -> np.ndarray:
        # on the host: clang takes minutes to compile this reduction for a CPU
        rows = pages.float().numpy().reshape(held * size, -1, model.config.head_dim)[:count]
        most: np.ndarray = np.abs(rows).max((0, 2))
        # a head of zeros or NaN gets scale 1
        return np.where((most > 0) & np.isfinite(most), most * (HEADROOM / 127), 1.0)
    return [(largest(layer.keys), largest(layer.values)) for layer in store.cache.layers]
