"""Places of the matrices of a group in a stack."""
from __future__ import annotations

from collections.abc import Mapping
from math import prod

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec


def tiles(spec: QuantGroupedSpec) -> int:
    """Tiles of 16 columns of a matrix."""
    return -(-spec.grouped.columns // TILE)


def of_group(kb: Kernel, spec: QuantGroupedSpec, pointers: Mapping[str, Value], group: Value,
             half: int = 0) -> dict[str, Value]:
    """Returns where the buffers of a group's matrix begin (u64), with an activation of one of two."""
    made = {}
    for name, buffer in spec.buffers.items():
        nbytes = tiles(spec) * prod(buffer.shape[1:]) * buffer.dtype.itemsize
        at = advance(kb, pointers[name], group, spec.grouped.halves * nbytes)
        made[name] = at + half * nbytes if half else at
    return made
