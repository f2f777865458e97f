"""Attention of q, k and v of 8 bits (e4m3) with scales, as a function known by name.

Protocol. `fp8_attention(q, k, v, q_scale, k_scale, v_scale)` is a FUNCTION whose body is plain tinygrad, in
float32: the reference, and what runs wherever no kernel of ours does; on sm_90a and on CPUs it is one kernel,
which rounds weights to e4m3 as tile/attention/spec.py says. For query head h, whose key head is h // (H /
H_kv):

    s[r, c]   = scale · Σ_d q_scale[r] q[r, d] · k_scale[c] k[c, d]
    out[r, d] = Σ_c softmax(s)[r, c] · v_scale[c] v[c, d]

What is quantised by `amax / 448` of blocks of rows, x ≈ (x / scale).cast(fp8e4m3) · scale, has scales
[B, H, ceil(S / block)]; extents of 1 are the same for all batches, heads or rows. There is no gradient.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.decode.paged import check_kind, check_shape
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.attention.spec import FULL, RESULTS, SCALED, AttentionSpec, Band, Rows, RowScales
from tinygrad_nv.tile.expression import Sum

NAME = "attention"
ALIGNED_BYTES = 16  # of what TMA reads


@dataclass(frozen=True)
class Fp8Attention:
    """An attention of 8 bits, as far as its tensors do not say it."""
    block: int
    causal: bool
    scale: float
    dtype: DType


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, *,
                  block: int = 128, causal: bool = False, scale: float | None = None,
                  dtype: DType = dtypes.bfloat16) -> Tensor:
    """softmax(scale · q kᵀ) v of what q, k and v stand for: [B, H, S_q, D_v] in `dtype`.

    q [B, H, S_q, D], k [B, H_kv, S_kv, D] and v [B, H_kv, S_kv, D_v] of fp8e4m3; scales float32, at least 0,
    [B or 1, H or 1, 1 or one for each `block` rows]. `causal`: the last row sees the last column. `scale` is
    1/√D by default. Raises `SpecError`."""
    check_shape("q", q, "B, H, S_q, D", (None,) * 4)
    check_shape("k", k, "B, H_kv, S_kv, D", (q.shape[0], None, None, q.shape[3]))
    check_shape("v", v, "B, H_kv, S_kv, D_v", (*k.shape[:3], None))
    for name, x in (("q", q), ("k", k), ("v", v)): check_kind(name, x.dtype, (SCALED,))
    if q.shape[1] % k.shape[1]:
        raise SpecError(f"{q.shape[1]} query heads over {k.shape[1]} key heads", "a multiple: each key head "
                        "serves as many query heads", "repeat key heads, or correct the reshape of q or of k")
    if block < 1: raise SpecError(f"block={block}", "at least 1 row")
    for name, x, of in (("q_scale", q_scale, q), ("k_scale", k_scale, k), ("v_scale", v_scale, v)):
        _check_scale(name, x, of, block)
    if causal and q.shape[2] > k.shape[2]:
        raise SpecError(f"{q.shape[2]} rows over {k.shape[2]} columns, causal", "no more rows than columns")
    check_kind("dtype", dtype, RESULTS)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not isfinite(scale): raise SpecError(f"scale={scale}", "a finite number")
    return call(Fp8Attention(block, causal, scale, dtype), attend_fp8, q, k, v, q_scale, k_scale, v_scale)[0]


def _check_scale(name: str, x: Tensor, of: Tensor, block: int) -> None:
    blocks = -(-of.shape[2] // block)
    most = (of.shape[0], of.shape[1], blocks)
    if len(x.shape) != 3 or any(have not in (1, want) for have, want in zip(x.shape, most, strict=True)):
        raise SpecError(f"{name} of shape {tuple(x.shape)}", f"{most}, or 1 in place of any of them",
                        f"a scale for each {block} rows, for each head, or for all")
    check_kind(name, x.dtype, (dtypes.float32,))


def attend_fp8(what: Fp8Attention, q: Tensor, k: Tensor, v: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
    """The attention in plain tinygrad."""
    (batch, heads, s_q, d), (_, kv_heads, s_kv, d_v) = q.shape, v.shape
    pairs = zip((q, k, v), scales, strict=True)
    q, k, v = (x.float() * _worth(what, scale, x.shape[2]) for x, scale in pairs)
    group = heads // kv_heads
    s = q.reshape(batch, kv_heads, group, s_q, d) @ k.unsqueeze(2).transpose(-1, -2) * what.scale
    if what.causal:
        away = Tensor.arange(s_kv).reshape(1, -1) - Tensor.arange(s_q).reshape(-1, 1)
        s = (away <= s_kv - s_q).where(s, -float("inf"))
    return (s.softmax(-1) @ v.unsqueeze(2)).reshape(batch, heads, s_q, d_v).cast(what.dtype),


def _worth(what: Fp8Attention, scale: Tensor, rows: int) -> Tensor:
    """A scale for each row: [B or 1, H or 1, rows or 1, 1]."""
    if scale.shape[2] == 1: return scale.unsqueeze(-1)
    each = scale.unsqueeze(-1).expand(*scale.shape, what.block)
    return each.reshape(*scale.shape[:2], -1)[:, :, :rows].unsqueeze(-1)


# **** a kernel ****

def lower_fp8(what: Fp8Attention, target: Target, *arguments: UOp) -> tuple[UOp, ...]:
    """Returns the result by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    read, scales = [_read(x) for x in arguments[:3]], [lay_out(x) for x in arguments[3:]]
    shape = (*map(int, arguments[0].shape[:3]), int(arguments[2].shape[3]))
    spec = _spec(what, read, scales, arguments)
    inputs = [each.storage for each in (*read, *scales)]
    return choose(spec, target).call(inputs[0].device, [program.Output(shape, what.dtype)], inputs,
                                       rows=spec.s_q, flops=spec.flops)


def _spec(what: Fp8Attention, read: list[Laid], scales: list[Laid],
          arguments: tuple[UOp, ...]) -> AttentionSpec:
    batch, heads, s_q, d = map(int, arguments[0].shape)
    _, kv_heads, s_kv, d_v = map(int, arguments[2].shape)
    group = heads // kv_heads

    def along(strides: tuple[int, ...], queries: bool) -> tuple[int, int, int]:
        return (strides[0], group * strides[1], strides[1]) if queries else (strides[0], strides[1], 0)

    q, k, v = (Rows(x.dtype, x.strides[2], along(x.strides, i == 0), x.offset) for i, x in enumerate(read))
    q_scale, k_scale, v_scale = (RowScales(what.block, x.strides[2], along(x.strides, i == 0), x.offset)
                                 for i, x in enumerate(scales))
    out = Rows(what.dtype, d_v, (heads * s_q * d_v, group * s_q * d_v, s_q * d_v))
    return AttentionSpec(s_q, s_kv, d, d_v, q, k, v, out, (batch, kv_heads, group), Sum() * what.scale,
                         Band(None, 0) if what.causal else FULL, s_kv - s_q if what.causal else 0,
                         scales=(q_scale, k_scale, v_scale))


def _read(x: UOp) -> Laid:
    """An operand where it lies, or copied where TMA could not read it there."""
    found = lay_out(x)
    *outer, d = found.strides
    aligned = all(number % ALIGNED_BYTES == 0 for number in (*outer, found.offset))
    return found if d == 1 and aligned else copy_dense(x)


lower(Fp8Attention, NAME, lower_fp8, "NV_ATTENTION")
