"""A cache of keys and values whose operations are effects in one order.

Protocol. `CacheState(K, V)` holds Tensors (…, S, D). Each operation gives a new state and ends the one that
it
was called on: a state that has ended cannot be read, so operations cannot be done in another order than they
were written, or twice. `fork` gives a second state with the same contents, which goes its own way.

    append(k, v)     with new keys and values at the end
    prune(keep)      with the last `keep` positions alone
    offload()        in the host's memory: to be read again after `prefetch`
    prefetch()       back on its device

Paged caches, which share memory between requests, are kvcache.KVCache.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from tinygrad import Tensor

from tinygrad_nv.errors import EffectError
from tinygrad_nv.language.effects import follow


@dataclass(eq=False)
class CacheState:
    """Keys and values (…, S, D) at one point of a program, and their device. A tree of Tensors to
    transforms."""
    keys: Tensor
    values: Tensor
    home: str = ""

    def __post_init__(self) -> None:
        self._ended = ""
        if self.keys.ndim < 2 or self.keys.shape[:-1] != self.values.shape[:-1]:
            raise EffectError(f"a cache of keys {self.keys.shape} and values {self.values.shape}",
                              "shapes (…, S, D) with the same positions")
        self.home = self.home or str(self.keys.device)

    def __getattribute__(self, name: str) -> Any:
        if name in ("keys", "values") and object.__getattribute__(self, "__dict__").get("_ended"):
            self._over("read")
        return object.__getattribute__(self, name)

    @property
    def K(self) -> Tensor:
        """The keys."""
        self._here("read")
        return self.keys

    @property
    def V(self) -> Tensor:
        """The values."""
        self._here("read")
        return self.values

    @property
    def is_offloaded(self) -> bool:
        """Whether it is in the host's memory, away from its device."""
        return str(self.keys.device) != self.home

    def __len__(self) -> int: return int(self.keys.shape[-2])

    def append(self, k: Tensor, v: Tensor) -> CacheState:
        """With new positions (…, T, D) at the end."""
        self._here("append")
        for name, new, old in (("keys", k, self.keys), ("values", v, self.values)):
            if new.shape[:-2] != old.shape[:-2] or new.shape[-1] != old.shape[-1]:
                raise EffectError(f"{name} {new.shape} appended to {old.shape}",
                                  "the same shape but for the positions")
        return self._next("append", self.keys.cat(k.cast(self.keys.dtype), dim=-2),
                          self.values.cat(v.cast(self.values.dtype), dim=-2))

    def prune(self, keep: int) -> CacheState:
        """The last `keep` positions."""
        self._here("prune")
        if type(keep) is not int or not keep > 0:
            raise EffectError(f"prune(keep={keep!r})", "a number of positions from 1 on")
        first = max(0, len(self) - keep)
        return self._next("prune", self.keys[..., first:, :], self.values[..., first:, :])

    def offload(self) -> CacheState:
        """In the host's memory."""
        self._here("offload")
        return self._next("offload", self.keys.to("CPU"), self.values.to("CPU"))

    def prefetch(self) -> CacheState:
        """Back on its device; the copies begin at once."""
        self._live("prefetch")
        made = self._next("prefetch", self.keys.to(self.home), self.values.to(self.home))
        Tensor.realize(made.keys, made.values)
        return made

    def fork(self) -> tuple[CacheState, CacheState]:
        """Two states with the same contents."""
        self._here("fork")
        other = CacheState(self.keys, self.values, self.home)
        return self._next("fork", self.keys, self.values), other

    def _next(self, name: str, keys: Tensor, values: Tensor) -> CacheState:
        for old, new in ((self.keys, keys), (self.values, values)): follow(old, new)
        home, self._ended = self.home, name
        return CacheState(keys, values, home)

    def _live(self, name: str) -> None:
        if self._ended: self._over(name)

    def _here(self, name: str) -> None:
        self._live(name)
        if self.is_offloaded:
            raise EffectError(f"{name} of a cache that is offloaded", "a cache on its device",
                              "cache = cache.prefetch() first")

    def _over(self, name: str) -> NoReturn:
        raise EffectError(f"{name} of a cache that {self._ended} has replaced", "the state that it gave",
                          f"cache = cache.{self._ended}(…), and go on with that; fork() first for both")
