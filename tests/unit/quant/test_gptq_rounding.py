"""GPTQ against the algorithm that it makes fast: optimal brain quantisation (arXiv 2208.11580), in float64.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from compressed_tensors.quantization.utils import mxfp_utils

from tinygrad_nv.quantize.gptq import DAMPING, gptq, inverse_factor
from tinygrad_nv.quantize.rounding import e8m0, round_matrix
from tinygrad_nv.quantize.schemes import Options, Scheme, scheme_of

N, K, GROUP = 24, 192, 32


def exact(scales: np.ndarray) -> np.ndarray: return scales


def wider(scales: np.ndarray) -> np.ndarray:
    """A row's largest number lies between two codes of a symmetric scale, and rounding in float32 decides to
    which it goes; with scales that are 2 % larger it does not."""
    return scales * np.float32(1.02)


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """A matrix, and inputs that depend on each other and differ in size."""
    rng = np.random.default_rng(1)
    sizes = np.logspace(-1, 1, K)[rng.permutation(K)]
    x = rng.standard_normal((512, 48)) @ rng.standard_normal((48, K)) * sizes
    return rng.standard_normal((N, K)).astype(np.float32), x + 0.1 * rng.standard_normal(x.shape)


def scheme(order: str, symmetric: bool = True) -> Scheme:
    return scheme_of("w4a16", Options(GROUP, symmetric, "minmax", "gptq", "gptq", order))


def scales_of(w: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scale and zero point of each row."""
    low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
    if symmetric: return np.maximum(-low, high) / 7.5 * 1.02, np.zeros(len(w))
    scales = (high - low) / 15 * 1.02
    return scales, np.clip(np.rint(-8 - low / scales), -8, 7)


def brain_quantised(w: np.ndarray, h: np.ndarray, order: str,
                    symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and matrix. After each column its row and column of the inverse are eliminated."""
    w, k = w.astype(np.float64), w.shape[1]
    inverse = np.linalg.inv(h + DAMPING * np.trace(h) / k * np.eye(k))
    turn = np.argsort(-np.diag(h), kind="stable") if order != "none" else np.arange(k)
    first = [scales_of(w[:, i:i + GROUP], symmetric) for i in range(0, k, GROUP)]
    codes, made = np.zeros(w.shape, int), np.zeros(w.shape)
    for i, q in enumerate(turn):
        if order == "weight": s, z = first[q // GROUP]
        elif i % GROUP == 0: s, z = scales_of(w[:, turn[i:i + GROUP]], symmetric)
        codes[:, q] = np.clip(np.rint(w[:, q] / s + z), -8, 7)
        made[:, q] = (codes[:, q] - z) * s
        left = turn[i + 1:]
        w[:, left] -= np.outer(w[:, q] - made[:, q], inverse[q, left]) / inverse[q, q]
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return codes, made


def error(w: np.ndarray, made: np.ndarray, x: np.ndarray) -> float:
    """Σ ‖(W − Ŵ) X‖²."""
    return float(np.square((w - made).astype(np.float64) @ x.T).sum())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("order", ["none", "weight", "group"])
def test_it_is_optimal_brain_quantisation(drawn: tuple[np.ndarray, np.ndarray], order: str, symmetric: bool):
    (w, x), kind = drawn, scheme(order, symmetric)
    found = gptq(kind, w, x.T @ x, wider)
    codes, made = brain_quantised(w, x.T @ x, order, symmetric)
    # a number between two codes may still go to the other in float32, and what follows it in the row differs
    assert (found.codes == codes).all(1).mean() > 0.9
    assert error(w, found.matrix, x) == pytest.approx(error(w, made, x), rel=1e-3)
    nearest = round_matrix(replace(kind, method="rtn", order=""), w, exact)
    assert error(w, found.matrix, x) < 0.5 * error(w, nearest.matrix, x)


def test_scales_and_groups_say_what_the_matrix_is(drawn: tuple[np.ndarray, np.ndarray]):
    w, x = drawn
    found = gptq(scheme("group", False), w, x.T @ x, exact)
    assert found.groups is not None
    assert found.zeros is not None
    assert (np.bincount(found.groups) == GROUP).all()
    assert (np.diff(found.groups) < 0).any()
    of = found.groups
    codes = (found.codes - found.zeros[:, of]).astype(np.float32)
    np.testing.assert_array_equal(found.matrix, codes * found.scales[:, of])


def test_a_channel_has_one_scale(drawn: tuple[np.ndarray, np.ndarray]):
    """The last columns beyond a block of 128, and codes of 8 bits, whose error is far smaller."""
    w, x = drawn
    kind = scheme_of("w8a8", Options(method="gptq"))
    found, nearest = gptq(kind, w, x.T @ x, exact), round_matrix(kind, w, exact)
    assert found.scales.shape == (N, 1)
    assert error(w, found.matrix, x) < 0.5 * error(w, nearest.matrix, x)


def test_the_factor_is_the_damped_inverses(drawn: tuple[np.ndarray, np.ndarray]):
    x = drawn[1]
    h = x.T @ x
    factor = inverse_factor(np.kron(np.eye(3), h))      # large enough to be inverted by halves
    damped = h + DAMPING * np.trace(h) / K * np.eye(K)
    assert np.array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor, np.kron(np.eye(3), np.linalg.inv(damped)), rtol=0,
                               atol=1e-9 * float(np.abs(np.linalg.inv(damped)).max()))


def test_inputs_that_are_always_0(drawn: tuple[np.ndarray, np.ndarray]):
    w, x = drawn
    silent = x * (np.arange(K) % 3 > 0)
    found = gptq(scheme("weight"), w, silent.T @ silent, exact)
    assert np.isfinite(found.matrix).all()
    assert error(w, found.matrix, silent) < 0.5 * error(w, round_matrix(scheme("weight"), w, exact).matrix,
                                                        silent)
    assert not gptq(scheme("none"), w, np.zeros((K, K)), exact).codes.any()


@pytest.mark.parametrize("largest", [4, 6, 6.99, 7, 7.01, 14, 28, 0.875, 0.8749999, 2.0 ** -100])
def test_scales_of_mxfp4_are_those_of_compressed_tensors(largest: float):
    """Ties too: at 7 · 2^e the scale doubles."""
    w = np.zeros((1, 32), np.float32)
    w[0, 5] = -largest
    found = e8m0(round_matrix(scheme_of("mxfp4"), w, exact).scales).item()
    assert found == mxfp_utils.generate_mx_scales(torch.tensor([float(largest)])).item()
