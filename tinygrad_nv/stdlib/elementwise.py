"""Rotary embeddings and Adam's update, in the tile language."""
from __future__ import annotations

from typing import Any

from tinygrad import Tensor

from tinygrad_nv import tile
from tinygrad_nv.language.decorator import kernel
from tinygrad_nv.shapes import KTile, OTile
from tinygrad_nv.tile.language.elements import cdiv
from tinygrad_nv.tile.language.names import f32
from tinygrad_nv.tile.language.schedule import TileSchedule


@kernel.schedule(TileSchedule(block=(32, 64), warps=4))
def rotate_halves(x: KTile["B", "H", "S", "D"], cos: KTile["S", "D//2", f32], sin: KTile["S", "D//2", f32],
            out: OTile["B", "H", "S", "D", f32], *, sign: int) -> None:
    """Both halves of the last axis, turned by each position's angles; `sign` -1 turns back."""
    T = tile.context()
    half = x.shape[-1] // 2
    first, second = tile.block(0, half), tile.block(half, half)
    a, b = (tile.cast(tile.load(x, T.m, each), f32) for each in (first, second))
    c, s = cos[T.m, first], sin[T.m, first] * float(sign)
    tile.store(out, a * c - b * s, T.m, first)
    tile.store(out, b * c + a * s, T.m, second)


@rotate_halves.defvjp
def _rotate_halves_vjp(inputs: Any, outputs: Any, gradients: Any, *, sign: int) -> Any:
    x, cos, sin = inputs
    return rotate_halves(gradients[0].contiguous(), cos, sin, sign=-sign).cast(x.dtype), None, None


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, S, D) with the halves of its last axis rotated by the angles whose cos and sin are (S, D /
    2), as
    Llama does (Su et al. 2021, RoFormer). In x's dtype; differentiable in x."""
    made: Tensor = rotate_halves(x, cos.float(), sin.float(), sign=1).cast(x.dtype)
    return made


@kernel(grid=lambda N, BM: (cdiv(N, BM),))
def adam_step(p: KTile["N"], g: KTile["N"], m: KTile["N", f32], v: KTile["N", f32], lr: KTile["1", f32],
              c1: KTile["1", f32], c2: KTile["1", f32], new_p: OTile["N", f32], new_m: OTile["N", f32],
              new_v: OTile["N", f32], *, beta1: float, beta2: float, eps: float, weight_decay: float,
              BM: int = 1024) -> None:
    """One step of AdamW."""
    at = tile.block(tile.program_id(0) * BM, BM)
    grad, old = tile.cast(g[at], f32), tile.cast(p[at], f32)
    first = m[at] * beta1 + grad * (1 - beta1)
    second = v[at] * beta2 + grad * grad * (1 - beta2)
    rate, up, down = (tile.load(each, 0) for each in (lr, c1, c2))
    moved = (first * up) / (tile.sqrt(second * down) + eps)
    new_p[at] = old - rate * (moved + old * weight_decay)
    new_m[at], new_v[at] = first, second


def fused_adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float | Tensor, step: int | Tensor,
               beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
               weight_decay: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's new parameter, and its two moments (float32), of p, g, m and v of one shape; `step` counts
    from 1.
    lr and step may be Tensors of one element, which a captured step changes (Loshchilov and Hutter 2019,
    "Decoupled Weight Decay Regularization")."""
    count = step if isinstance(step, Tensor) else Tensor([float(step)], device=p.device)
    rate = lr if isinstance(lr, Tensor) else Tensor([float(lr)], device=p.device)
    c1, c2 = (1 / (1 - (Tensor(beta, device=p.device).log() * count.float()).exp())
              for beta in (beta1, beta2))
    flat = [each.reshape(-1) for each in (p, g, m, v)]
    made = adam_step(*flat, *(each.float().reshape(1) for each in (rate, c1, c2)), beta1=beta1, beta2=beta2,
                     eps=eps, weight_decay=weight_decay)
    return made[0].cast(p.dtype).reshape(p.shape), made[1].reshape(p.shape), made[2].reshape(p.shape)
