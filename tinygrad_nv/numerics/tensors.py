"""Policies of dtypes in ordinary Tensor programs: matmuls, attention, norms and stores that honour them.

    from tinygrad_nv.numerics.tensors import matmul, store
    y = matmul(x, w, of=(bf16 @accum(f32), bf16), out=e4m3 @saturate)

Protocol: `of` is what operands are (one for all, or one each) and `out` what the result is; where it is left
out, what operands come to (meet.py). What does not fit raises `NumericsError` before anything runs. Sums are
float32 (int32 of integers), in the order of the kernel that the patterns choose; the store at the end is of
the sum, before it is rounded:

    1. times the quotient of loss scales, out's and what operands have: a power of two
    2. `saturate`, and every store to FP8: clamped to the largest number of its sign; NaN stays NaN
    3. to the dtype, ties to even; or with `stochastic_round` up, where the first 16 digits that are cut and
       16 random bits come to 2^16: bits of Philox4x32-10 for the element's number, with the seed as key, as a
       store in the tile language has them. Without a seed Tensor.manual_seed's generator draws the key

The gradient of a store is that of its scale, its clamp and a cast: rounding has none of its own.

A clamp or a scale is part of the kernel whose result it stores. Random bits and stores to FP8 are a kernel of
tinygrad's behind it. Sums in bfloat16 or float16 are
tinygrad's kernels, too: `explain()` says why. Attention and norms refuse them. What is `deterministic` is
realized at once, by kernels of one class (tile/order.py).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics import safe
from tinygrad_nv.numerics.meet import meet
from tinygrad_nv.numerics.policy import (
    FP8,
    Accumulate,
    Deterministic,
    LossScale,
    Policied,
    Saturate,
    StochasticRound,
    deterministic,
    with_policies,
)
from tinygrad_nv.numerics.semantics.formats import FORMATS, Format
from tinygrad_nv.patterns import named
from tinygrad_nv.tile.attention.dropout import philox
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.rounding import LARGEST, smallest_number

Of: TypeAlias = DType | Policied
INFINITE, SIGN = 0x7f800000, 0x80000000


def store(x: Tensor, to: Of, scaled: float = 1.0) -> Tensor:
    """x as `to` says. x has `scaled` times its values already."""
    what = with_policies(to)
    ratio = _scale(what) / scaled
    wide = x if dtypes.is_int(x.dtype) and ratio == 1 else x.float()
    if ratio != 1: wide = wide * ratio
    if what.get(Saturate) is not None or what.dtype in FP8: wide = _clamp(wide, what.dtype)
    if not _rounds(what): made = wide.cast(what.dtype)
    else:
        rounding = what.get(StochasticRound)
        noise = () if rounding is None else (_noise(wide, rounding.seed),)
        made = named.call(Rounded(what.dtype), _round, wide.float(), *noise, grad=_pass_gradient)[0]
    if what.get(Deterministic) is not None:
        with deterministic(): made = made.realize()
    return made


def matmul(a: Tensor, b: Tensor, *, of: Of | tuple[Of, Of], out: Of | None = None) -> Tensor:
    """a @ b, of [..., M, K] and [..., K, N]: [..., M, N]."""
    met = _meet("multiply", (("the left operand", a), ("the right operand", b)), of)
    sums = met.accumulator or (dtypes.int32 if dtypes.is_int(met.dtype) else dtypes.float32)
    if dtypes.is_int(sums): made = a.cast(sums).matmul(b.cast(sums))
    else: made = a.matmul(b, dtype=sums)
    return store(made, _result(met, out), _scale(met))


def attention(q: Tensor, k: Tensor, v: Tensor, *, of: Of | tuple[Of, Of, Of], out: Of | None = None,
              is_causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale q kᵀ) v, of [B, H, S, D]; p rounded to v's dtype, sums float32. `scale` is 1/√D."""
    of_q, of_k, of_v = of if isinstance(of, tuple) else (of, of, of)
    scores = _meet("multiply", (("q", q), ("k", k)), (of_q, of_k))
    if (found := scores.get(LossScale)) is not None:
        raise NumericsError(f"q and k come to scores @{found}", "scores without a scale: softmax is not "
                            "linear", "divide q or k by its scale")
    value = _meet("multiply", (("p", v), ("v", v)), (of_v, with_policies(of_v).dtype))
    for each in (scores, value): _float_sums("attention", each)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.matmul(k.transpose(-1, -2), dtype=dtypes.float32) * scale
    if is_causal:
        rows, columns = (Tensor.arange(int(n)) for n in s.shape[-2:])
        s = (columns.reshape(1, -1) <= rows.reshape(-1, 1)).where(s, -float("inf"))
    made = s.softmax(-1).cast(v.dtype).matmul(v, dtype=dtypes.float32)
    return store(made, _result(value, out, scores), _scale(value))


def rmsnorm(x: Tensor, weight: Tensor | None = None, *, of: Of, out: Of | None = None,
            eps: float = 1e-6) -> Tensor:
    """safe.rmsnorm_safe of the values of x, stored."""
    return _norm(x, of, out, lambda values: safe.rmsnorm_safe(values, weight, eps))


def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, of: Of,
              out: Of | None = None, eps: float = 1e-5) -> Tensor:
    """safe.layernorm_safe of the values of x, stored."""
    return _norm(x, of, out, lambda values: safe.layernorm_safe(values, weight, bias, eps))


def softmax(x: Tensor, *, of: Of, out: Of | None = None) -> Tensor:
    """safe.softmax_safe of the values of x, stored."""
    return _norm(x, of, out, safe.softmax_safe)


def add(a: Tensor, b: Tensor, *, of: Of | tuple[Of, Of], out: Of | None = None) -> Tensor:
    """a + b in float32, stored."""
    met = _meet("add", (("the left operand", a), ("the right operand", b)), of)
    made = a + b if dtypes.is_int(met.dtype) else a.float() + b.float()
    return store(made, _result(met, out), _scale(met))


# **** what operands come to ****

def _meet(operation: str, operands: Sequence[tuple[str, Tensor]], of: Of | tuple[Of, ...]) -> Policied:
    """Meets the policies of two operands, each of which is what is said of it."""
    both = of if isinstance(of, tuple) else (of, of)
    for (name, x), each in zip(operands, both, strict=True): _check(name, x, each)
    return meet(both[0], both[1], operation, (operands[0][0], operands[1][0]))


def _check(name: str, x: Tensor, of: Of) -> None:
    if x.dtype != with_policies(of).dtype:
        raise NumericsError(f"{name} is {short(x.dtype)}, and said to be {with_policies(of)}",
                            f"a Tensor of {short(with_policies(of).dtype)}", f"store(x, {with_policies(of)})")


def _result(met: Policied, out: Of | None, *others: Policied) -> Policied:
    """Returns the type in which a result is stored: deterministic where an operand is."""
    made = met if out is None else with_policies(out)
    asked = any(each.get(Deterministic) is not None for each in (met, *others))
    return made @ deterministic if asked and made.get(Deterministic) is None else made


def _float_sums(name: str, what: Policied) -> None:
    """Kernels of ours keep sums of these in float32."""
    if (found := what.get(Accumulate)) is not None and found.dtype != dtypes.float32:
        raise NumericsError(f"{name} of {what}", "accum(f32): softmax and norms have no other sums",
                            "leave accum out, or write it with matmul")


def _norm(x: Tensor, of: Of, out: Of | None, norm: Callable[[Tensor], Tensor]) -> Tensor:
    """A norm of the values of x, without their scale."""
    _check("x", x, of)
    what = with_policies(of)
    _float_sums("a norm", what)
    values = x.float() if _scale(what) == 1 else x.float() * (1 / _scale(what))
    to, made = _result(what, out), norm(values)
    # what rounds is no part of a norm's template: in one kernel with it no template would take the norm
    return store(made.contiguous() if _rounds(to) else made, to)


def _scale(of: Of) -> float:
    found = with_policies(of).get(LossScale)
    return 1.0 if found is None else found.scale


# **** stores ****

def _clamp(x: Tensor, dtype: DType) -> Tensor:
    """x within the range of a dtype; NaN stays."""
    kind = int if dtypes.is_int(x.dtype) else float
    low, high = kind(smallest_number(dtype)), kind(LARGEST[dtype])
    return (x > high).where(high, (x < low).where(low, x))


@dataclass(frozen=True)
class Rounded:
    """The rounding of a store. Its gradient is that of a cast: bits and whole numbers have none."""
    dtype: DType


def _rounds(to: Policied) -> bool:
    """Whether a store rounds by itself. tinygrad's casts to FP8 round twice, to float16 first."""
    return to.get(StochasticRound) is not None or to.dtype in FP8


def _pass_gradient(gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
    return gradient.cast(dtypes.float32), *(None for _ in call.src[2:])


def _round(what: Rounded, x: Tensor, *noise: Tensor) -> tuple[Tensor]:
    """float32 x in the dtype: by 16 random bits where they are given, else ties to even."""
    if what.dtype != dtypes.bfloat16 or not noise: return (_on_grid(x, what.dtype, *noise),)
    bits = x.bitcast(dtypes.uint32)
    there = (bits & INFINITE) != INFINITE
    moved = ((bits + noise[0]) & 0xffff0000).bitcast(dtypes.float32)
    return (there.where(moved, x).cast(what.dtype),)


def _on_grid(x: Tensor, dtype: DType, noise: Tensor | None = None) -> Tensor:
    """float32 x among the numbers of a format, which a cast then keeps: by random bits, or ties to even."""
    to, bits = FORMATS[short(dtype)], x.bitcast(dtypes.uint32)
    there, unit = (bits & INFINITE) != INFINITE, _unit(bits, to)
    count = there.where(x.abs(), 0.0) / unit
    whole = count.trunc()
    rest = count - whole
    if noise is None: up = (rest > 0.5) | ((rest == 0.5) & ((whole * 0.5).trunc() * 2 != whole))
    else: up = (rest * 65536.0).trunc() + noise.cast(dtypes.float32) >= 65536.0
    size = (whole + up.cast(dtypes.float32)) * unit
    made = there.where(((bits & SIGN) != 0).where(-size, size), x)
    # a number above the largest was rounded up to there
    return (_clamp(made, dtype) if to.bits == 8 else made).cast(dtype)


def _unit(bits: Tensor, to: Format) -> Tensor:
    """The distance between neighbours of a format at a float32: a power of two."""
    exponent = (bits >> 23 & 0xff).cast(dtypes.int32).maximum(to.least + 127)
    return ((exponent - to.mantissa).cast(dtypes.uint32) << 23).bitcast(dtypes.float32)


def _noise(x: Tensor, seed: int | None) -> Tensor:
    """16 random bits for each element, u32."""
    wide, device = dtypes.uint64, x.device
    at = Tensor.arange(int(x.numel()), dtype=wide).to(device)
    if seed is None:
        first = device[0] if isinstance(device, tuple) else device
        drawn = Tensor.randint(2, low=0, high=1 << 30, device=first).to(device).cast(wide)
        key = [drawn[0:1], drawn[1:2]]
    else: key = [Tensor([seed >> 32 * i & 0xffffffff], dtype=wide).to(device) for i in range(2)]
    words = philox((at, at * 0, at * 0, at * 0), key)
    return (words[0] & 0xffff).cast(dtypes.uint32).reshape(x.shape)
