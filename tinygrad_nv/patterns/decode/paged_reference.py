"""Attention over keys and values in pages, in plain tinygrad: as paged.py defines it, on any device.

Protocol: `attended(what, q, k_pages, v_pages, table, lengths, *scales, *sinks)`. Pages are gathered for each
request up to the table's extent, whatever its length. What no row sees is selected away, not multiplied by 0.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinygrad import Tensor

from tinygrad_nv.tile.decode.reference import weigh_values

T = TypeVar("T")


@dataclass(frozen=True)
class PagedAttention:
    """A paged attention, as far as its tensors do not say it."""
    scale: float
    window: int | None = None
    softcap: float | None = None
    chunked: bool = False
    sinks: bool = False


def attend_paged(what: PagedAttention, q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor,
             lengths: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Returns the attention: softmax in float32."""
    (batch, rows, heads, d), (scales, sinks) = q.shape, apart(what, more)
    kv_heads, longest = k_pages.shape[2], table.shape[1] * k_pages.shape[1]
    k, v = (gather_pages(pages, table) for pages in (k_pages, v_pages))
    visible = visible_keys(what, lengths, rows, longest).reshape(batch, 1, 1, rows, longest)
    grouped = q.float().reshape(batch, rows, kv_heads, heads // kv_heads, d).permute(0, 2, 3, 1, 4)
    s = (grouped @ k.float().unsqueeze(2).transpose(-1, -2)) * what.scale
    if scales: s = s * spread(scales[0], table, k_pages.shape[1])
    if what.softcap is not None: s = (s / what.softcap).tanh() * what.softcap
    scale = spread(scales[1], table, k_pages.shape[1]) if scales else None
    if sinks is not None: sinks = sinks.reshape(1, kv_heads, -1, 1, 1)
    out = weigh_values(s, visible, v.float(), q.dtype, scale, sinks)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, v.shape[-1]).cast(q.dtype).contiguous(),


def apart(what: PagedAttention, more: Sequence[T]) -> tuple[Sequence[T], T | None]:
    """The scales, none or two, and the sinks."""
    return (more[:-1], more[-1]) if what.sinks else (more, None)


def visible_keys(what: PagedAttention, lengths: Tensor, rows: int, longest: int) -> Tensor:
    """Returns which keys each row sees: [B, S_q, keys]."""
    place = lengths.reshape(-1, 1, 1) - rows + Tensor.arange(rows).reshape(1, -1, 1)
    key = Tensor.arange(longest).reshape(1, 1, -1)
    if what.window is None: return key <= place
    if what.chunked: return (key <= place) & (key >= place - place % what.window)
    return (key <= place) & (key > place - what.window)


def gather_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Keys or values of each request, in order: [B, H_kv, keys, D]."""
    batch, (_, size, heads, d) = table.shape[0], pages.shape
    return pages[table].reshape(batch, table.shape[1] * size, heads, d).transpose(1, 2).contiguous()


def spread(scale: Tensor, table: Tensor, size: int) -> Tensor:
    """The scale of each key, [B, H_kv, 1, 1, keys]."""
    each = scale[table].transpose(1, 2)
    return each.unsqueeze(-1).expand(*each.shape, size).reshape(*each.shape[:2], 1, 1, -1).contiguous()
