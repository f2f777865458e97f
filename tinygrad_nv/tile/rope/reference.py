"""Rotary positions in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.reference import Argument, Given, Place, compute_dtype, dense, gather, round_to
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec


def arguments(spec: RopeSpec) -> tuple[Argument, ...]:
    """q, k, v, qkv, cos, sin; of a gradient qkv, q, k, v, cos, sin."""
    gradient, lies = isinstance(spec, RopeGradientSpec), spec.angles
    heads = [Argument(name, spec.dtype_of(name), (dense(spec.batch, count, spec.tokens, spec.d),),
                      "in" if gradient else "out")
             for name, count in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads))]
    both = Argument("qkv", spec.dtype, (dense(spec.batch, spec.tokens, spec.width),),
                    "out" if gradient else "in")
    angles = Place(lies.offset, (spec.batch, spec.tokens, spec.half), (lies.batch, lies.row, 1))
    made = [both, *heads] if gradient else [*heads, both]
    return *made, *(Argument(name, lies.dtype, (angles,)) for name in ("cos", "sin"))


def reference(spec: RopeSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """q, k and v, or the gradient of qkv."""
    wide = compute_dtype(dtypes.float32, exact)
    x = {each.name: gather(given[each.name], each.places[0]).cast(wide) for each in arguments(spec)
         if each.role == "in"}
    cos, sin = (x[name].unsqueeze(1) for name in ("cos", "sin"))

    def finish(made: Tensor) -> Tensor: return made if exact else round_to(made, spec.dtype)
    if not isinstance(spec, RopeGradientSpec):
        return tuple(finish(each) for each in rotate_qkv(x["qkv"], cos, sin, spec.heads, spec.kv_heads))
    q = x["q"].cast(spec.dtype).cast(wide) if spec.wide_q else x["q"]
    return finish(derive((q, x["k"], x["v"]), cos, sin)),


def rotate_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int,
            kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, T, D) of q|k|v (B, T, …), with angles (B or 1, 1, T, half)."""
    B, T, width = qkv.shape
    d = width // (heads + 2 * kv_heads)
    q, k, v = qkv.reshape(B, T, -1, d).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
    return rotate_head(q, cos, sin), rotate_head(k, cos, sin), v


def derive(grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of q|k|v, from those of q, k and v."""
    q, k, v = grads
    made = Tensor.cat(rotate_head(q, cos, -sin), rotate_head(k, cos, -sin), v, dim=1).transpose(1, 2)
    return made.reshape(*made.shape[:2], -1)


def rotate_head(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) rotated."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    parts = [low * cos - high * sin, high * cos + low * sin, *([rest] if rest.shape[-1] else [])]
    return parts[0].cat(*parts[1:], dim=-1)
