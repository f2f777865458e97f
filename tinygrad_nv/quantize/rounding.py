"""Scales of blocks of a matrix, and its codes, rounded to the nearest.

Protocol: `rounded(scheme, w, keep)` takes float32 [N, K] and gives codes, scales and zero points, and the
matrix that they stand for. `keep` rounds scales to what the file stores: codes are of those. `fit_scales`
gives the scales alone, `encode` the codes of elements, `decode` what codes stand for. Integers are clamped to
−2^(b−1) … 2^(b−1) − 1, and a symmetric scale is the largest of a block / (2^b − 1) · 2, as compressed-tensors
has it; zero points are such that 0 is exact. A scale of MXFP4 is a power of two, E8M0.

Observers choose what of a block is represented: "minmax" all of it, "percentile" all but 1 of 1000, "mse" the
share of the range, in steps of 5 % down to 50 %, with the least squared error: of the weights, or with `gram`
of the layer's outputs (AWQ's weight clipping, arXiv 2306.00978 §4.1).
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.activations import E4M3_MAX
from tinygrad_nv.quant.floats import from_e4m3, to_e4m3
from tinygrad_nv.quant.sparse import two_of_four
from tinygrad_nv.quantize.schemes import BLOCK, Scheme

PERCENTILE = 99.9
SHARES = np.arange(1.0, 0.49, -0.05)    # of the range, that "mse" tries
TINY = np.float32(1e-12)                # the scale of a block of zeros
Keep = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rounded:
    """`codes` [N, K]: int8, or e4m3 and e2m1 as uint8, float32 of 16 bits; `scales` one for each block,
    float32; `zeros`, int32, of the same shape, or None; `matrix`, float32 [N, K], is what they stand for.
    `groups`, int32 [K], is the group of each column, where they do not follow each other."""
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    matrix: np.ndarray
    groups: np.ndarray | None = None


def round_matrix(scheme: Scheme, w: np.ndarray, keep: Keep, gram: np.ndarray | None = None) -> Rounded:
    """A matrix. `gram`, [K / g, g, g], of groups or channels, is the sum of x xᵀ of each block's inputs.
    Raises `WeightError` where groups do not divide its columns."""
    n, k = w.shape
    require_whole_groups(scheme, k)
    if scheme.sparse: w = np.where(two_of_four(np.abs(w)), w, np.float32(0))
    if scheme.bits == 16: return Rounded(w, np.empty(0, np.float32), None, w)
    blocks = _blocks(scheme, w)
    scales, zeros = fit_scales(scheme, blocks, keep, gram)
    codes = encode(scheme, blocks, scales, zeros)
    matrix, shape = decode(scheme, codes, scales, zeros), (scales.shape[0], scales.shape[2])
    return Rounded(_flat(codes, n, k), scales.reshape(shape), None if scheme.symmetric else
                   zeros.reshape(shape).astype(np.int32), _flat(matrix, n, k))


def require_whole_groups(scheme: Scheme, columns: int) -> None:
    """Raises `WeightError` where groups do not divide the columns."""
    if scheme.sparse and columns % 4:
        raise WeightError(f"a matrix of {columns} columns, 2:4 sparse", "a multiple of 4",
                          "ignore the layer")
    if scheme.strategy == "group" and columns % scheme.group:
        raise WeightError(f"a matrix of {columns} columns, in groups of {scheme.group}", "whole groups",
                          "choose another --group-size, or ignore the layer")


def fit_scales(scheme: Scheme, blocks: np.ndarray, keep: Keep,
           gram: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points, [row of blocks, 1, column of blocks, 1], of [row of blocks, rows, column of
    blocks, columns]."""
    low, high = _range(scheme, blocks)
    best = _scales(scheme, low, high, keep)
    if scheme.observer != "mse": return best
    least = _error(scheme, blocks, best, gram)
    for share in SHARES[1:]:
        other = _scales(scheme, low * share, high * share, keep)
        error = _error(scheme, blocks, other, gram)
        better, least = error < least, np.minimum(error, least)
        best = np.where(better, other[0], best[0]), np.where(better, other[1], best[1])
    return best


def encode(scheme: Scheme, x: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Codes of elements, with scales and zero points that broadcast to them."""
    if scheme.type == "float": return (to_e2m1 if scheme.bits == 4 else to_e4m3)(x / scales)
    most = 2 ** (scheme.bits - 1)
    made: np.ndarray = np.clip(np.rint(x / scales + zeros), -most, most - 1).astype(np.int8)
    return made


def decode(scheme: Scheme, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """Returns the numbers that codes stand for, float32."""
    if scheme.type == "float":
        return (E2M1[codes] if scheme.bits == 4 else from_e4m3(codes)) * scales
    made: np.ndarray = (codes - zeros).astype(np.float32) * scales
    return made


def _blocks(scheme: Scheme, w: np.ndarray) -> np.ndarray:
    """[row of blocks, rows, column of blocks, columns], with zeros where a block reaches beyond."""
    n, k = w.shape
    rows, columns = {"group": (1, scheme.group), "channel": (1, k), "block": (BLOCK, BLOCK)}[scheme.strategy]
    if (rest := (-n % rows, -k % columns)) != (0, 0): w = np.pad(w, ((0, rest[0]), (0, rest[1])))
    return w.reshape(w.shape[0] // rows, rows, w.shape[1] // columns, columns)


def _flat(blocks: np.ndarray, n: int, k: int) -> np.ndarray:
    across, rows, down, columns = blocks.shape
    return np.ascontiguousarray(blocks.reshape(across * rows, down * columns)[:n, :k])


def _range(scheme: Scheme, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the range that is represented, [row of blocks, 1, column of blocks, 1]: from 0 or below to 0 or
    above."""
    if scheme.observer == "percentile":
        low, high = np.percentile(blocks, [100 - PERCENTILE, PERCENTILE], (1, 3), keepdims=True)
    else: low, high = (edge(blocks, (1, 3), keepdims=True) for edge in (np.min, np.max))
    low, high = np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32)
    if scheme.symmetric: high = np.maximum(-low, high)
    return (-high if scheme.symmetric else low), high


def _scales(scheme: Scheme, low: np.ndarray, high: np.ndarray, keep: Keep) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and zero points of a range."""
    if scheme.type == "float" and scheme.bits == 4:
        return (scales := _powers(high)), np.zeros_like(scales)
    if scheme.type == "float":
        scales = np.maximum(keep(np.maximum(high / np.float32(E4M3_MAX), TINY)), TINY)
        return scales, np.zeros_like(scales)
    most = 2 ** (scheme.bits - 1)
    scales = keep(np.maximum((high - low) / np.float32(2 * most - 1), TINY))
    if scheme.symmetric: return scales, np.zeros_like(scales)
    return scales, np.clip(np.rint(-most - low / scales), -most, most - 1)


def _error(scheme: Scheme, blocks: np.ndarray, made: tuple[np.ndarray, np.ndarray],
           gram: np.ndarray | None) -> np.ndarray:
    """Squared, of each block."""
    changed = decode(scheme, encode(scheme, blocks, *made), *made) - blocks
    weighed = changed if gram is None else \
        (changed[:, 0].transpose(1, 0, 2) @ gram).transpose(1, 0, 2)[:, None]
    found: np.ndarray = (changed * weighed).sum((1, 3), keepdims=True)
    return found


# **** e2m1 with scales of E8M0 (OCP Microscaling Formats 1.0: 1 sign, 2 exponent, 1 mantissa bit) ****

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LEAST_POWER, MOST_POWER = -127, 127     # of E8M0


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest e2m1, ties to even, beyond 6 clamped: uint8 of 4 bits."""
    size = np.abs(x)
    # between 2 and 4 steps are 1 wide, beyond 2, below a half
    step = np.where(size < 2, np.rint(size * 2), np.where(size < 4, np.rint(size) + 2, np.rint(size / 2) + 4))
    return (np.minimum(step, 7).astype(np.uint8) | (np.signbit(x).astype(np.uint8) << 3))


def _powers(high: np.ndarray) -> np.ndarray:
    """Scales, float32, of the largest of blocks: 4 to 7 steps of it, as compressed-tensors 0.20 rounds."""
    mantissa, exponent = np.frexp(high)     # of [1/2, 1)
    power = np.where(high > 0, exponent - 1 + (mantissa >= 0.875) - 2, LEAST_POWER)
    return np.ldexp(np.float32(1), np.clip(power, LEAST_POWER, MOST_POWER)).astype(np.float32)


def e8m0(scales: np.ndarray) -> np.ndarray:
    """Powers of two as uint8."""
    return (np.frexp(scales)[1] - 1 + 127).astype(np.uint8)
