"""The dimensions of an attention, read off the indices of its operands.

Protocol. `arrange_dims` gets where q, k, v, the result, the score's loads and its places lie over the ranges
of a space, and which ranges count keys and which are summed in q kᵀ. A range in v alone is the width of the
result; one that k and v do not have is a row, or a query head of a key head; all others are batch. Ranges
that lie as one in everything become one. Rows are the range that a mask compares with the keys, else a
symbolic one, else the innermost of the scores.

What has strides that a kernel does not read is copied first, if each of its elements is used often.
`Unsupported` says why there is no arrangement.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns.contraction import COPY_REUSED, Dim, Side, Unsupported, merge_dims, pack_side
from tinygrad_nv.patterns.index import Affine, Space, largest

Q, K, V, OUT, MORE = 0, 1, 2, 3, 4


class Sideways(Unsupported):
    """The elements of a head of the result do not lie side by side."""


@dataclass(frozen=True)
class Ranges:
    """Ranges by what they count. `compared` are those that a mask compares with keys, `ordered` the rows'
    candidates as the scores have them."""
    keys: tuple[int, ...]
    summed: tuple[int, ...]
    compared: frozenset[int] = frozenset()
    ordered: tuple[int, ...] = ()


@dataclass(frozen=True)
class Dims:
    """Dimensions, with the strides of each in q, k, v, the result, loads and places; batch, key heads, query
    heads of a key head. q, k and v may be copies."""
    q: Side
    k: Side
    v: Side
    rows: Dim
    keys: Dim
    d: Dim
    d_v: Dim
    batch: tuple[Dim, Dim, Dim]


def arrange_dims(space: Space, sides: tuple[Side, Side, Side], out: Affine, more: Sequence[Affine],
             ranges: Ranges, rows: bool) -> Dims:
    """The dimensions; without `rows` the attention has one row, and what may be rows is query heads."""
    sides = (sides[0].resolve(space), sides[1].resolve(space), sides[2].resolve(space))
    kinds = _kinds(space, sides, out, more, ranges, rows)
    made: list[Side] = []
    for number, one in enumerate(sides): made.append(_readable(space, one, number, kinds, out))
    return _group_dims(space, (made[0], made[1], made[2]), out, more, kinds)


def _leaves(space: Space, ranges: Sequence[int]) -> list[int]:
    return [leaf for r in ranges for leaf in space.leaves(r)]


def _kinds(space: Space, sides: tuple[Side, ...], out: Affine, more: Sequence[Affine], ranges: Ranges,
           rows: bool) -> dict[int, str]:
    """Returns the kind of each range: keys, d, d_v, rows, group or batch."""
    keys, summed = set(_leaves(space, ranges.keys)), set(_leaves(space, ranges.summed))
    q, k, v = (one.lies.strides for one in sides)
    kept = [r for r in range(len(space.extents)) if r not in space.divided and r not in keys | summed]
    made = dict.fromkeys(keys, "keys") | dict.fromkeys(summed, "d")
    for r in kept:
        beside = any(r in index.strides for index in more)
        if r not in k and r not in v: made[r] = "group"
        elif r not in q and r not in k and not beside: made[r] = "d_v"
        else: made[r] = "batch"
    if "d_v" not in made.values(): raise Unsupported("a result without a dimension of v alone")
    if rows and (chosen := _rows(space, made, ranges)) is not None: made[chosen] = "rows"
    # of several dimensions of v alone one is the width, the one that lies side by side in the result
    wide = sorted((r for r in made if made[r] == "d_v"), key=lambda r: out.strides.get(r, 0))
    pitch = 1
    for r in wide:
        if out.strides.get(r, 0) != pitch: made[r] = "batch"
        else: pitch *= largest(space.extents[r])
    if "d_v" not in made.values(): raise Sideways("elements of the result do not lie side by side")
    for r, kind in made.items():
        if isinstance(space.extents[r], UOp) and kind not in ("rows", "keys"):
            raise Unsupported(f"a symbolic {'batch' if kind in ('batch', 'group') else 'head'}")
    return made


def _rows(space: Space, kinds: dict[int, str], ranges: Ranges) -> int | None:
    candidates = [r for r in kinds if kinds[r] == "group"]
    compared = set(_leaves(space, sorted(ranges.compared)))
    ordered = _leaves(space, ranges.ordered)
    def rank(r: int) -> tuple[bool, bool, int]:
        return r in compared, isinstance(space.extents[r], UOp), ordered.index(r) if r in ordered else -1
    return max(candidates, key=rank, default=None)


def _readable(space: Space, one: Side, number: int, kinds: dict[int, str], out: Affine) -> Side:
    """An operand as kernels read it: a copy where elements of a head do not lie side by side."""
    if _is_readable(space, one, number, kinds): return one
    def by(stride: Callable[[int], int], *names: str) -> list[int]:
        return sorted((r for r in kinds if kinds[r] in names), key=stride, reverse=True)
    def result(r: int) -> int: return out.strides.get(r, 0)
    def own(r: int) -> int: return one.lies.strides.get(r, 0)
    order = [*by(result, "batch", "group"), *by(own, "rows", "keys"), *by(own, "d_v" if number == V else "d")]
    copy = pack_side(space, one, order)
    name = "qkv"[number]
    if copy is None:
        raise Unsupported(f"{name} has no strides along its heads, and is not made of whole ranges")
    used = 1
    for r, kind in kinds.items():
        if kind in (("keys",) if number == Q else ("rows", "group")): used *= largest(space.extents[r])
    if used < COPY_REUSED:
        raise Unsupported(f"{name} would be copied, and each row of it is used {used} times, "
                          f"not {COPY_REUSED}")
    if not _is_readable(space, copy, number, kinds):
        raise Unsupported(f"{name} has no strides along its heads")
    return copy


def _is_readable(space: Space, one: Side, number: int, kinds: dict[int, str]) -> bool:
    strides, pitch = one.lies.strides, 1
    if any(stride < 0 for stride in strides.values()): return False
    heads = [r for r in kinds if kinds[r] == ("d_v" if number == V else "d")]
    for r in sorted(heads, key=lambda r: strides.get(r, 0)):
        if strides.get(r) != pitch: return False
        pitch *= largest(space.extents[r])
    if number == Q: return True
    keys = [Dim(space.extents[r], (strides.get(r, 0),)) for r in kinds if kinds[r] == "keys"]
    return len(merge_dims(keys, (0,))) < 2


def _group_dims(space: Space, sides: tuple[Side, Side, Side], out: Affine, more: Sequence[Affine],
             kinds: dict[int, str]) -> Dims:
    indexed = [*(one.lies for one in sides), out, *more]
    none = Dim(1, (0,) * len(indexed))

    def of(kind: str, by: int, most: int = 1) -> list[Dim]:
        dims = [Dim(space.extents[r], tuple(index.strides.get(r, 0) for index in indexed))
                for r in kinds if kinds[r] == kind]
        found = merge_dims(dims, (by,))
        if len(found) > most: raise Unsupported(f"{kind} in {len(found)} dimensions, not {most}")
        return found or [none]

    group, batch = of("group", OUT, 3), [dim for dim in of("batch", OUT, 3) if dim is not none]
    # only the innermost of a key head's query heads are its group; the others are batch with stride 0
    batch = sorted(batch + group[:-1], key=lambda dim: -dim.strides[OUT])
    if len(batch) > 2:
        if group[-1] is not none or any(batch[-1].strides[i] for i in (K, V)):
            raise Unsupported(f"{len(batch)} dimensions of batch, at most 2")
        group = [batch.pop()]
    batch = [none] * (2 - len(batch)) + batch
    dims = Dims(*sides, of("rows", OUT)[0], of("keys", K)[0], of("d", Q)[0], of("d_v", OUT)[0],
                (batch[0], batch[1], group[-1]))
    _check(dims)
    return dims


def _check(dims: Dims) -> None:
    if any(stride < 0 for dim in (dims.rows, dims.keys, *dims.batch) for stride in dim.strides[:MORE]):
        raise Unsupported("a flipped dimension")
    if largest(dims.keys.extent) == 1: raise Unsupported("one key")
