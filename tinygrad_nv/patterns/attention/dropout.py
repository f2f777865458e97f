"""Dropout of an attention's weights in plain tinygrad: the elements that kernels drop
(tile/attention/dropout.py)."""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.attention.dropout import SPAN, philox
from tinygrad_nv.tile.attention.spec import KEEP_ALL


def draw_seed(device: str | tuple[str, ...] | None) -> Tensor:
    """A new seed, uint32 [2], by tinygrad's generator: another one in every run of a captured graph."""
    halves = Tensor.randint(2, 2, high=1 << 16, device=device).cast(dtypes.uint32)
    return (halves[0] * (1 << 16) + halves[1]).contiguous()


def keep(seed: Tensor, shape: tuple[int, ...], kept: int) -> Tensor:
    """Returns the factors of weights of a shape [..., rows, columns]: 256 / kept, or 0 where they are
    dropped; float32."""
    *batch, rows, columns = shape
    matrices, groups = 1, -(-columns // SPAN)
    for extent in batch: matrices *= extent

    def along(axis: int, extent: int) -> Tensor:
        shape = [extent if i == axis else 1 for i in range(4)]
        return Tensor.arange(extent).cast(dtypes.uint64).reshape(shape)
    call = along(2, groups) * 4 + along(3, 4)
    key = seed.cast(dtypes.uint64)
    words = philox((along(1, rows), call, along(0, matrices), along(1, rows) * 0), (key[0], key[1]))
    wide = [word.expand(matrices, rows, groups, 4).contiguous() for word in words]
    # byte 4w + 2b + e of call q is of column 16w + 8b + 2q + e
    stacked = [[[(word >> (16 * b + 8 * e)) & 0xFF for e in range(2)] for b in range(2)] for word in wide]
    found = Tensor.stack(*(Tensor.stack(*(Tensor.stack(*pair, dim=-1) for pair in each), dim=3)
                           for each in stacked), dim=3)
    found = found.reshape(matrices, rows, groups * SPAN)[:, :, :columns].reshape(shape)
    # a kernel of its own: what uses it would compute it for each of its uses
    return (found < kept).contiguous().where(KEEP_ALL / kept, 0.0).cast(dtypes.float32)
