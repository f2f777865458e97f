"""The type of a cache: its extents by name, and the dtype of keys and values.

Protocol. `KVCache["B", "H", "S_max", "D", dtypes.bfloat16]` is a `CacheKind`, frozen and hashable: B requests
at a time, H key heads, S_max tokens of a request at most, D elements of a head. A number in place of a name
fixes the extent. Calling the kind creates a cache; every named extent must be given, and a name used twice is
one extent.

    Cache = KVCache["B", 8, "S_max", 128, dtypes.int8]
    cache = Cache(B=16, S_max=4096, layers=32, k_scale=…, v_scale=…)
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tinygrad.dtype import DType

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.decode.paged import FLOATS
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.expression import short

EXTENTS = ("B", "H", "S_max", "D")
OPTIONS = ("device", "layers", "page_size", "pages", "host_pages", "window", "sharing", "k_scale", "v_scale")
MEANINGS = ("requests", "key heads", "tokens of a request", "elements of a head")
WRITTEN = 'KVCache["B", "H", "S_max", "D", dtypes.bfloat16]'
Cache = TypeVar("Cache")


@dataclass(frozen=True)
class CacheKind(Generic[Cache]):
    """A type of caches: the names or values of B, H, S_max and D, and the dtype. `make(kind,
    extents, **options)` creates one."""
    extents: tuple[str | int, ...]
    dtype: DType
    make: Callable[..., Cache] = field(compare=False, repr=False)

    @staticmethod
    def of(words: Any, make: Callable[..., Cache]) -> CacheKind[Cache]:
        """The type written in the brackets. Raises `SpecError`."""
        given = words if isinstance(words, tuple) else (words,)
        if len(given) != 5:
            raise SpecError(f"KVCache[…] with {len(given)} arguments", "four extents and a dtype", WRITTEN)
        *extents, dtype = given
        for meaning, one in zip(MEANINGS, extents, strict=True):
            if isinstance(one, str) and one.isidentifier(): continue
            if type(one) is not int or one < 1:
                raise SpecError(f"KVCache[…] with {one!r} for its {meaning}",
                                "a name, or a whole number, at least 1", WRITTEN)
        if dtype not in (*FLOATS, *BYTES):
            shown = short(dtype) if isinstance(dtype, DType) else repr(dtype)
            raise SpecError(f"KVCache[…] of {shown}",
                            f"one of {', '.join(map(short, (*FLOATS, *BYTES)))}", WRITTEN)
        return CacheKind(tuple(extents), dtype, make)

    def bind_extents(self, given: dict[str, int]) -> tuple[int, int, int, int]:
        """Returns B, H, S_max and D for the `given` values of names. Raises `SpecError`."""
        names = [one for one in self.extents if isinstance(one, str)]
        for name in names:
            if name in given: continue
            meaning = MEANINGS[self.extents.index(name)]
            raise SpecError(f"{self} without {name}", f"its number of {meaning}", f"give {name}=…")
        for name, number in given.items():
            if name not in names:
                raise SpecError(f"{self} with {name}={number!r}",
                                f"extents by their names: {', '.join(names)}")
            if type(number) is not int or number < 1:
                raise SpecError(f"{self} with {name}={number!r}", "a whole number, at least 1")
        b, h, s_max, d = (given[one] if isinstance(one, str) else one for one in self.extents)
        return b, h, s_max, d

    def __call__(self, **given: Any) -> Cache:
        """A cache of this type. `given`: extents by name, and options of the cache."""
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        return self.make(self, self.bind_extents(given), **options)

    def __str__(self) -> str:
        return f"KVCache[{', '.join(repr(one) for one in self.extents)}, {short(self.dtype)}]"
