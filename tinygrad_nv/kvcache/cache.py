"""A paged KV cache of a model's layers, for a user's own model loop.

    Cache = KVCache["B", "H", "S_max", "D", dtypes.bfloat16]
    cache = Cache(B=8, H=4, S_max=2048, D=128, layers=32)
    request = cache.open(prompt)                    # shares the pages of a cached prefix
    step = cache.append([request], [prompt[len(request):]])
    for layer in range(32):
        …
        step.write(layer, k, v)                     # [N, T, H, D] each
        out = step.attend(layer, q)                 # [N, T, heads, D]

Protocol. `append` reserves positions for the new tokens of N requests, T of each: before it returns, pages
are allocated, copied on write, or fetched from the host, and the `Step` has block tables and lengths.
`write` then stores each layer's new keys and values, and `attend` computes attention over all tokens of the
requests. Both are lazy, as Tensors are; unrealized writes are realized before pages are copied.

    fork        a request with the same tokens; shares pages until either of the two writes
    prune       frees pages behind the window
    prefetch    fetches an offloaded request's pages from the host; `offload` puts them there
    truncate    frees the newest tokens, such as rejected draft tokens

With NV_DEBUG=1 every operation checks the reference count of every page.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinygrad_nv import config
from tinygrad_nv.errors import PageError, SpecError
from tinygrad_nv.functional import kv_append, paged_attention
from tinygrad_nv.kvcache.block_table import BlockTable
from tinygrad_nv.kvcache.kind import CacheKind
from tinygrad_nv.kvcache.pool import PagePool, PagePoolStats
from tinygrad_nv.kvcache.shape import KVShape
from tinygrad_nv.kvcache.store import LayerPages, PageStore
from tinygrad_nv.patterns.decode.paged import FLOATS, check_shape
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.expression import short

Scales = float | Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Shape:
    """The fields of a model's config that `PageStore` needs."""
    num_layers: int
    kv_shape: KVShape


class KVCache:
    """A cache: `KVCache["B", "H", "S_max", "D", dtype](B=…, H=…, S_max=…, D=…, …)`.

    `layers` of pages of `page_size` tokens on `device` (the default device). `pages`: enough for B requests
    of S_max tokens, unless given; `host_pages` more in host memory. `window`: a token attends to at most so
    many keys, and pages behind the window are freed. `sharing`: requests with a common prefix share its
    pages. int8 requires `k_scale` and `v_scale`, fp8 accepts them: a number, or numbers [H] or [layers, H];
    a key is its stored value times the scale. Raises `SpecError`, `PageError`, MemoryError."""

    def __init__(self, kind: CacheKind[KVCache], extents: tuple[int, int, int, int], *,
                 device: str | None = None, layers: int = 1, page_size: int = 16, pages: int | None = None,
                 host_pages: int = 0, window: int | None = None, sharing: bool = True,
                 k_scale: Scales | None = None, v_scale: Scales | None = None) -> None:
        if type(layers) is not int or layers < 1: raise SpecError(f"layers={layers!r}", "at least 1")
        self.kind, self.window, self.layers = kind, window, layers
        self.max_requests, self.heads, self.max_length, self.d = extents
        self.device = device or Device.DEFAULT
        if pages is None and type(page_size) is int and page_size > 0:
            pages = self.max_requests * -(-self.max_length // page_size)
        self.pool = PagePool(cast(int, pages), page_size, host_pages=host_pages, sharing=sharing,
                             windows=(window,))
        scales = [self._scales("k_scale", k_scale), self._scales("v_scale", v_scale)]
        shape = Shape(layers, KVShape(self.heads, self.d, self.d))
        self.store = PageStore(shape, self.device, kind.dtype, self.pool.device.total, page_size, host_pages)
        # tinygrad's own attention multiplies masked positions by 0: NaN in unwritten pages would spread
        for x in self.store.tensors: Tensor(x.uop).assign(x.zeros_like()).realize()
        if kind.dtype in BYTES: self.store.scale(zip(*scales, strict=True))
        self.requests: list[CachedSequence] = []
        # each layer's pages after pending writes; the store's own Tensors stay plain buffers
        self.written_pages = [(Tensor(each.keys.uop), Tensor(each.values.uop))
                              for each in self.store.cache.layers if each.values is not None]

    def __class_getitem__(cls, words: Any) -> CacheKind[KVCache]: return CacheKind.of(words, cls)

    def _scales(self, name: str, given: Scales | None) -> np.ndarray:
        """float32 [layers, H]."""
        shape = (self.layers, self.heads)
        if self.kind.dtype in FLOATS and given is not None:
            raise SpecError(f"{name} with {short(self.kind.dtype)}", "scales with 8-bit dtypes only")
        if given is None and self.kind.dtype == dtypes.int8:
            raise SpecError(f"{self.kind} without {name}", "the value of one int8 step",
                            f"{name}=the largest key or value / 127")
        made = np.asarray(1.0 if given is None else given, np.float32)
        if made.shape not in ((), shape[1:], shape):
            raise SpecError(f"{name} of shape {made.shape}",
                            f"a number, [H]: {shape[1:]} or [layers, H]: {shape}")
        if not (np.isfinite(made) & (made > 0)).all(): raise SpecError(f"{name}={given}", "numbers above 0")
        return np.broadcast_to(made, shape)

    # **** requests ****

    def open(self, tokens: Sequence[int] = (), salt: bytes = b"") -> CachedSequence:
        """A request that will start with `tokens`. Its `len` is the number of tokens found in cached pages;
        the others are to be appended. Pages are shared between requests of equal `salt` only. Raises
        `PageError` if B requests are open."""
        table = self.pool.open(tokens, salt)
        assert isinstance(table, BlockTable), "a pool of one group"
        return self._register(table)

    def _register(self, table: BlockTable) -> CachedSequence:
        made = CachedSequence(self, table)
        if len(self.requests) == self.max_requests:
            table.release()
            raise PageError(f"{self.max_requests + 1} requests in {self.kind}",
                            f"at most {self.max_requests} at a time", "release one")
        self.requests.append(made)
        self.commit()
        return made

    def append(self, requests: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> Step:
        """Reserves positions for new tokens, T of each of N different requests. Offloaded requests are
        fetched. All or nothing. Raises `PageError` when out of pages, or when a request gets too long."""
        num_tokens = self._num_new_tokens(requests, tokens)
        for request in requests: request.prefetch()
        reserved: list[tuple[BlockTable, int]] = []
        for request in requests:
            table = request.table
            if not table.reserve(len(request) + num_tokens):
                error = self._out_of_pages(f"{num_tokens} tokens more of each of {len(requests)} requests",
                                           table.num_missing_pages(len(request) + num_tokens))
                for other, length in reserved: other.truncate(length)
                self.commit()
                raise error
            reserved.append((table, table.computed))
        for request, new in zip(requests, tokens, strict=True): request.table.advance(new)
        self.commit()
        width = -(-self.max_length // self.pool.page_size)
        entries = np.full((len(requests), width), -1, np.int32)
        for row, request in zip(entries, requests, strict=True):
            row[:len(request.table.pages)] = request.table.pages
        lengths = np.array([len(request) for request in requests], np.int32)
        return Step(self, num_tokens, *(Tensor(x, device=self.device).realize() for x in (entries,
                                                                                               lengths)))

    def _num_new_tokens(self, requests: Sequence[CachedSequence], tokens: Sequence[Sequence[int]]) -> int:
        """The number of new tokens of each request. Raises `PageError`."""
        if not requests or len(requests) != len(tokens):
            raise PageError(f"tokens of {len(tokens)} requests for {len(requests)}", "as many, at least one")
        for i, request in enumerate(requests):
            if request not in self.requests:
                raise PageError(f"request {i} is not one of this cache", "one that is open",
                                "cache.open(tokens)")
        if len(set(map(id, requests))) < len(requests):
            raise PageError("a request that is twice in a step", "different ones",
                            "append its tokens at once")
        counts = [len(new) for new in tokens]
        if min(counts) != max(counts) or not counts[0]:
            raise PageError(f"{', '.join(map(str, counts))} new tokens",
                            "as many of each request, at least one", "append in several steps")
        for i, request in enumerate(requests):
            if len(request) + counts[0] > self.max_length:
                raise PageError(f"request {i} of {len(request) + counts[0]} tokens",
                                f"at most {self.max_length} in {self.kind}", "end it, or make a longer cache")
        return counts[0]

    def _out_of_pages(self, what: str, missing: int) -> PageError:
        return PageError(f"no pages for {what}: {missing} are missing, {self.pool.available} left of "
                         f"{self.pool.device.total}", "a page for every position",
                         "release a request, offload one, or make a cache of more pages")

    # **** pages ****

    def commit(self) -> None:
        """Copies pages that an operation requested; with NV_DEBUG=1 checks every page."""
        if copies := self.pool.take_copies():
            self.flush()
            self.store.copy(copies)
        if config.get("NV_DEBUG"): self.pool.assert_conserved([one.table for one in self.requests])

    def flush(self) -> None:
        """Realizes pending writes."""
        Tensor.realize(*(x for pair in self.written_pages for x in pair))

    def pages(self, layer: int) -> LayerPages:
        """A layer's keys and values [P, page_size, H, D] after pending writes, and scales [P, H] of 8-bit
        dtypes. Raises `SpecError`."""
        if type(layer) is not int or not 0 <= layer < self.layers:
            raise SpecError(f"layer {layer!r}", f"0 to {self.layers - 1}")
        return replace(self.store.cache.layers[layer], keys=self.written_pages[layer][0],
                       values=self.written_pages[layer][1])

    def stats(self) -> PagePoolStats:
        """Page counts."""
        return self.pool.stats()

    def close(self) -> None:
        """Releases all requests, and frees host memory."""
        for request in self.requests[:]: request.release()
        self.flush()
        self.store.close()


class CachedSequence:
    """A request's tokens in a cache. `len` is their number. As a context manager it is released at the end.
    """

    def __init__(self, cache: KVCache, table: BlockTable) -> None: self.cache, self.table = cache, table

    def __len__(self) -> int: return self.table.computed

    def __bool__(self) -> bool: return True

    def __enter__(self) -> CachedSequence: return self

    def __exit__(self, *_: object) -> None: self.release()

    def fork(self) -> CachedSequence:
        """A request with the same tokens. Pages are copied when either of the two writes to them."""
        return self.cache._register(self.table.fork())

    def prune(self, before: int) -> None:
        """Frees pages of tokens before `before`, which no later token may attend to: at most len − window +
        1. Raises `PageError`."""
        window, seen = self.cache.window, 0
        if window is not None: seen = max(0, len(self) - window + 1)
        if before > seen:
            raise PageError(f"tokens before {before} pruned of {len(self)}",
                            f"at most those before {seen}: the next token attends to "
                            + ("all" if window is None else f"{window} keys"),
                            "make the cache with window=…" if window is None else "")
        self.prefetch()
        self.table.prune(before)
        self.cache.commit()

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens. Raises `PageError`."""
        if not 0 <= tokens <= len(self):
            raise PageError(f"{len(self)} tokens truncated to {tokens}", f"0 to {len(self)}")
        self.prefetch()
        self.table.truncate(tokens)
        self.cache.commit()

    def offload(self) -> None:
        """Copies the pages to the host, and frees those of the device. Raises `PageError`."""
        if self.table.is_offloaded: return
        if not self.table.offload():
            host = self.cache.pool.host
            raise PageError(f"out of host pages for a request of {len(self.table.unpruned_pages)}: "
                            f"{host.available} left of {host.total}", "as many",
                            "make the cache with more host_pages")
        self.cache.commit()

    def prefetch(self) -> None:
        """Copies the pages of an offloaded request back, asynchronously where the device can. Raises
        `PageError`."""
        if not self.table.is_offloaded: return
        if not self.table.restore():
            raise self.cache._out_of_pages("an offloaded request", len(self.table.host_pages))
        self.cache.commit()

    def release(self) -> None:
        """Ends the request. Its full pages stay cached until they are evicted."""
        if self not in self.cache.requests: return
        self.table.release()
        self.cache.requests.remove(self)
        self.cache.commit()


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens of N requests, T (`num_tokens`) of each: `table` int32 [N, pages], `lengths` int32 [N]
    including them."""
    cache: KVCache
    num_tokens: int
    table: Tensor
    lengths: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor, *, q: Tensor | None = None, cos: Tensor | None = None,
              sin: Tensor | None = None, interleaved: bool = False) -> Tensor | None:
        """Stores a layer's new keys and values, [N, T, H, D] each. With cos and sin [positions, rotated / 2],
        keys are rotated, and q [N, T, heads, D] too, which is then returned. Raises `SpecError`."""
        cache, pages = self.cache, self.cache.pages(layer)
        for name, x in (("k", k), ("v", v)):
            shape = int(self.lengths.shape[0]), self.num_tokens, cache.heads, cache.d
            check_shape(name, x, "N, T, H, D", shape)
        made = kv_append(pages.keys, pages.values, k, v, self.table, self.lengths, cos=cos, sin=sin, q=q,
                         k_scale=pages.k_scale, v_scale=pages.v_scale, interleaved=interleaved)
        return made[2] if q is not None else None

    def attend(self, layer: int, q: Tensor, *, scale: float | None = None,
               softcap: float | None = None) -> Tensor:
        """Attention of q [N, T, heads, D] over all tokens up to each query's own, or the window of them: [N,
        T, heads, D] in q's dtype; `heads` is a multiple of H. Raises `SpecError`."""
        cache, pages = self.cache, self.cache.pages(layer)
        check_shape("q", q, "N, T, heads, D", (int(self.lengths.shape[0]), self.num_tokens, None, cache.d))
        given = q.cast(cache.kind.dtype) if cache.kind.dtype in FLOATS else q
        assert pages.values is not None
        out = paged_attention(given, pages.keys, pages.values, self.table, self.lengths, scale=scale,
                              window=cache.window, softcap=softcap, k_scale=pages.k_scale,
                              v_scale=pages.v_scale)
        return out.cast(q.dtype)
