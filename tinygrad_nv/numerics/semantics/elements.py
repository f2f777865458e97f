"""Operations element by element, of CUDA cores and of CPUs.

Protocol: `apply(name, format, operands, …)` takes and gives codes of one format. Each operation is exact and
rounded once; that holds for f16 and bf16 too (`fma.rn.bf16` is one rounding, not that of a float32 result).

    NaN         any NaN in, the format's NaN out. CUDA cores give 0x7fffffff, 0x7fff; CPUs keep the payload of
                an operand, so that of theirs only "is NaN" is said
    max, min    the number, where one side is NaN ("nan": NaN); -0 is below 0 (PTX ISA, max)
    subnormals  numbers; with `ftz` zeros of their sign, before and after (PTX ISA, .ftz)
    saturate    results below 0, and NaN, are 0, above 1 are 1 (PTX ISA, .sat)
    signed 0    x - x is 0, rounded down -0 (IEEE 754, 6.3)

`convert(codes, from, to)` is `cvt`: to FP8 it saturates on every unit here (PTX ISA: .satfinite is not
optional; narrow_e4m3 of cpu/vector.h). Two conversions do not look whether they have a NaN, as an H100 gave
it: bf16 to f32 keeps the bits, and cvt.rna.tf32.f32 drops the lower ones, which makes infinity of some.

Not modelled: ex2, lg2, sin, cos, tanh, rcp and rsqrt .approx, of which PTX gives bounds (docs/numerics.md).
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinygrad_nv.numerics.semantics import exact
from tinygrad_nv.numerics.semantics.formats import (
    BF16,
    F32,
    TF32,
    Codes,
    Format,
    Values,
    decode,
    encode,
    flush_subnormals,
)

OPERATIONS: dict[str, tuple[int, Callable[..., Values]]] = {
    "add": (2, exact.add), "sub": (2, lambda a, b: exact.add(a, -b)), "mul": (2, np.multiply),
    "fma": (3, exact.fma), "div": (2, exact.divide), "rcp": (1, lambda a: exact.divide(np.ones_like(a), a)),
    "sqrt": (1, exact.root), "neg": (1, np.negative), "abs": (1, np.abs),
}


def apply(name: str, of: Format, operands: list[Codes], rounding: str = "rn", ftz: bool = False,
          saturate: bool = False, nan: bool = False) -> Codes:
    """The codes of an operation on codes: add, sub, mul, fma, div, rcp, sqrt, neg, abs, max, min."""
    if ftz: operands = [flush_subnormals(each, of) for each in operands]
    values = [decode(each, of) for each in operands]
    if name in ("max", "min"): out = _choose(name, values[0], values[1], nan)
    else:
        count, compute = OPERATIONS[name]
        assert len(values) == count, (name, len(values))
        with np.errstate(invalid="ignore", over="ignore"): out = compute(*values)
        if rounding == "rm": out = _down(name, values, out)
    if saturate: out = np.where(out > 0, np.minimum(out, 1.0), 0.0)
    codes = encode(out, of, rounding)
    return flush_subnormals(codes, of) if ftz else codes


def convert(codes: Codes, of: Format, to: Format, rounding: str = "rn", saturate: bool | None = None,
            noise: Codes | None = None) -> Codes:
    """Codes of one format as codes of another; to FP8 saturating where nothing else is said."""
    saturate = to.bits == 8 if saturate is None else saturate
    values = decode(codes, of)
    out = encode(values, to, rounding, saturate, noise)
    if of == BF16 and to == F32: return np.where(np.isnan(values), codes.astype(np.uint32) << 16, out)
    if of == F32 and to == TF32 and rounding == "rna":
        return np.where(np.isnan(values), codes & np.uint32(~0 << TF32.unread & 0xffffffff), out)
    return out


def _choose(name: str, a: Values, b: Values, nan: bool) -> Values:
    less = (a < b) | ((a == b) & np.signbit(a))
    out = np.where(less == (name == "min"), a, b)
    if nan: return np.where(np.isnan(a) | np.isnan(b), np.nan, out)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, out))


def _down(name: str, values: list[Values], out: Values) -> Values:
    """An exact zero of two that are not zeros of one sign is -0 when rounding down."""
    if name not in ("add", "sub", "fma"): return out
    first, last = values[0], -values[1] if name == "sub" else values[-1]
    if name == "fma":
        with np.errstate(invalid="ignore"): first = values[0] * values[1]
    return np.where((out == 0) & (np.signbit(first) != np.signbit(last)), -0.0, out)
