"""Scales of blocks of a matrix, and its codes, rounded to the nearest.

Protocol: `rounded(scheme, w, keep)` takes float32 [N, K] and gives codes, scales and zero points, and the
matrix that they stand for. `keep` rounds scales to what the file stores: codes are of those. Integers are
clamped to −2^(b−1) … 2^(b−1) − 1, and a symmetric scale is the largest of a block / (2^b − 1) · 2, as
compressed-tensors has it; zero points are such that 0 is exact.

Observers choose what of a block is represented: "minmax" all of it, "percentile" all but 1 of 1000, "mse" the
share of the range, in steps of 5 % down to 50 %, with the least squared error.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quantize.schemes import BLOCK, Scheme

E4M3_MAX = 448.0
PERCENTILE = 99.9
SHARES = np.arange(1.0, 0.49, -0.05)    # of the range, that "mse" tries
TINY = np.float32(1e-12)                # the scale of a block of zeros
Keep = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rounded:
    """`codes` [N, K]: int8, or e4m3 as uint8; `scales` one for each block, float32; `zeros`, int32, of the
    same shape, or None; `matrix`, float32 [N, K], is what they stand for."""
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    matrix: np.ndarray


def rounded(scheme: Scheme, w: np.ndarray, keep: Keep) -> Rounded:
    """A matrix. Raises `WeightError` where groups do not divide its columns."""
    n, k = w.shape
    if scheme.strategy == "group" and k % scheme.group:
        raise WeightError(f"a matrix of {k} columns, in groups of {scheme.group}", "whole groups",
                          "choose another --group-size, or ignore the layer")
    blocks = _blocks(scheme, w)
    low, high = _range(scheme, blocks)
    best = _rounded(scheme, blocks, low, high, keep)
    if scheme.observer == "mse":
        least = _error(blocks, best)
        for share in SHARES[1:]:
            other = _rounded(scheme, blocks, low * share, high * share, keep)
            error = _error(blocks, other)
            better = error < least
            least = np.minimum(error, least)
            best = [np.where(better, new, old) for new, old in zip(other, best, strict=True)]
    codes, scales, zeros, matrix = best
    shape = scales.shape[0], scales.shape[2]
    return Rounded(_flat(codes, n, k), scales.reshape(shape), None if scheme.symmetric else
                   zeros.reshape(shape).astype(np.int32), _flat(matrix, n, k))


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
    """What is represented, [row of blocks, 1, column of blocks, 1]: from 0 or below to 0 or above."""
    if scheme.observer == "percentile":
        low, high = np.percentile(blocks, [100 - PERCENTILE, PERCENTILE], (1, 3), keepdims=True)
    else: low, high = (edge(blocks, (1, 3), keepdims=True) for edge in (np.min, np.max))
    low, high = np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32)
    if scheme.symmetric: high = np.maximum(-low, high)
    return (-high if scheme.symmetric else low), high


def _rounded(scheme: Scheme, blocks: np.ndarray, low: np.ndarray, high: np.ndarray,
             keep: Keep) -> list[np.ndarray]:
    if scheme.type == "float":
        scales = np.maximum(keep(np.maximum(high / np.float32(E4M3_MAX), TINY)), TINY)
        codes = to_e4m3(blocks / scales)
        return [codes, scales, np.zeros_like(scales), from_e4m3(codes) * scales]
    most = 2 ** (scheme.bits - 1)
    scales = keep(np.maximum((high - low) / np.float32(2 * most - 1), TINY))
    zeros = np.zeros_like(scales) if scheme.symmetric else np.clip(np.rint(-most - low / scales), -most,
                                                                  most - 1)
    codes = np.clip(np.rint(blocks / scales + zeros), -most, most - 1)
    return [codes.astype(np.int8), scales, zeros, (codes - zeros).astype(np.float32) * scales]


def _error(blocks: np.ndarray, made: list[np.ndarray]) -> np.ndarray:
    """Squared, of each block."""
    found: np.ndarray = np.square(blocks - made[3]).sum((1, 3), keepdims=True)
    return found


# **** e4m3 (OCP 8-bit floating point 1.0: 1 sign, 4 exponent, 3 mantissa bits, no infinity) ****

def to_e4m3(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest e4m3, ties to even, beyond 448 clamped: uint8."""
    size = np.minimum(np.abs(x), np.float32(E4M3_MAX))
    exponent = np.where(size == 0, -6, np.maximum(np.frexp(size)[1] - 1, -6))
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int32)      # of 8 to 15, below 8 subnormal
    # a mantissa that became 16 carries into the exponent by itself
    bits = (exponent + 6 << 3) + steps
    return (bits | (np.signbit(x).astype(np.int32) << 7)).astype(np.uint8)


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    """uint8 as float32."""
    table = np.arange(128, dtype=np.int32)
    exponent, mantissa = table >> 3, table & 7
    values = np.where(exponent == 0, np.ldexp(np.float32(mantissa), -9),
                      np.ldexp(np.float32(8 + mantissa), exponent - 10)).astype(np.float32)
    values[127] = np.nan
    both: np.ndarray = np.concatenate([values, -values])[bits]
    return both
