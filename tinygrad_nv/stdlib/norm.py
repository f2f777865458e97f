"""Norms and softmax over the last axis, in the tile language.

Protocol: rows (R, N) of a tensor; a program takes a few whole rows. Statistics are in float32: the mean
first,
then the mean of squares of what is left, so that large constants cancel exactly. Gradients of weights are
sums over rows of one program: no atomics. Formulas: Ba, Kiros and Hinton 2016, "Layer Normalization".
"""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor

from tinygrad_nv import tile
from tinygrad_nv.errors import SpecError
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.tile.language.elements import cdiv
from tinygrad_nv.tile.language.names import f32
from tinygrad_nv.tile.language.schedule import TileSchedule

ROWS = TileSchedule(block=(4, 256), warps=4)


@kernel.schedule(ROWS, grid=lambda R, BM: (cdiv(R, BM),))
def layernorm_rows(x: KTile["R", "N"], weight: KTile["N"], bias: KTile["N"], y: OTile["R", "N", f32],
                   mean: OTile["R", f32], scale: OTile["R", f32], *, eps: float, BM: int) -> None:
    """y in float32, and of each row the mean and 1 / sqrt(variance + eps)."""
    rows, n = tile.block(tile.program_id(0) * BM, BM), x.shape[1]
    value = tile.cast(x[rows, :], f32)
    middle = tile.sum(value, 1) * (1 / n)
    centred = value - middle[:, None]
    factor = tile.rsqrt(tile.sum(centred * centred, 1) * (1 / n) + eps)
    mean[rows], scale[rows] = middle, factor
    y[rows, :] = centred * factor[:, None] * tile.cast(weight[:], f32)[None, :] + tile.cast(bias[:],
                                                                                            f32)[None, :]


@kernel.schedule(ROWS, grid=lambda R, BM: (cdiv(R, BM),))
def layernorm_dx(dy: KTile["R", "N", f32], x: KTile["R", "N"], weight: KTile["N"], mean: KTile["R", f32],
                 scale: KTile["R", f32], dx: OTile["R", "N", f32], *, BM: int) -> None:
    """The gradient of x."""
    rows, n = tile.block(tile.program_id(0) * BM, BM), x.shape[1]
    unit = (tile.cast(x[rows, :], f32) - mean[rows][:, None]) * scale[rows][:, None]
    grad = dy[rows, :] * tile.cast(weight[:], f32)[None, :]
    along = tile.sum(grad * unit, 1) * (1 / n)
    dx[rows, :] = (grad - (tile.sum(grad, 1) * (1 / n))[:, None] - unit * along[:, None]) * scale[rows][:,
                                                                                                        None]


@kernel(grid=lambda N, BN: (cdiv(N, BN),), schedule=TileSchedule(block=(32, 64), warps=4))
def layernorm_dw(dy: KTile["R", "N", f32], x: KTile["R", "N"], mean: KTile["R", f32], scale: KTile["R", f32],
                 dw: OTile["N", f32], db: OTile["N", f32], *, BM: int, BN: int) -> None:
    """The gradients of weight and bias: sums over all rows."""
    columns = tile.block(tile.program_id(0) * BN, BN)
    weights, biases = tile.zeros((BN,), f32), tile.zeros((BN,), f32)
    for rows in tile.range_m(x.shape, BM):
        grad = dy[rows, columns]
        unit = (tile.cast(x[rows, columns], f32) - mean[rows][:, None]) * scale[rows][:, None]
        weights = weights + tile.sum(grad * unit, 0)
        biases = biases + tile.sum(grad, 0)
    dw[columns], db[columns] = weights, biases


@layernorm_rows.defvjp
def _layernorm_vjp(inputs: Any, outputs: Any, gradients: Any, **_: Any) -> Any:
    x, weight, bias = inputs
    _, mean, scale = outputs
    if gradients[0] is None: raise SpecError("a gradient of a layer norm's statistics", "one of its result")
    dy = gradients[0].contiguous()
    dw, db = layernorm_dw(dy, x, mean, scale)
    return layernorm_dx(dy, x, weight, mean, scale).cast(x.dtype), dw.cast(weight.dtype), db.cast(bias.dtype)


def efficient_layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) · weight + bias over the last axis of x (…, N), weight and bias (N);
    in
    x's dtype. Differentiable in all three."""
    rows = x.reshape(-1, x.shape[-1])
    made = layernorm_rows(rows, weight, bias, eps=eps)[0]
    result: Tensor = made.cast(x.dtype).reshape(x.shape)
    return result


@kernel.schedule(ROWS, grid=lambda R, BM: (cdiv(R, BM),))
def softmax_rows(x: KTile["R", "N"], y: OTile["R", "N", f32], *, BM: int) -> None:
    """exp(x - max) / sum of each row."""
    rows = tile.block(tile.program_id(0) * BM, BM)
    y[rows, :] = tile.softmax(tile.cast(x[rows, :], f32), 1)


@kernel.schedule(ROWS, grid=lambda R, BM: (cdiv(R, BM),))
def softmax_dx(y: KTile["R", "N", f32], dy: KTile["R", "N", f32], dx: OTile["R", "N", f32], *,
               BM: int) -> None:
    """The gradient: y (dy - Σ y dy)."""
    rows = tile.block(tile.program_id(0) * BM, BM)
    p, grad = y[rows, :], dy[rows, :]
    dx[rows, :] = p * (grad - tile.sum(p * grad, 1)[:, None])


@softmax_rows.defvjp
def _softmax_vjp(inputs: Any, outputs: Any, gradients: Any, **_: Any) -> Any:
    return softmax_dx(outputs[0], gradients[0].contiguous()).cast(inputs[0].dtype)


def stable_softmax(x: Tensor) -> Tensor:
    """exp(x - max x) / sum over the last axis of x (…, N), in x's dtype: right for all finite x, and for rows
    with -inf beside a finite number. Differentiable."""
    made: Tensor = softmax_rows(x.reshape(-1, x.shape[-1])).cast(x.dtype).reshape(x.shape)
    return made
