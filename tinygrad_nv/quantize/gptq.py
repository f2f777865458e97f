"""GPTQ (arXiv 2210.17323): columns are rounded one after the other, and those that are left make up for it.

Protocol: `gptq(scheme, w, hessian, keep)` takes float32 [N, K] and the sum of x xᵀ over a layer's inputs,
float64 [K, K], and gives what `rounding.rounded` gives, with less squared error of the outputs. Rows are
independent: layers with the same inputs may be stacked. `inverse_factor` is the upper Cholesky factor of the
damped Hessian's inverse, of which the algorithm needs the rows. Columns go by the size of their inputs if the
scheme has an order. Scales are those of the columns as they are when their group begins; with order "weight"
all are made before, so that groups stay where they are.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.quantize.rounding import (
    Keep,
    Rounded,
    decode,
    encode,
    fit_scales,
    require_whole_groups,
)
from tinygrad_nv.quantize.schemes import Scheme

DAMPING = 0.01      # of the Hessian's mean diagonal, added to it
COLUMNS = 128       # that are rounded before those beyond them change
LEAF = 256          # a triangle of at most as many rows is inverted at once


def gptq(scheme: Scheme, w: np.ndarray, hessian: np.ndarray, keep: Keep) -> Rounded:
    """A matrix, its columns rounded in turn."""
    n, k = w.shape
    require_whole_groups(scheme, k)
    size, diagonal = scheme.group or k, hessian.diagonal()
    order = np.argsort(-diagonal, kind="stable") if scheme.order else np.arange(k)
    # column c of those in turn has scales of groups[c]
    groups = order // size if scheme.order == "weight" else np.arange(k) // size
    factor = inverse_factor(hessian[np.ix_(order, order)]).astype(np.float32)
    left = np.ascontiguousarray(np.where(diagonal > 0, w, 0).T[order])     # columns as rows
    scales = np.zeros((2, k // size, n), np.float32)                        # and zero points
    if known := scheme.order == "weight" or size == k:
        scales[:] = [each.reshape(n, -1).T for each in fit_scales(scheme, w.reshape(n, 1, -1, size), keep)]
    codes, matrix = np.empty((k, n), np.int8), np.empty((k, n), np.float32)
    for begin in range(0, k, COLUMNS):
        end = min(begin + COLUMNS, k)
        errors = np.empty((end - begin, n), np.float32)
        for c in range(begin, end):
            done, behind = errors[:c - begin], factor[begin:c]
            if not known and c % size == 0:
                whole = left[c:c + size] - behind[:, c:c + size].T @ done
                scales[:, c // size] = [each.reshape(n) for each in
                                        fit_scales(scheme, np.ascontiguousarray(whole.T)[:, None, None],
                                                   keep)]
            column, mine = left[c] - behind[:, c] @ done, scales[:, groups[c]]
            codes[c] = encode(scheme, column, *mine)
            matrix[c] = decode(scheme, codes[c], *mine)
            errors[c - begin] = (column - matrix[c]) / factor[c, c]
        left[end:] -= factor[begin:end, end:].T @ errors
    back = np.argsort(order)
    zeros = None if scheme.symmetric else np.ascontiguousarray(scales[1].T).astype(np.int32)
    return Rounded(np.ascontiguousarray(codes[back].T), np.ascontiguousarray(scales[0].T), zeros,
                   np.ascontiguousarray(matrix[back].T),
                   groups[back].astype(np.int32) if scheme.order == "group" else None)


def inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """U, upper, with Uᵀ U = (H + damping)⁻¹. Inputs that are always 0 count as if they were apart."""
    damped = hessian[::-1, ::-1].copy()
    diagonal = np.einsum("ii->i", damped)
    dead, mean = diagonal == 0, float(diagonal.mean()) or 1.0
    diagonal[dead] = mean
    while True:
        diagonal += DAMPING * mean
        try: lower = np.linalg.cholesky(damped)
        except np.linalg.LinAlgError: mean *= 10
        else: break
    # of the reversed matrix L Lᵀ, the reversed inverse is Uᵀ U with U = L⁻¹ from its end
    return np.ascontiguousarray(_invert(lower)[::-1, ::-1])


def _invert(lower: np.ndarray) -> np.ndarray:
    """The inverse of a lower triangle, by halves."""
    size = len(lower)
    if size <= LEAF: return np.tril(np.linalg.inv(lower))
    half, made = size // 2, np.zeros_like(lower)
    made[:half, :half], made[half:, half:] = _invert(lower[:half, :half]), _invert(lower[half:, half:])
    made[half:, :half] = -made[half:, half:] @ (lower[half:, :half] @ made[:half, :half])
    return made
