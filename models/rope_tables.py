"""Rope tables on a device, of networks whose layers share some."""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from .paged import RopeTables
from .rope import RopeConfig, tables


def rope_tables(ropes: tuple[RopeConfig, ...], rows: int, positions: int, dtype: DType,
                device: str | None) -> tuple[RopeTables, ...]:
    """Cosines and sines of each rope, (rows, dim/2), rounded to `dtype`, for sequences of up to `positions`
    tokens."""
    made = [tuple(Tensor(t, device=device).cast(dtype).contiguous() for t in tables(rope, rows, positions))
            for rope in ropes]
    if made: Tensor.realize(*(each for pair in made for each in pair))
    return tuple((cos, sin) for cos, sin in made)
