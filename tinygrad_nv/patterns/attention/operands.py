"""The tensors of an attention as [B, H, S, D], from those that a user of torch or tinygrad gives.

Protocol. Query, key and value are [..., H, S, D] with at least two dimensions; those before S are broadcast.
With `gqa` there are whole multiples of query heads for each key head, without it as many, or one. A mask is
broadcast to [..., H, S_q, S_kv]. `check` raises `SpecError` for what has no attention at all.
`arrange_operands` gives the tensors, with None for what kernels of ours have no way for: extents that are not
numbers, a mask that enlarges the result, dtypes that differ. """
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.helpers import all_int

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operands:
    """q [B, H, S_q, D], k [B, H_kv, S_kv, D], v [B, H_kv, S_kv, D_v] and the mask [1 or B, 1 or H, 1 or S_q,
    1 or S_kv]; `shape` is the result's for the user."""
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    shape: Shape


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, gqa: bool) -> None:
    """Raises `SpecError` where there is no attention of these tensors."""
    for name, one in (("query", q), ("key", k), ("value", v)):
        if one.ndim < 2: raise SpecError(f"a {name} of shape {one.shape}", "at least [S, D]")
        if not dtypes.is_float(one.dtype):
            raise SpecError(f"a {name} of {short(one.dtype)}", "floats", f"cast the {name} to a float dtype")
    if not all_int((*q.shape, *k.shape, *v.shape)): return
    if q.shape[-1] != k.shape[-1]:
        raise SpecError(f"query heads of {q.shape[-1]} elements, key heads of {k.shape[-1]}", "equal widths",
                        "query and key are [..., H, S, D] with one D; only value may have another")
    if k.shape[-2] != v.shape[-2]:
        raise SpecError(f"{k.shape[-2]} keys and {v.shape[-2]} values", "as many values as keys",
                        "key is [..., H_kv, S_kv, D], value [..., H_kv, S_kv, D_v]")
    _check_heads(_heads(q), _heads(k), _heads(v), gqa)
    leads = [one.shape[:-3] for one in (q, k, v)]
    if _broadcast(*leads) is None:
        raise SpecError(f"batches of {' and '.join(map(str, leads))}", "batches that broadcast to each other")
    if mask is not None: _check_mask(q, k, mask)


def _check_heads(h: int, h_k: int, h_v: int, gqa: bool) -> None:
    if h_k != h_v and 1 not in (h_k, h_v):
        raise SpecError(f"{h_k} heads of keys and {h_v} of values", "as many, or one")
    h_kv = max(h_k, h_v)
    if h == h_kv or 1 in (h, h_kv): return
    if not gqa:
        hint = "pass enable_gqa=True" if h % h_kv == 0 else "correct the reshape of query or key"
        raise SpecError(f"{h} query heads and {h_kv} key heads", "as many, or one", hint)
    if h % h_kv:
        raise SpecError(f"{h} query heads over {h_kv} key heads", "a multiple: each key head serves as many "
                        "query heads", "correct the reshape of query or key")


def _check_mask(q: Tensor, k: Tensor, mask: Tensor) -> None:
    if not (mask.dtype == dtypes.bool or dtypes.is_float(mask.dtype)):
        raise SpecError(f"a mask of {short(mask.dtype)}", "bool (true: seen) or floats (added to the scores)",
                        "attn_mask.bool()")
    if all_int(mask.shape) and _broadcast(mask.shape[-2:], (q.shape[-2], k.shape[-2])) is None:
        raise SpecError(f"a mask of {mask.shape}", f"[..., {q.shape[-2]}, {k.shape[-2]}], or 1 where it is "
                        "broadcast")


def arrange_operands(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Operands | None:
    """Returns checked tensors as kernels have them; None where they have not."""
    given = [q, k, v] if mask is None else [q, k, v, mask]
    if not all(all_int(one.shape) and 0 not in one.shape for one in given): return None
    lead = _broadcast(*(one.shape[:-3] for one in (q, k, v)))
    h_kv = max(_heads(k), _heads(v))
    heads = max(_heads(q), h_kv)
    s_q, s_kv, rank = q.shape[-2], k.shape[-2], max(one.ndim for one in (q, k, v))
    assert lead is not None
    result = (*lead, heads, s_q, v.shape[-1])[-rank:]
    whole = (*lead, heads, s_q, s_kv)
    if mask is not None:
        if mask.ndim > rank or _broadcast(mask.shape, whole) != whole: return None
        # of Python's numbers alone, as `seen.where(0, -inf)` is, it has no dtype that is stored
        if mask.dtype in dtypes.weaks: mask = mask.cast(dtypes.float32)
        mask = _flat(mask, lead, whole[-3:], keep=True)
    return Operands(_flat(q, lead, (heads, *q.shape[-2:])), _flat(k, lead, (h_kv, *k.shape[-2:])),
                    _flat(v, lead, (h_kv, *v.shape[-2:])), mask, result)


def _flat(x: Tensor, lead: Shape, inner: Shape, keep: bool = False) -> Tensor:
    """x with one dimension of batch, broadcast; with `keep`, ones stay ones where they can."""
    shape = (1,) * (len(lead) + 3 - x.ndim) + x.shape
    if keep:
        inner = shape[-3:]
        if prod(shape[:-3]) == 1: lead = shape[:-3]
    wanted = (*lead, *inner)
    if x.shape != wanted: x = x.reshape(shape).expand(wanted)
    if len(lead) == 1: return x
    # of several dimensions a kernel has one stride only if they lie as one
    if 1 < prod(shape[:-3]) < prod(lead): x = x.contiguous()
    return x.reshape(prod(lead), *inner)


def _heads(x: Tensor) -> int: return int(x.shape[-3]) if x.ndim > 2 else 1


def _broadcast(*shapes: Shape) -> Shape | None:
    """The shape that shapes are broadcast to."""
    rank = max(map(len, shapes))
    wide = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    made = tuple(max(extents) for extents in zip(*wide, strict=True))
    fits = all(extent in (1, most) for shape in wide for extent, most in zip(shape, made, strict=True))
    return made if fits else None
