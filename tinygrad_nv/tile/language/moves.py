"""Movement of tiles, as functions."""
from __future__ import annotations

from typing import Any

from tinygrad_nv.tile.language.values import Tile


def transpose(x: Tile, *axes: int) -> Tile:
    """Axes in another order; without them the last two change places."""
    return x.transpose(*axes)


def reshape(x: Tile, *shape: Any) -> Tile:
    """The same elements in row-major order."""
    return x.reshape(*shape)


def broadcast_to(x: Tile, *shape: Any) -> Tile:
    """Repeated along axes of extent 1 and along new leading ones."""
    return x.broadcast_to(*shape)


def expand_dims(x: Tile, axis: int) -> Tile:
    """A new axis of extent 1 at `axis`."""
    at = axis + x.ndim + 1 if axis < 0 else axis
    return x.reshape(*x.shape[:at], 1, *x.shape[at:])
