"""softmax, logsumexp, LayerNorm and RMSNorm that are right for every row, forward and backward.

Protocol: each takes float32, bfloat16 or float16, computes in float32, and gives x's dtype, rounded once.
What is right, and what is not finite, is said for each; u is 2^-24, n the length of a row. NaN in a row is
NaN in all of its results: it is never hidden. Tests search for rows that prove them wrong, against float64.

All are plain Tensor operations: norm kernels take them (docs/norm.md), gradients are tinygrad's, of
expressions made so that no intermediate number overflows where the gradient does not.

    shift      softmax and logsumexp are of x - max x, LayerNorm too: the difference of near numbers is exact
               (Sterbenz), so a row of one number has a variance of exactly 0, however large its mean is
    scale      squares of float32 overflow from 2^64 on. Norms multiply rows beyond 2^30 by a power of two,
               which rounds nothing, so that the deviation, and 1 / its cube, which gradients may have, are
               numbers of float32. eps is nothing beside what such rows have
    bounds     those of the functions hold for sums in any order. In the search rows of up to 8192 elements
               stay within 4 u (softmax), 16 u (logsumexp, relative), 64 u √(2n) (LayerNorm), 24 u (RMSNorm)
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.tile.expression import short

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
LARGEST = 3.4028234663852886e38     # float32's
INF = float("inf")
LEAST_EPS = 1e-13                   # 1 / √eps of rows beyond 2^80 is no more than float32 has
# a row's largest magnitude, and what it is multiplied by beyond that: to 2^-3 … 2^30
SCALES = ((2.0 ** 30, 2.0 ** -33), (2.0 ** 63, 2.0 ** -66), (2.0 ** 96, 2.0 ** -99))


def softmax_safe(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along an axis, in x's dtype.

    Right for every row of numbers: |error| ≤ (n + 8) u of each result, before it is rounded. -inf is hidden:
    0. A row of -inf alone is 0 everywhere, and its gradient 0 (a token that sees nothing). +inf counts as the
    largest number, of gradient 0: infinities share the row equally. Raises `NumericsError`."""
    wide = _to_float32(x, "softmax_safe")
    _, exps = _exponentials(wide, axis)
    total = exps.sum(axis, keepdim=True)
    return (exps * (total == 0).where(1, total).reciprocal()).cast(x.dtype)


def logsumexp_safe(x: Tensor, axis: int = -1, keepdim: bool = False) -> Tensor:
    """log Σ exp(x) along an axis, in x's dtype; its gradient is `softmax_safe`.

    Right for every row: |error| ≤ (n + 8) u + 2 u |result| before it is rounded. -inf for a row of -inf
    alone, +inf for a row with +inf. Raises `NumericsError`."""
    wide = _to_float32(x, "logsumexp_safe")
    largest, exps = _exponentials(wide, axis)
    total = exps.sum(axis, keepdim=True)
    beyond = (largest == INF).where(INF, (largest == -INF).where(-INF, 0.0))
    out = (total == 0).where(1, total).log() + _finite(largest) + beyond
    return (out if keepdim else out.squeeze(axis)).cast(x.dtype)


def layernorm_safe(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
                   axis: int = -1) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias along an axis, in x's dtype.

    Right for every row of numbers, whatever its mean and its size: |error| ≤ (n + 8) u √(2n) of a normalised
    element, as differences from the largest are at most √(2n) standard deviations. A row of one
    number is 0. A row with an infinity is NaN. `eps` is 1e-13 or more. Raises `NumericsError`."""
    wide = _to_float32(x, "layernorm_safe", eps)
    largest, lowest = (each.max(axis, keepdim=True).detach() for each in (wide, -wide))
    scale = _scale(largest.maximum(lowest))
    shifted = wide * scale - largest * scale
    centred = shifted - shifted.mean(axis, keepdim=True)
    variance = centred.square().mean(axis, keepdim=True) + (scale == 1).where(eps, 0.0)
    # a row of one large number
    alone = scale.reciprocal() * eps ** -0.5
    out = centred * (variance == 0).where(alone, (variance == 0).where(1, variance).rsqrt())
    if weight is not None: out = out * weight.cast(dtypes.float32)
    if bias is not None: out = out + bias.cast(dtypes.float32)
    return out.cast(x.dtype)


def rmsnorm_safe(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, axis: int = -1) -> Tensor:
    """x / √(mean x² + eps) · weight along an axis, in x's dtype.

    Right for every row of numbers: a relative error of at most (n / 2 + 8) u of each normalised element. A
    row of 0 is 0. Beside an infinity finite elements are 0, and it is NaN. `eps`
    is 1e-13 or more. Raises `NumericsError`."""
    wide = _to_float32(x, "rmsnorm_safe", eps)
    scale = _scale(wide.abs().max(axis, keepdim=True).detach())
    scaled = wide * scale
    out = scaled * (scaled.square().mean(axis, keepdim=True) + (scale == 1).where(eps, 0.0)).rsqrt()
    if weight is not None: out = out * weight.cast(dtypes.float32)
    return out.cast(x.dtype)


def _to_float32(x: Tensor, name: str, eps: float = 1.0) -> Tensor:
    """x in float32."""
    if x.dtype not in FLOATS:
        raise NumericsError(f"{name} of {short(x.dtype)}", f"one of {', '.join(map(short, FLOATS))}",
                            "x.float()")
    if not LEAST_EPS <= eps < INF:
        raise NumericsError(f"{name} with eps={eps}", f"{LEAST_EPS} or more",
                            "the model's eps, 1e-5 or 1e-6")
    return x.cast(dtypes.float32)


def _exponentials(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The largest element of a row, and exp(x - it): of a row of -inf alone 0, of +inf 1."""
    largest = x.max(axis, keepdim=True).detach()
    return largest, ((x == INF).where(LARGEST, x) - _finite(largest)).exp()


def _finite(largest: Tensor) -> Tensor:
    """Returns the shift of each row: its largest number, where that is finite."""
    return (largest == INF).where(LARGEST, (largest == -INF).where(0.0, largest))


def _scale(largest: Tensor) -> Tensor:
    """A power of two that brings squares of a row into float32's range."""
    scale = largest.const_like(1.0)
    for beyond, less in SCALES: scale = (largest > beyond).where(less, scale)
    return scale
