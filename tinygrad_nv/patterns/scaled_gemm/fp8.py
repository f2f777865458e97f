"""Matmuls of training in FP8, as a function known by name, and a linear layer of three such matmuls.

Protocol. `fp8_matmul(what, a, b)` multiplies codes a (M, K) with b (N, K), transposed, e4m3 or e5m2 each,
with a scale of all or of each block of a and of b. Of scales of all it is a plain matmul whose epilogue has
both (tile/gemm), of blocks one with scales of groups (tile/scaled_gemm). Sums are float32; tensor cores keep
14 bits of them, and kernels add these up in float32 after each 128 of K. The reference, and what runs on
CPUs, is that in plain tinygrad: codes as the float32 numbers that they stand for, whose products are exact.

`fp8_linear(how, x, w, scales, meter)` is x Wᵀ as Transformer Engine's Linear computes it:

    y  = x̂ Ŵᵀ         x̂, Ŵ of `forward`
    dx = ĝ Ŵ          ĝ of `backward`
    dW = ĝᵀ x̂

Tensor cores read 8-bit operands along K alone, so Ŵ, ĝ and x̂ are there transposed, too. With blocks x̂ᵀ and ĝᵀ
are quantised again from x and g, since their blocks lie along rows (1 x 128 of what is summed), and Ŵ's, of
128 x 128, are the same both ways. The gradient of `meter`, float32 (9), is no gradient, but what the
quantisation of x, W and g saw: three amax, three counts of clamped values, three of values flushed to zero
(quant/fp8.py). So figures of the backward pass leave it the way that gradients do.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.named_matmul import NamedMatmul
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.quant.fp8 import FORMATS, Codes, by_block, by_tensor
from tinygrad_nv.quant.tensor import numbers_of
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec

NAME = "fp8_gemm"
ALIGNED = 16        # what extents are multiples of: TMA's bytes
SEEN = 9            # figures of a meter
KINDS = ("activation", "weight", "gradient")


@dataclass(frozen=True)
class Fp8Matmul:
    """a bᵀ in `dtype`, of codes of formats `a` and `b`. `rows`: of the blocks of a and of b, `GROUP` wide; ()
    is one scale for all of each."""
    a: str
    b: str
    dtype: DType
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fp8Linear:
    """How a layer is quantised: formats of activations and weights, and of gradients; with `blocks` a scale
    for each block, powers of two where `power_of_two` says so, else one for each tensor."""
    forward: str = "e4m3"
    backward: str = "e5m2"
    blocks: bool = False
    power_of_two: bool = True


def fp8_matmul(what: Fp8Matmul, a: Codes, b: Codes) -> Tensor:
    """a (M, K) bᵀ (N, K): (M, N). No gradient."""
    return call(what, multiply, a.codes, b.codes, a.inverse.contiguous(), b.inverse.contiguous())[0]


def fp8_linear(how: Fp8Linear, x: Tensor, w: Tensor, scales: tuple[Tensor, Tensor, Tensor] | None,
               meter: Tensor) -> Tensor:
    """x (…, K) times w (N, K), transposed: (…, N) in x's dtype. `scales`, float32 (1): of x, w and the
    gradient; None: of the magnitudes that there are, as with blocks. Raises `SpecError` for other shapes, and
    for K or N that is no multiple of 16."""
    _check(how, x, w, scales, meter)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    sides = _Sides.of(how, flat, w, scales)
    what = Fp8Matmul(how.forward, how.forward, x.dtype, (1, GROUP) if how.blocks else ())
    # x, w, the meter and what the gradient needs are no operands: kernels do not read them
    kept = (flat, w, meter, sides.across.codes, sides.across.inverse, sides.down.codes, sides.down.inverse,
            sides.seen, *([] if scales is None else scales[2:]))

    def back(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]: return _gradient(how, grad, call_)
    own = (sides.x.codes, sides.w.codes, sides.x.inverse.contiguous(), sides.w.inverse.contiguous())
    made = call(what, multiply, *own, *kept, grad=back)[0]
    return made.reshape(*x.shape[:-1], w.shape[0])


def _check(how: Fp8Linear, x: Tensor, w: Tensor, scales: tuple[Tensor, ...] | None, meter: Tensor) -> None:
    if w.ndim != 2 or not x.shape or x.shape[-1] != w.shape[1]:
        raise SpecError(f"x of shape {x.shape}, w of {w.shape}", "x (…, K), w (N, K)")
    if any(int(extent) % ALIGNED for extent in w.shape):
        raise SpecError(f"a matrix of {w.shape} in FP8", f"multiples of {ALIGNED}",
                        "leave it in high precision")
    if how.forward not in FORMATS or how.backward not in FORMATS:
        raise SpecError(f"formats {how.forward}, {how.backward}", ", ".join(FORMATS))
    if how.blocks and scales is not None: raise SpecError("scales of tensors with blocks", "None")
    if meter.shape != (SEEN,) or meter.dtype != dtypes.float32:
        raise SpecError(f"a meter of {meter.dtype.name} {meter.shape}", f"float32 ({SEEN},)")


@dataclass(frozen=True)
class _Sides:
    """Operands: x and w as they lie, `across` wᵀ, `down` xᵀ, and what their quantisation saw, float32 (6)."""
    x: Codes
    w: Codes
    across: Codes
    down: Codes
    seen: Tensor

    @staticmethod
    def of(how: Fp8Linear, x: Tensor, w: Tensor, scales: tuple[Tensor, ...] | None) -> _Sides:
        x, w, to = x.detach(), w.detach(), FORMATS[how.forward]
        if how.blocks:
            own, matrix = (by_block(each, to, rows, GROUP, how.power_of_two)
                           for each, rows in ((x, 1), (w, GROUP)))
            down = _pad_codes(by_block(x.T, to, 1, GROUP, how.power_of_two))
        else:
            own, matrix = (by_tensor(each, to, None if scales is None else scales[i])
                           for i, each in enumerate((x, w)))
            down = _transpose_codes(own)
        return _Sides(own, matrix, _transpose_codes(matrix), down, Tensor.cat(own.lost, matrix.lost))


def _transpose_codes(given: Codes) -> Codes:
    """Codes (M, K) as (K, M), of blocks that are the same both ways. Zeros fill up M."""
    inverse = given.inverse if given.inverse.ndim < 2 else given.inverse.T
    return _pad_codes(Codes(given.codes.T, inverse.contiguous(), given.lost))


def _pad_codes(given: Codes) -> Codes:
    """Codes (M, K) with zeros up to a K that rows can be aligned with."""
    codes = given.codes.pad(((0, 0), (0, -int(given.codes.shape[1]) % ALIGNED)))
    return Codes(codes.contiguous(), given.inverse, given.lost)


def _gradient(how: Fp8Linear, grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    """The gradients of x, w and the meter; the codes that they are made of have none."""
    given = [Tensor(each) for each in call_.src[1:]]
    x, w, _, across, across_inverse, down, down_inverse, seen, *scale = given[4:]
    g, to = Tensor(grad).contiguous(), FORMATS[how.backward]
    if how.blocks:
        own = by_block(g, to, 1, GROUP, how.power_of_two)
        turned = _pad_codes(by_block(g.T, to, 1, GROUP, how.power_of_two))
    else:
        own = by_tensor(g, to, scale[0] if scale else None)
        turned = _transpose_codes(own)
    rows = ((1, GROUP), (1, 1)) if how.blocks else ((), ())
    of_x = fp8_matmul(Fp8Matmul(how.backward, how.forward, x.dtype, rows[0]), own,
                      Codes(across, across_inverse, seen))
    of_w = fp8_matmul(Fp8Matmul(how.backward, how.forward, w.dtype, rows[1]), turned,
                      Codes(down, down_inverse, seen))
    # three kinds by figure: amax, clamped, flushed
    figures = Tensor.cat(seen, own.lost).reshape(3, 3).T.reshape(-1)
    return None, None, None, None, of_x.uop, of_w.uop, figures.uop, *[None] * (5 + len(scale))


def multiply(what: Fp8Matmul, a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor,
               *_: Tensor) -> tuple[Tensor, ...]:
    """Returns the matmul in plain tinygrad. Of blocks, scales are multiplied before the sum."""
    left, right = (numbers_of(codes, FORMATS[name].dtype)
                   for codes, name in ((a, what.a), (b, what.b)))
    if what.rows:
        left, right = (each * _spread(inverse, rows, each) for each, inverse, rows
                       in ((left, a_inverse, what.rows[0]), (right, b_inverse, what.rows[1])))
    made = left.contiguous() @ right.contiguous().T
    if not what.rows: made = made * (a_inverse * b_inverse)
    return (made.cast(what.dtype),)


def _spread(inverse: Tensor, rows: int, codes: Tensor) -> Tensor:
    """A scale of each element."""
    (m, k), (down, across) = codes.shape, (int(n) for n in inverse.shape)
    wide = inverse.reshape(down, 1, across, 1).expand(down, rows, across, GROUP)
    return wide.reshape(down * rows, across * GROUP)[:m, :k]


# **** kernels ****

def lower_fp8(what: Fp8Matmul, target: Target, a: UOp, b: UOp, a_inverse: UOp, b_inverse: UOp,
            *_: UOp) -> tuple[UOp, ...]:
    """Returns the matmul by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    (m, k), n = (int(extent) for extent in a.shape), int(b.shape[0])
    left, right = (Operand(FORMATS[name].dtype, k, 1) for name in (what.a, what.b))
    out, total = Result(what.dtype, n, 1), Sum(dtypes.float32)
    spec: GemmSpec
    if what.rows:
        scales = [BlockScales(rows, -(-k // GROUP)) for rows in what.rows]
        spec = ScaledGemmSpec(m, n, k, left, right, out, epilogue=total.cast(what.dtype), a_scale=scales[0],
                              b_scale=scales[1])
    else:
        both = Load(0, dtypes.float32, 0, 0) * Load(1, dtypes.float32, 0, 0)
        spec = GemmSpec(m, n, k, left, right, out, epilogue=(total * both).cast(what.dtype))
    matmul = NamedMatmul(spec, (a, b, a_inverse, b_inverse), (m, n), None, n * k)
    return matmul.call(target, what.dtype)


lower(Fp8Matmul, NAME, lower_fp8, "NV_GEMM")
