"""Rotary positions of whole sequences, as a function known by name, whose gradient is one too.

Protocol. `rotate_heads(qkv, cos, sin, heads, kv_heads)` takes the q|k|v that a matmul gives apart, and
rotates q and k, in one kernel (tile/rope/spec.py). The gradient of q|k|v is one kernel, too, from those that
attention gives, where tinygrad's own code has each element look for its heads. In the graph the results have
4, 5 and 6 dimensions, the first ones of 1: tinygrad gives a gradient function what gradients there are,
without saying of which results. NV_ATTENTION=0 leaves both to tinygrad.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import Laid, copy_dense, lay_out
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.rope import reference
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "rope"
FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class RotatedHeads:
    """q (B, H, T, D), k (1, B, H_kv, T, D) and v (1, 1, B, H_kv, T, D) of q|k|v, cos and sin."""
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class RotatedHeadsGradient:
    """The gradient of q|k|v, from those of q, k and v, (B, H, T, D), cos and sin."""
    heads: int
    kv_heads: int


def rotate_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int,
                  kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), and k and v (B, H_kv, T, D), of q|k|v (B, T, (H + 2 H_kv) D). The first 2 · half
    elements of heads of q and k are rotated, i with i + half (RoFormer, arXiv 2104.09864), by angles with
    these cosines and sines, (T, half) or (B, T, half), of which no gradients are made. Computed in float32
    and rounded once. float32, bfloat16 or float16. Raises `SpecError`."""
    _check(qkv, cos, sin, heads, kv_heads)
    # angles of tinygrad's constants alone are on no device
    cos, sin = (each if each.device is not None else each.clone(device=qkv.device) for each in (cos, sin))
    q, k, v = call(RotatedHeads(heads, kv_heads), rotate, qkv, cos, sin, grad=_gradient)
    return q, k.squeeze(0), v.squeeze(0).squeeze(0)


def _check(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> None:
    count = heads + 2 * kv_heads
    if min(heads, kv_heads) < 1: raise SpecError(f"{heads} and {kv_heads} heads", "one or more")
    if qkv.ndim != 3 or qkv.shape[-1] % count:
        raise SpecError(f"q|k|v of shape {qkv.shape}", f"(B, T, {count} D)")
    for name, x in (("q|k|v", qkv), ("cos", cos), ("sin", sin)):
        if x.dtype not in FLOATS: raise SpecError(f"{name} of {x.dtype.name}", "float32, bfloat16 or float16")
    B, T, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // count
    if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.shape[:-1] not in ((T,), (B, T)) or \
            not 1 <= cos.shape[-1] <= d // 2:
        raise SpecError(f"cos {cos.shape}, sin {sin.shape}",
                        f"({T}, half) or ({B}, {T}, half) of both, half ≤ {d // 2}")


def _gradient(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
    """The gradient of q|k|v: tinygrad gives what there are of three, a single one with the call behind it."""
    if call is None: *given, call = given  # type: ignore[assignment]
    what, (qkv, cos, sin) = call.arg.aux, (Tensor(each) for each in call.src[1:])
    grads = {len(each.shape): Tensor(each) for each in given}
    shapes = [call.gettuple(i).shape[i:] for i in range(3)]
    each = [grads[4 + i].reshape(shape) if 4 + i in grads else
            Tensor.zeros(*shape, dtype=qkv.dtype, device=qkv.device) for i, shape in enumerate(shapes)]
    return call_gradient(what, each, cos, sin).uop, None, None


def call_gradient(what: RotatedHeads, grads: list[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Calls the gradient."""
    return call(RotatedHeadsGradient(what.heads, what.kv_heads), derive, *grads, cos, sin)[0]


# **** in plain tinygrad ****

def rotate(what: RotatedHeads, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Returns q, k and v in plain tinygrad."""
    q, k, v = reference.rotate_qkv(qkv.float(), *_angles(cos, sin), what.heads, what.kv_heads)
    made = q, k.unsqueeze(0), v.unsqueeze(0).unsqueeze(0)
    return tuple(each.cast(qkv.dtype) for each in made)


def derive(what: RotatedHeadsGradient, q: Tensor, k: Tensor, v: Tensor, cos: Tensor,
            sin: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradient of q|k|v in plain tinygrad."""
    return (reference.derive((q.float(), k.float(), v.float()), *_angles(cos, sin)).cast(q.dtype),)


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(B or 1, 1, T, half) in float32."""
    shape = (*((1,) if cos.ndim == 2 else cos.shape[:1]), 1, *cos.shape[-2:])
    return cos.float().reshape(shape), sin.float().reshape(shape)


# **** kernels ****

def lower_rope(what: RotatedHeads, target: Target, qkv: UOp, cos: UOp, sin: UOp) -> tuple[UOp, ...]:
    """Returns q, k and v by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    (B, T, width), (c, s) = _extents(qkv), _lay_angles(cos, sin)
    spec = RopeSpec(B, T, what.heads, what.kv_heads, width // (what.heads + 2 * what.kv_heads),
                    int(cos.shape[-1]), qkv.dtype, _place(c))
    outs = [program.Output((*(1,) * i, B, heads, T, spec.d), qkv.dtype)
            for i, heads in enumerate((what.heads, what.kv_heads, what.kv_heads))]
    inputs = [_memory(qkv), c.storage, s.storage]
    return choose(spec, target).call(qkv.device, outs, inputs, NAME, flops=spec.flops, nbytes=spec.nbytes)


def lower_gradient(what: RotatedHeadsGradient, target: Target, q: UOp, k: UOp, v: UOp, cos: UOp,
                     sin: UOp) -> tuple[UOp, ...]:
    """Returns the gradient by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    (B, _, T, d), (c, s) = _extents(q), _lay_angles(cos, sin)
    if len({each.dtype for each in (q, k, v)}) > 1: raise Unsupported("gradients of several dtypes")
    spec = RopeGradientSpec(B, T, what.heads, what.kv_heads, d, int(cos.shape[-1]), q.dtype, _place(c))
    out = program.Output((B, T, spec.width), q.dtype)
    if (sums := _wide_source(q)) is not None and TABLE.choose(wide := replace(spec, wide_q=True), target):
        q, spec = sums, wide
    inputs = [*(_memory(each) for each in (q, k, v)), c.storage, s.storage]
    return choose(spec, target).call(q.device, [out], inputs, NAME, flops=spec.flops, nbytes=spec.nbytes)


def _wide_source(x: UOp) -> UOp | None:
    """Returns the float32 node in memory that a value is cast to 16 bits of; None of others."""
    while x.op in (Ops.RESHAPE, Ops.CONTIGUOUS): x = x.src[0]
    if x.op is not Ops.CAST or x.dtype not in FLOAT16S or x.src[0].dtype != dtypes.float32: return None
    return x.src[0] if x.src[0].has_buffer_identity(after_ok=True) else None


def _extents(x: UOp) -> tuple[int, ...]:
    if isinstance(x.device, tuple): raise Unsupported("shards")
    if any(isinstance(extent, UOp) for extent in x.shape): raise Unsupported("symbolic extents")
    return tuple(map(int, x.shape))


def _lay_angles(cos: UOp, sin: UOp) -> tuple[Laid, Laid]:
    """Returns where angles lie: both alike, the elements of a row side by side."""
    _extents(cos)
    c, s = lay_out(cos), lay_out(sin)
    if (c.strides, c.offset) != (s.strides, s.offset) or c.strides[-1] > 1:
        c, s = copy_dense(cos), copy_dense(sin)
    return c, s


def _place(lies: Laid) -> Angles:
    batch = lies.strides[0] if len(lies.strides) == 3 else 0
    return Angles(lies.dtype, lies.strides[-2], batch, lies.offset)


def _memory(x: UOp) -> UOp:
    """A value in memory, in order."""
    return x if x.has_buffer_identity(after_ok=True) else x.contiguous()


lower(RotatedHeads, NAME, lower_rope, setting="NV_ATTENTION")
lower(RotatedHeadsGradient, NAME, lower_gradient, setting="NV_ATTENTION")
