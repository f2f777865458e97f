"""Keys and values of a model's layers in pages, for who writes the model's loop himself.

    Cache = KVCache["B", "H", "S_max", "D", dtypes.bfloat16]
    cache = Cache(B=8, H=4, S_max=2048, D=128, layers=32)
    request = cache.open(prompt)                    # what is there of an equal beginning is shared
    step = cache.append([request], [prompt[len(request):]])
    for layer in range(32):
        …
        step.write(layer, k, v)                     # [N, T, H, D] each
        out = step.attend(layer, q)                 # [N, T, heads, D]

Protocol. `append` gives new tokens of N requests, T of each, their places: pages are taken, copied on write,
fetched from the host, before it returns, and the `Step` knows block tables and lengths. `write` then puts
each layer's keys and values there, and `attend` is attention over all that the requests have. Both are lazy,
as Tensors are; what nobody realized is realized before pages move next.

    fork        a request that goes on otherwise, with the same pages until one of both writes
    prune       gives back pages behind the window
    prefetch    fetches a request's pages from the host before they are needed; `offload` puts them there
    truncate    gives back the newest tokens, such as a draft's that were refused

With NV_DEBUG=1 every operation ends with a look at every page's references.
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
from tinygrad_nv.kvcache.kind import CacheKind
from tinygrad_nv.kvcache.pool import PagePool, PoolStats
from tinygrad_nv.kvcache.store import Pages, PageStore
from tinygrad_nv.kvcache.table import Table
from tinygrad_nv.patterns.decode.paged import FLOATS, check_shape
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.expression import short

Scales = float | Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Shape:
    """What a store of pages asks of a model's config."""
    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVCache:
    """A cache: `KVCache["B", "H", "S_max", "D", dtype](B=…, H=…, S_max=…, D=…, …)`.

    `layers` of pages of `page_size` tokens on `device` (the default device); `pages` are as many as B
    requests of S_max tokens need, unless they are given; `host_pages` more lie in the host's memory.
    `window`: rows see so many keys at most, and pages behind are given back. `sharing`: requests with an
    equal beginning share its pages. int8 needs `k_scale` and `v_scale`, e4m3 takes them: a number, or numbers
    [H] or [layers, H]; a key is its stored number times that. Raises `SpecError`, `PageError`, MemoryError.
    """

    def __init__(self, kind: CacheKind[KVCache], extents: tuple[int, int, int, int], *,
                 device: str | None = None, layers: int = 1, page_size: int = 16, pages: int | None = None,
                 host_pages: int = 0, window: int | None = None, sharing: bool = True,
                 k_scale: Scales | None = None, v_scale: Scales | None = None) -> None:
        if type(layers) is not int or layers < 1: raise SpecError(f"layers={layers!r}", "at least 1")
        self.kind, self.window, self.layers = kind, window, layers
        self.most, self.heads, self.longest, self.d = extents
        self.device = device or Device.DEFAULT
        if pages is None and type(page_size) is int and page_size > 0:
            pages = self.most * -(-self.longest // page_size)
        self.pool = PagePool(cast(int, pages), page_size, host_pages=host_pages, sharing=sharing,
                             window=window)
        scales = [self._scales("k_scale", k_scale), self._scales("v_scale", v_scale)]
        self.store = PageStore(Shape(layers, self.heads, self.d), self.device, kind.dtype,
                               self.pool.device.total, page_size, host_pages)
        # plain tinygrad, which computes what no kernel of ours does, multiplies what no row sees by 0
        for x in self.store.tensors: Tensor(x.uop).assign(x.zeros_like()).realize()
        if kind.dtype in BYTES: self.store.scale(zip(*scales, strict=True))
        self.requests: list[Request] = []
        # what steps make of each layer's pages; the store's own Tensors stay what they are, memory
        self.written = [(Tensor(each.keys.uop), Tensor(each.values.uop)) for each in self.store.cache.layers]

    def __class_getitem__(cls, words: Any) -> CacheKind[KVCache]: return CacheKind.of(words, cls)

    def _scales(self, name: str, given: Scales | None) -> np.ndarray:
        """float32 [layers, H]."""
        shape = (self.layers, self.heads)
        if self.kind.dtype in FLOATS and given is not None:
            raise SpecError(f"{name} with {short(self.kind.dtype)}", "scales with 8 bits, and only then")
        if given is None and self.kind.dtype == dtypes.int8:
            raise SpecError(f"{self.kind} without {name}", "the number that 1 of int8 stands for",
                            f"{name}=the largest key or value / 127")
        made = np.asarray(1.0 if given is None else given, np.float32)
        if made.shape not in ((), shape[1:], shape):
            raise SpecError(f"{name} of shape {made.shape}",
                            f"a number, [H]: {shape[1:]} or [layers, H]: {shape}")
        if not (np.isfinite(made) & (made > 0)).all(): raise SpecError(f"{name}={given}", "numbers above 0")
        return np.broadcast_to(made, shape)

    # **** requests ****

    def open(self, tokens: Sequence[int] = (), salt: bytes = b"") -> Request:
        """A request that begins with `tokens`, or will: its `len` says how many of them are there already, in
        pages that are shared; the others are to be appended. `salt` keeps apart what must not be shared.
        Raises `PageError` if there are B requests."""
        return self._opened(self.pool.open(tokens, salt))

    def _opened(self, table: Table) -> Request:
        made = Request(self, table)
        if len(self.requests) == self.most:
            table.release()
            raise PageError(f"{self.most + 1} requests in {self.kind}", f"at most {self.most} at a time",
                            "release one")
        self.requests.append(made)
        self.done()
        return made

    def append(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> Step:
        """Places for new tokens, T of each of N different requests. Requests that are away are fetched. All
        or nothing. Raises `PageError` where there are too few pages, or a request gets too long."""
        rows = self._rows(requests, tokens)
        for request in requests: request.prefetch()
        done: list[tuple[Table, int]] = []
        for request in requests:
            table = request.table
            if not table.reserve(len(request) + rows):
                error = self._short(f"{rows} tokens more of each of {len(requests)} requests",
                                    table.missing(len(request) + rows))
                for other, length in done: other.truncate(length)
                self.done()
                raise error
            done.append((table, table.computed))
        for request, new in zip(requests, tokens, strict=True): request.table.advance(new)
        self.done()
        width = -(-self.longest // self.pool.page_size)
        entries = np.full((len(requests), width), -1, np.int32)
        for row, request in zip(entries, requests, strict=True):
            row[:len(request.table.pages)] = request.table.pages
        lengths = np.array([len(request) for request in requests], np.int32)
        return Step(self, rows, *(Tensor(x, device=self.device).realize() for x in (entries, lengths)))

    def _rows(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> int:
        """How many tokens each gets. Raises `PageError`."""
        if not requests or len(requests) != len(tokens):
            raise PageError(f"tokens of {len(tokens)} requests for {len(requests)}", "as many, at least one")
        for i, request in enumerate(requests):
            if request not in self.requests:
                raise PageError(f"request {i} is not one of this cache", "one that is open",
                                "cache.open(tokens)")
        if len(set(map(id, requests))) < len(requests):
            raise PageError("a request that stands twice in a step", "different ones",
                            "append its tokens at once")
        counts = [len(new) for new in tokens]
        if min(counts) != max(counts) or not counts[0]:
            raise PageError(f"{', '.join(map(str, counts))} new tokens",
                            "as many of each request, at least one", "append in several steps")
        for i, request in enumerate(requests):
            if len(request) + counts[0] > self.longest:
                raise PageError(f"request {i} of {len(request) + counts[0]} tokens",
                                f"at most {self.longest} in {self.kind}", "end it, or make a longer cache")
        return counts[0]

    def _short(self, what: str, missing: int) -> PageError:
        return PageError(f"no pages for {what}: {missing} are missing, {self.pool.available} left of "
                         f"{self.pool.device.total}", "as many as are written",
                         "release a request, offload one, or make a cache of more pages")

    # **** pages ****

    def done(self) -> None:
        """Copies what an operation asked to be copied; with NV_DEBUG=1 looks at every page."""
        if moves := self.pool.take_moves():
            self.settle()
            self.store.move(moves)
        if config.get("NV_DEBUG"): self.pool.assert_conserved([one.table for one in self.requests])

    def settle(self) -> None:
        """Realizes what was written."""
        Tensor.realize(*(x for pair in self.written for x in pair))

    def pages(self, layer: int) -> Pages:
        """A layer's keys and values [P, page_size, H, D] as they will be, and scales [P, H] of 8 bits. Raises
        `SpecError`."""
        if type(layer) is not int or not 0 <= layer < self.layers:
            raise SpecError(f"layer {layer!r}", f"0 to {self.layers - 1}")
        return replace(self.store.cache.layers[layer], keys=self.written[layer][0],
                       values=self.written[layer][1])

    def stats(self) -> PoolStats:
        """Counts of pages."""
        return self.pool.stats()

    def close(self) -> None:
        """Releases all requests, and the host's memory."""
        for request in self.requests[:]: request.release()
        self.settle()
        self.store.close()


class Request:
    """A request's place in a cache. `len` counts its tokens. As a context manager it is released at the end.
    """

    def __init__(self, cache: KVCache, table: Table) -> None: self.cache, self.table = cache, table

    def __len__(self) -> int: return self.table.computed

    def __bool__(self) -> bool: return True

    def __enter__(self) -> Request: return self

    def __exit__(self, *_: object) -> None: self.release()

    def fork(self) -> Request:
        """A request that begins as this one. Pages are copied when one of both writes into them."""
        return self.cache._opened(self.table.fork())

    def prune(self, before: int) -> None:
        """Gives back pages of tokens before `before`, which no row to come may see: at most len − window + 1.
        Raises `PageError`."""
        window, seen = self.cache.window, 0
        if window is not None: seen = max(0, len(self) - window + 1)
        if before > seen:
            raise PageError(f"tokens before {before} pruned of {len(self)}",
                            f"at most those before {seen}: the next row sees "
                            + ("all" if window is None else f"{window} keys"),
                            "make the cache with window=…" if window is None else "")
        self.prefetch()
        self.table.prune(before)
        self.cache.done()

    def truncate(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens. Raises `PageError`."""
        if not 0 <= tokens <= len(self):
            raise PageError(f"{len(self)} tokens cut to {tokens}", f"0 to {len(self)}")
        self.prefetch()
        self.table.truncate(tokens)
        self.cache.done()

    def offload(self) -> None:
        """Copies the pages to the host, and gives those of the device to others. Raises `PageError`."""
        if self.table.away: return
        if not self.table.offload():
            host = self.cache.pool.host
            raise PageError(f"no pages of the host for a request of {len(self.table.held_pages)}: "
                            f"{host.available} left of {host.total}", "as many",
                            "make the cache with more host_pages")
        self.cache.done()

    def prefetch(self) -> None:
        """Copies the pages back, if they are away; where the device can, beside what runs on it. Raises
        `PageError`."""
        if not self.table.away: return
        if not self.table.restore():
            raise self.cache._short("a request that is away", len(self.table.host_pages))
        self.cache.done()

    def release(self) -> None:
        """Ends the request: its pages are kept for others while nobody needs them."""
        if self not in self.cache.requests: return
        self.table.release()
        self.cache.requests.remove(self)
        self.cache.done()


@dataclass(frozen=True, eq=False)
class Step:
    """New tokens of N requests, `rows` of each, T: `table` int32 [N, pages], `lengths` int32 [N] with them.
    """
    cache: KVCache
    rows: int
    table: Tensor
    lengths: Tensor

    def write(self, layer: int, k: Tensor, v: Tensor, *, q: Tensor | None = None, cos: Tensor | None = None,
              sin: Tensor | None = None, interleaved: bool = False) -> Tensor | None:
        """Puts a layer's new keys and values, [N, T, H, D] each, into their places. With cos and sin
        [places, rotated / 2] keys are rotated, and q [N, T, heads, D] too, which is returned then. Raises
        `SpecError`."""
        cache, pages = self.cache, self.cache.pages(layer)
        for name, x in (("k", k), ("v", v)):
            check_shape(name, x, "N, T, H, D", (int(self.lengths.shape[0]), self.rows, cache.heads, cache.d))
        made = kv_append(pages.keys, pages.values, k, v, self.table, self.lengths, cos=cos, sin=sin, q=q,
                         k_scale=pages.k_scale, v_scale=pages.v_scale, interleaved=interleaved)
        return made[2] if q is not None else None

    def attend(self, layer: int, q: Tensor, *, scale: float | None = None,
               softcap: float | None = None) -> Tensor:
        """Attention of q [N, T, heads, D] over all tokens up to each row's own, or the window of them: [N, T,
        heads, D] in q's dtype; `heads` is a multiple of H. Raises `SpecError`."""
        cache, pages = self.cache, self.cache.pages(layer)
        check_shape("q", q, "N, T, heads, D", (int(self.lengths.shape[0]), self.rows, None, cache.d))
        given = q.cast(cache.kind.dtype) if cache.kind.dtype in FLOATS else q
        out = paged_attention(given, pages.keys, pages.values, self.table, self.lengths, scale=scale,
                              window=cache.window, softcap=softcap, k_scale=pages.k_scale,
                              v_scale=pages.v_scale)
        return out.cast(q.dtype)
