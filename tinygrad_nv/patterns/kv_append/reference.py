"""New keys and values into pages, in plain tinygrad: as tile/kv_append/spec.py defines it, on any device.

Protocol: `appended(what, k_pages, v_pages, k, v, table, lengths, …)` gives the pages as they are afterwards,
and the rotated q: values, all of them; who calls it assigns them. A contiguous cache is one of pages that are
called [B, capacity, H_kv, D]. Every token of all pages is asked which new
row it is, if any: this is the reference, and costs what all pages cost. Where tinygrad has no e4m3 of its
own, its kernels lose subnormals of it: 0 takes the place of numbers below 2⁻⁶, in other tokens too.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

from tinygrad import Tensor, dtypes

T = TypeVar("T")
LARGEST = {dtypes.int8: (-128, 127), dtypes.fp8e4m3: (-448, 448)}


@dataclass(frozen=True)
class KVAppend:
    """An append, as far as its tensors do not say it: which of cos and sin, q, scales and table there are."""
    rope: bool = False
    interleaved: bool = False
    q: bool = False
    scales: bool = False
    table: bool = True
    rounded: bool = False


@dataclass(frozen=True)
class Arguments(Generic[T]):
    """The tensors of a call, or their UOps, by their names."""
    k_pages: T
    v_pages: T
    k: T
    v: T
    table: T | None
    lengths: T
    rope: tuple[T, ...]
    q: tuple[T, ...]
    scales: tuple[T, ...]

    @staticmethod
    def of(what: KVAppend, given: tuple[T, ...]) -> Arguments[T]:
        """Those of a call's tensors: keys and values of the cache, k, v, the table if there is one, lengths,
        then cos and sin, q, scales of keys and of values."""
        k_pages, v_pages, k, v, *more = given
        rest = iter(more)
        table = next(rest) if what.table else None
        lengths = next(rest)
        rope, q, scales = (tuple(islice(rest, count)) for count in (2 * what.rope, what.q, 2 * what.scales))
        return Arguments(k_pages, v_pages, k, v, table, lengths, rope, q, scales)


def appended(what: KVAppend, *given: Tensor) -> tuple[Tensor, ...]:
    """Pages of keys and of values, and q where there is one."""
    x = Arguments.of(what, given)
    if x.table is None:  # page b is request b's
        turned = (each.transpose(1, 2) for each in given[:2])
        numbers = Tensor.arange(x.k.shape[0]).reshape(-1, 1).cast(dtypes.int32)
        k_pages, v_pages, *q = appended(replace(what, table=True), *turned, *given[2:4], numbers, *given[4:])
        return k_pages.transpose(1, 2), v_pages.transpose(1, 2), *q
    rows, longest = x.k.shape[1], x.table.shape[1] * x.k_pages.shape[1]
    place = x.lengths.reshape(-1, 1) - rows + Tensor.arange(rows).reshape(1, -1)
    inside = (place >= 0) & (place < longest)
    near = place.maximum(0).minimum(longest - 1)
    page = x.table.gather(1, near // x.k_pages.shape[1])
    there = inside & (page >= 0) & (page < x.k_pages.shape[0])
    token = there.where(page * x.k_pages.shape[1] + near % x.k_pages.shape[1], -1)
    row = row_of(token.reshape(-1), x.k_pages.shape[0] * x.k_pages.shape[1])
    angles = tuple(table[near].float().unsqueeze(2) for table in x.rope)
    if what.rounded: angles = tuple(table.cast(x.k.dtype) for table in angles)
    k, *q = (rotated(each if what.rounded else each.float(), angles, what.interleaved).float()
             for each in (x.k, *x.q))
    made = []
    for number, (pages, new) in enumerate(((x.k_pages, k), (x.v_pages, x.v.float()))):
        if what.scales:
            scale = x.scales[number][there.where(page, 0)].unsqueeze(-1)
            new = new * scale.reciprocal()
        made.append(placed(pages, narrowed(new, pages), row))
    return *made, *(each.cast(old.dtype).contiguous() for each, old in zip(q, x.q, strict=True))


def row_of(token: Tensor, count: int) -> Tensor:
    """Of each token of all pages, which new row it is, counted from 1: int32, 0 where it is none."""
    match = Tensor.arange(count).reshape(-1, 1) == token.reshape(1, -1)
    number = Tensor.arange(1, int(token.shape[0]) + 1).reshape(1, -1)
    return match.where(number, 0).max(1).cast(dtypes.int32).contiguous()


def placed(pages: Tensor, new: Tensor, row: Tensor) -> Tensor:
    """Pages with new rows [B, T, H_kv, D] in them."""
    rows = new.reshape(-1, *new.shape[2:]).contiguous()
    index = row.reshape(*pages.shape[:2], 1, 1)
    return (index > 0).where(rows[(row - 1).maximum(0)].reshape(pages.shape), pages)


def rotated(x: Tensor, angles: tuple[Tensor, ...], interleaved: bool) -> Tensor:
    """Heads [B, T, H, D] turned by the angles of their places; all of it where there are none."""
    if not angles: return x
    cos, sin = angles
    half = cos.shape[-1]
    turning, rest = x[..., :2 * half], x[..., 2 * half:]
    if interleaved:
        pairs = turning.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = Tensor.stack(a * cos - b * sin, b * cos + a * sin, dim=-1).reshape(turning.shape)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = (a * cos - b * sin).cat(b * cos + a * sin, dim=-1)
    return turned.cat(rest, dim=-1) if rest.shape[-1] else turned


def narrowed(x: Tensor, pages: Tensor) -> Tensor:
    """Numbers as pages have them; of 8 bits, what is too large is the largest there is."""
    if pages.dtype not in LARGEST: return x.cast(pages.dtype)
    least, most = LARGEST[pages.dtype]
    return (x.round() if pages.dtype == dtypes.int8 else x).clip(least, most).cast(pages.dtype)
