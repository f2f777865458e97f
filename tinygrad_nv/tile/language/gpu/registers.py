"""Registers whose elements lie outside of a tile."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.tile.language.gpu.layout import Layout, extents


@lru_cache(4096)
def absent(layout: Layout, shape: tuple[int, ...]) -> tuple[bool, ...]:
    """Whether what each register holds is outside, in all threads."""
    of = extents(shape)
    return tuple(not of.inside(index) for index in layout.indices)


@lru_cache(4096)
def axes_with_padding(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes whose extent is no power of two."""
    of = extents(shape)
    return tuple(axis for axis, extent in enumerate(shape) if extent != 1 << of.widths[axis])
