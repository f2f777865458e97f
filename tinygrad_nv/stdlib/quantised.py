"""A matmul with an int8 matrix, in the tile language.

Protocol: w (N, K) int8 stands for w · scale, scale (N) float32: the symmetric scheme of `quantise_int8`. x's
elements meet those of w as they are; the scale multiplies the sums once.
"""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv import tile
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.tile.language.names import f32, int8
from tinygrad_nv.tile.language.schedule import TileSchedule


@kernel.schedule(TileSchedule(block=(64, 64), k=64, warps=4, stages=3))
def qint8_rows(x: KTile["M", "K"], w: KTile["N", "K", int8], scale: KTile["N", f32]) -> OTile["M", "N", f32]:
    """x · (w · scale)ᵀ."""
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(x.shape, T.k):
        acc = tile.dot(x[T.m, k], tile.cast(w[T.n, k], x.dtype).T, acc)
    return acc * scale[T.n][None, :]


@qint8_rows.defvjp
def _vjp(inputs: Any, outputs: Any, gradients: Any) -> Any:
    x, w, scale = inputs
    grad = gradients[0]
    return (grad * scale).matmul(w.cast(grad.dtype)).cast(x.dtype), None, None


def matmul_qint8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """x (…, K) times the transposed matrix that w (N, K) int8 and scale (N) stand for: (…, N) in x's dtype.
    Differentiable in x."""
    rows = x.reshape(-1, x.shape[-1])
    made: Tensor = qint8_rows(rows, w, scale.float()).cast(x.dtype).reshape(*x.shape[:-1], w.shape[0])
    return made


def quantise_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """w (N, K) as int8 and a scale (N) for each row: the largest of a row becomes 127."""
    scale = (w.float().abs().max(1) / 127).maximum(1e-30)
    return (w.float() / scale.reshape(-1, 1)).round().clamp(-127, 127).cast(dtypes.int8), scale
