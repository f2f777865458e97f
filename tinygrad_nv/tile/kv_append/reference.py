"""New keys and values into pages in plain tinygrad (tile/reference.py): the body of patterns/kv_append, too.

Protocol: `append(what, k_pages, v_pages, k, v, table, lengths, …)` gives the pages as they are afterwards,
and the rotated q: values, all of them; who calls it assigns them. A contiguous cache is one of pages that are
called [B, H_kv, capacity, D]. Every token of all pages is asked which new row it is, if any, which costs what
all pages cost. Where tinygrad has no e4m3 of its own, the kernels of a body lose subnormals of it: 0 takes
the place of numbers below 2⁻⁶, in other tokens too.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Generic, TypeVar

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.decode.spec import Scales
from tinygrad_nv.tile.kv_append.spec import AppendSpec, Heads
from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense, gather, round_to

T = TypeVar("T")


@dataclass(frozen=True)
class KVAppend:
    """An append, as far as its tensors do not say it: which of cos and sin, q, scales, table and values there
    are."""
    rope: bool = False
    interleaved: bool = False
    q: bool = False
    scales: bool = False
    table: bool = True
    rounded: bool = False
    values: bool = True


@dataclass(frozen=True)
class Arguments(Generic[T]):
    """The tensors of a call, or their UOps, by their names."""
    pages: tuple[T, ...]    # of keys, and of values where there are any
    new: tuple[T, ...]
    table: T | None
    lengths: T
    rope: tuple[T, ...]
    q: tuple[T, ...]
    scales: tuple[T, ...]

    @staticmethod
    def of(what: KVAppend, given: tuple[T, ...]) -> Arguments[T]:
        """Returns the arguments of a call's tensors: keys and values of the cache, k, v, the table if there
        is one, lengths, then cos and sin, q, scales of keys and of values."""
        rest, count = iter(given), 1 + what.values
        pages, new = (tuple(islice(rest, count)) for _ in range(2))
        table = next(rest) if what.table else None
        lengths = next(rest)
        rope, q, scales = (tuple(islice(rest, each))
                           for each in (2 * what.rope, what.q, count * what.scales))
        return Arguments(pages, new, table, lengths, rope, q, scales)


def arguments(spec: AppendSpec) -> tuple[Argument, ...]:
    """k_pages, v_pages, q_out, k, v, q, table, lengths, cos, sin, scale_k, scale_v: those that there are."""
    def rows(name: str, x: Heads, heads: int, d: int) -> Argument:
        extents = (spec.batch, spec.rows, heads, d)
        return Argument(name, x.dtype, (Place(x.offset, extents, (x.request, x.row, x.head, 1)),))

    def scales(name: str, x: Scales | None) -> list[Argument]:
        lies = [] if x is None else [Place(x.offset, (spec.stored, spec.heads), (x.page, x.head))]
        return [Argument(name, dtypes.float32, (each,)) for each in lies]
    pages = [Argument(name, x.dtype, (Place(x.offset, (spec.stored, spec.page_size, spec.heads, d),
                                            (x.page, x.token, x.head, 1)),), "inout")
             for name, x, d in (("k_pages", spec.k_pages, spec.d), ("v_pages", spec.v_pages, spec.d_v))
             if x is not None]
    made = [*pages, *(rows(name, x, spec.heads, d) for name, x, d in
                      (("k", spec.k, spec.d), ("v", spec.v, spec.d_v)) if x is not None)]
    if spec.q is not None:
        q = rows("q", spec.q, spec.q_heads, spec.d)
        made.insert(len(pages), replace(q, name="q_out", role="out", places=(dense(*q.places[0].extents),)))
        made.append(q)
    if spec.table: made.append(Argument("table", dtypes.int32, (dense(spec.batch, spec.pages),),
                                        values=range(-1, spec.stored + 1),
                                        usual=range(spec.stored)))
    made.append(Argument("lengths", dtypes.int32, (dense(spec.batch),), values=range(spec.longest + 2),
                         usual=range(spec.longest, spec.longest + 1)))
    if spec.rope is not None:
        made += [Argument(name, spec.rope.dtype, (dense(spec.longest, spec.rope.half),))
                 for name in ("cos", "sin")]
    return *made, *scales("scale_k", spec.k_scale), *scales("scale_v", spec.v_scale)


def reference(spec: AppendSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """All pages [stored, page_size, heads, d] of keys and of values, and q [batch, rows, q_heads, d]."""
    known, rope = {each.name: each for each in arguments(spec)}, spec.rope
    x = {name: gather(given[name], each.places[0]) for name, each in known.items() if each.role != "out"}
    wide = {name: one.cast(compute_dtype(dtypes.float32, exact)) for name, one in x.items()}
    table = x["table"] if spec.table else Tensor.arange(spec.batch).reshape(-1, 1)
    ones = Tensor.ones(spec.stored, spec.heads)
    names = "k" if spec.v is None else "kv"
    made = Arguments(
        tuple(wide[f"{name}_pages"] for name in names), tuple(wide[name] for name in names), table,
        x["lengths"], (wide["cos"], wide["sin"]) if rope else (), (wide["q"],) if spec.q else (),
        tuple(wide.get(f"scale_{name}", ones) for name in names))
    kinds = [] if exact else [each.dtype for each in (spec.k_pages, spec.v_pages, spec.q) if each is not None]
    return append_pages(made, rope is not None and rope.interleaved, kinds,
                   spec.k.dtype if rope and rope.rounded and not exact else None)


def append(what: KVAppend, *given: Tensor) -> tuple[Tensor, ...]:
    """Pages of keys and of values, and q where there is one."""
    if not what.table:  # page b is request b's
        x = Arguments.of(what, given)
        numbers = Tensor.arange(x.new[0].shape[0]).reshape(-1, 1).cast(dtypes.int32)
        made = append(replace(what, table=True), *(each.transpose(1, 2) for each in x.pages), *x.new,
                        numbers, x.lengths, *x.rope, *x.q, *x.scales)
        return *(each.transpose(1, 2) for each in made[:len(x.pages)]), *made[len(x.pages):]
    x = Arguments.of(what, given)
    kinds = [each.dtype for each in (*x.pages, *x.q)]
    def wide(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]: return tuple(each.float() for each in given)
    made = append_pages(replace(x, new=wide(x.new), rope=wide(x.rope), q=wide(x.q)), what.interleaved, kinds,
                   x.new[0].dtype if what.rounded else None)
    count = len(x.pages)
    return *made[:count], *(each.cast(old.dtype) for each, old in zip(made[count:], x.q, strict=True))


def append_pages(x: Arguments[Tensor], interleaved: bool, kinds: list[DType],
            step: DType | None) -> tuple[Tensor, ...]:
    """Pages and q of rows in float32 or float64, rounded to their `kinds`, if any; products and sums of a
    rotation to `step`, if that is given."""
    assert x.table is not None
    (stored, size), rows = x.pages[0].shape[:2], x.new[0].shape[1]
    longest = x.table.shape[1] * size
    place = x.lengths.reshape(-1, 1) - rows + Tensor.arange(rows).reshape(1, -1)
    inside = (place >= 0) & (place < longest)
    near = place.maximum(0).minimum(longest - 1)
    page = x.table.gather(1, near // size)
    there = inside & (page >= 0) & (page < stored)
    token = there.where(page * size + near % size, -1)
    row = row_of(token.reshape(-1), stored * size)
    angles = tuple(table[near].unsqueeze(2) for table in x.rope)
    k, *q = (rotate_heads(each, angles, interleaved, step) for each in (x.new[0], *x.q))
    made = []
    for number, (pages, new) in enumerate(zip(x.pages, (k, *x.new[1:]), strict=True)):
        if x.scales:  # contiguous: or tinygrad divides
            scale = x.scales[number][there.where(page, 0)].unsqueeze(-1)
            new = new * scale.reciprocal().contiguous()
        made.append(place_rows(pages, narrow(new, kinds[number]) if kinds else new, row))
    return *made, *(narrow(each, kinds[-1]) if kinds else each for each in q)


def row_of(token: Tensor, count: int) -> Tensor:
    """Returns, of each token of all pages, which new row it is, counted from 1: int32, 0 where it is none."""
    match = Tensor.arange(count).reshape(-1, 1) == token.reshape(1, -1)
    number = Tensor.arange(1, int(token.shape[0]) + 1).reshape(1, -1)
    return match.where(number, 0).max(1).cast(dtypes.int32).contiguous()


def place_rows(pages: Tensor, new: Tensor, row: Tensor) -> Tensor:
    """Pages with new rows [B, T, H_kv, D] in them."""
    rows = new.reshape(-1, *new.shape[2:]).contiguous()
    index = row.reshape(*pages.shape[:2], 1, 1)
    return (index > 0).where(rows[(row - 1).maximum(0)].reshape(pages.shape).cast(pages.dtype), pages)


def rotate_heads(x: Tensor, angles: tuple[Tensor, ...], interleaved: bool, step: DType | None) -> Tensor:
    """Heads [B, T, H, D] turned by the angles of their places; all of it where there are none."""
    if not angles: return x
    def narrow(value: Tensor) -> Tensor: return round_to(value, step).cast(x.dtype) if step else value
    cos, sin = angles
    half = cos.shape[-1]
    turning, rest = x[..., :2 * half], x[..., 2 * half:]
    pairs = turning.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    a, b = (pairs[..., i] if interleaved else pairs[..., i, :] for i in (0, 1))
    first = narrow(narrow(a * cos) - narrow(b * sin))
    second = narrow(narrow(b * cos) + narrow(a * sin))
    turned = Tensor.stack(first, second, dim=-1 if interleaved else -2).reshape(turning.shape)
    return turned.cat(rest, dim=-1) if rest.shape[-1] else turned


def narrow(x: Tensor, kind: DType) -> Tensor:
    """Numbers of a dtype, of 8-bit floats as float32; what is too large is the largest there is."""
    return x.round().clip(-128, 127).cast(kind) if kind == dtypes.int8 else round_to(x, kind)
