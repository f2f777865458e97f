"""A decode attention in plain tinygrad (tile/reference.py).

Protocol: a table names one of batch · pages pages. A length that is no memory is the longest; a spec whose
`length` is "memory" instead has others, of all kinds of caches. What no row sees counts as 0.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.decode.spec import DecodeSpec, Pages, Scales
from tinygrad_nv.tile.reference import (
    Argument,
    Given,
    Place,
    axes,
    compute_dtype,
    dense,
    elements,
    evaluate,
    gather,
    index_of,
    parameters,
    round_to,
)


def arguments(spec: DecodeSpec) -> tuple[Argument, ...]:
    """out, q, k, v, table, lengths, scale_k, scale_v, sinks, x0, x1, …: those that there are; values of
    latents are in the memory of keys."""
    stored, heads = spec.batch * spec.pages, (spec.batch, spec.heads, spec.group, spec.s_q)
    q, out = (Argument(name, x.dtype, (Place(x.offset, (*heads, d), (*x.batch, x.row, 1)),))
              for name, x, d in (("q", spec.q, spec.d), ("out", spec.out, spec.d_v)))
    made = [replace(out, role="out"), q]
    made += [Argument(name, x.dtype, (Place(x.offset, (stored, spec.page_size, spec.heads, d),
                                            (x.page, x.token, x.head, 1)),))
             for name, x, d in (("k", spec.k, spec.d), ("v", spec.v, spec.d_v))
             if not (spec.latent and name == "v")]
    if spec.table: made.append(Argument("table", dtypes.int32, (dense(spec.batch, spec.pages),),
                                        values=range(stored), usual=range(stored)))
    if spec.length == "memory":
        made.append(Argument("lengths", dtypes.int32, (dense(spec.batch),), values=range(spec.longest + 1),
                             usual=range(spec.longest, spec.longest + 1)))
    made += [Argument(name, dtypes.float32, (Place(x.offset, (stored, spec.heads), (x.page, x.head)),))
             for name, x in (("scale_k", spec.k_scale), ("scale_v", spec.v_scale)) if x is not None]
    if spec.sinks: made.append(Argument("sinks", dtypes.float32, (dense(spec.heads, spec.group),)))
    return *made, *parameters((*heads, spec.longest), spec.score)


def reference(spec: DecodeSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[batch, heads, group, s_q, d_v]."""
    extents = (spec.batch, spec.heads, spec.group, spec.s_q, spec.longest)
    known = {each.name: each.places[0] for each in arguments(spec)}
    length = gather(given["lengths"], known["lengths"]) if spec.length == "memory" else \
        Tensor.full((spec.batch,), spec.longest, dtype=dtypes.int32)
    length = length.reshape(-1, 1, 1, 1, 1)
    *_, row, key = axes(extents)
    start = length - spec.s_q
    place = start + row if spec.causal else length - 1
    seen = (key <= place).expand(spec.batch, 1, 1, spec.s_q, spec.longest)
    if spec.window is not None:
        seen = seen & (key >= place - place % spec.window if spec.chunked else key > place - spec.window)
    there = seen.any(-2, keepdim=True).transpose(-1, -2).reshape(spec.batch, 1, -1)
    k, k_scale = _rows(spec, given, "k", spec.k, spec.k_scale, there, exact)
    v, v_scale = _rows(spec, given, "v", spec.v, spec.v_scale, there, exact)
    q = gather(given["q"], known["q"]).cast(k.dtype).contiguous()
    sums = q @ (k * k_scale).contiguous().unsqueeze(2).transpose(-1, -2)
    s = evaluate(spec.score, extents, [sums.contiguous()], given, exact, {"m": place, "start": start})
    scale = v_scale.reshape(spec.batch, -1, 1, 1, spec.longest) if spec.is_quantised else None
    sinks = given["sinks"].reshape(1, spec.heads, spec.group, 1, 1) if spec.sinks else None
    return weigh_values(s, seen, v, None if exact else spec.q.dtype, scale, sinks),


def weigh_values(s: Tensor, seen: Tensor, v: Tensor, kind: DType | None, scale: Tensor | None = None,
             sinks: Tensor | None = None) -> Tensor:
    """Values [B, H, keys, D] weighted by the softmax of what is seen of scores [B, H, G, S, keys], among
    which `sinks` [1, H, G, 1, 1] are one more. Weights are multiplied by `scale` and then rounded, if to a
    kind."""
    s = seen.where(s, -float("inf")).contiguous()
    top = s.max(-1, keepdim=True)
    if sinks is not None: top = top.maximum(sinks)
    top = (top == -float("inf")).where(0, top)
    e = (s - top).exp()
    total = e.sum(-1, keepdim=True)
    if sinks is not None: total = total + (sinks - top).exp()
    p = e / (total == 0).where(1, total)
    if scale is not None: p = seen.where(p * scale, 0)
    # what no row sees may be NaN, also beside a weight of 0
    there = seen.any(-2, keepdim=True).permute(0, 1, 2, 4, 3).squeeze(2)
    if kind is not None: p = round_to(p, kind).cast(s.dtype)
    return p.contiguous() @ there.where(v, 0).unsqueeze(2)


def _rows(spec: DecodeSpec, given: Given, name: str, pages: Pages, scales: Scales | None, there: Tensor,
          exact: bool) -> tuple[Tensor, Tensor]:
    """Keys or values of each request as they are stored, [batch, heads, longest, d], and what they are
    multiplied by, [batch, heads, longest, 1]."""
    b, h, key, e = axes((spec.batch, spec.heads, spec.longest, spec.d if name == "k" else spec.d_v))
    there, wide = there.unsqueeze(-1), compute_dtype(dtypes.float32, exact)
    entry = b * spec.pages + key // spec.page_size
    page = given["table"][entry.flatten()].reshape(entry.shape) if spec.table else entry
    page = there.where(page, 0)
    lies = Place(pages.offset, (), (pages.page, pages.token, pages.head, 1))
    memory = given["k" if spec.latent else name]
    found = elements(memory, index_of(lies, (page, key % spec.page_size, h, e)))
    found = there.where(found.cast(wide), 0).contiguous()
    if scales is None: return found, Tensor.ones(1, dtype=wide)
    at = index_of(Place(scales.offset, (), (scales.page, scales.head)), (page, h))
    return found, there.where(given[f"scale_{name}"][at].cast(wide), 0).contiguous()
