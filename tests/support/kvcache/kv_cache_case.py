"""A loop over a `KVCache`, checked against lists of keys and values.

Protocol: keys and values of a token are a function of the layer and of all tokens up to it, as a model's are,
so requests that share pages have equal ones. `Loop.append` appends tokens to requests, on every layer, and
checks attention of random queries against float64 over the stored values.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.kvcache.cache import CachedSequence, KVCache, Step

HEADS, QUERIES, D, SCALE = 2, 4, 32, 0.03
TORCH = {dtypes.float32: torch.float32, dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16}
FP8 = {dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.fp8e5m2: torch.float8_e5m2}
NEAR = {dtypes.float32: 4e-5, dtypes.float16: 1e-2, dtypes.bfloat16: 6e-2, dtypes.int8: 4e-5,
        dtypes.fp8e4m3: 4e-5, dtypes.fp8e5m2: 4e-5}


def row(layer: int, tokens: list[int], what: int) -> np.ndarray:
    """A key or value of the last token, [H, D]."""
    return np.random.default_rng([layer, what, *tokens]).standard_normal((HEADS, D)).astype(np.float32)


def stored(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The values as the cache stores them."""
    given = torch.from_numpy(x)
    if dtype == dtypes.int8: return torch.clamp((given / SCALE).round(), -128, 127).double().numpy() * SCALE
    if dtype in FP8: return (given / SCALE).to(FP8[dtype]).double().numpy() * SCALE
    return given.to(TORCH[dtype]).double().numpy()


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Attention of q [T, heads, D], the newest tokens, over k and v [S, H, D], in float64."""
    rows, made = len(q), np.zeros(q.shape)
    for i in range(rows):
        place = len(k) - rows + i
        seen = slice(max(0, place + 1 - window) if window else 0, place + 1)
        for head in range(q.shape[1]):
            s = k[seen, head // (QUERIES // HEADS)] @ q[i, head].astype(np.float64) * D**-0.5
            p = np.exp(s - s.max())
            made[i, head] = p / p.sum() @ v[seen, head // (QUERIES // HEADS)]
    return made


@dataclass
class Loop:
    """Requests and their tokens."""
    cache: KVCache
    tokens: dict[CachedSequence, list[int]] = field(default_factory=dict)
    random: Any = field(default_factory=lambda: np.random.default_rng(0))

    def open(self, prompt: list[int]) -> CachedSequence:
        made = self.cache.open(prompt)
        self.tokens[made] = prompt[:len(made)]
        return made

    def fork(self, request: CachedSequence) -> CachedSequence:
        made = request.fork()
        self.tokens[made] = self.tokens[request][:]
        return made

    def truncate(self, request: CachedSequence, count: int) -> None:
        request.truncate(count)
        del self.tokens[request][count:]

    def append(self, requests: list[CachedSequence], new: list[list[int]]) -> Step:
        """A step over these requests, checked."""
        step = self.cache.append(requests, new)
        for request, more in zip(requests, new, strict=True): self.tokens[request] += more
        count, dtype = len(new[0]), self.cache.kind.dtype
        kind = dtypes.float32 if dtype.itemsize == 1 else dtype
        for layer in range(self.cache.layers):
            k, v = (np.array([[row(layer, self.tokens[request][:end], what) for end in
                               range(len(request) - count + 1, len(request) + 1)] for request in requests])
                    for what in (0, 1))
            q = self.random.standard_normal((len(requests), count, QUERIES, D)).astype(np.float32)
            given = [Tensor(x, device=self.cache.device).cast(kind) for x in (q, k, v)]
            assert step.write(layer, *given[1:]) is None
            out = step.attend(layer, given[0])
            assert out.dtype == kind
            self.near(layer, requests, given[0].float().numpy(), out.float().numpy())
        return step

    def near(self, layer: int, requests: list[CachedSequence], q: np.ndarray, out: np.ndarray) -> None:
        """Checks a result against the reference."""
        dtype = self.cache.kind.dtype
        for request, queries, got in zip(requests, q, out, strict=True):
            tokens = self.tokens[request]
            ends = range(1, len(tokens) + 1)
            k, v = (stored(np.array([row(layer, tokens[:end], what) for end in ends]), dtype)
                    for what in (0, 1))
            wanted = attention(queries, k, v, self.cache.window)
            assert np.abs(got - wanted).max() < NEAR[dtype], np.abs(got - wanted).max()


def cache(dtype: DType = dtypes.float32, **more: Any) -> KVCache:
    """A small cache; those of 8 bits have scales."""
    scales = {"k_scale": SCALE, "v_scale": [SCALE] * HEADS} if dtype.itemsize == 1 else {}
    given = {"B": 4, "S_max": 64, "page_size": 8, "layers": 2} | scales | more
    return KVCache["B", HEADS, "S_max", D, dtype](**given)
