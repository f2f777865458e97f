"""Fourier transforms, frames of a signal, mel filters.

Protocol: a complex number is two elements in the last dimension. A transform of n points is a matmul with the
n × n matrix of its sines and cosines, so it is our matmul that runs.
"""
from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, helper
from tinygrad import Tensor

from tinygrad_nv.onnx.elements import Value, from_numpy
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import Call, op


def _transform(x: Tensor, length: int, inverse: bool, onesided: bool) -> Tensor:
    """The transform of x [..., n, 1 or 2] along n: [..., length or length // 2 + 1, 1 or 2]."""
    if inverse and onesided: return _real_inverse(x, length)
    number = length // 2 + 1 if onesided else length
    real, imaginary = _cut(x[..., 0], length), _cut(x[..., 1], length) if x.shape[-1] == 2 else None
    cosine, sine = _waves(length, number, x)
    if inverse: sine = -sine
    a, b = real @ cosine, -(real @ sine)
    if imaginary is not None: a, b = a + imaginary @ sine, b + imaginary @ cosine
    made = a.stack(b, dim=-1)
    return made / length if inverse else made


def _waves(length: int, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π jk / length: [length, number], computed in float64."""
    budget().check_bytes((length, number), 8)
    angle = np.outer(np.arange(length), np.arange(number)) % length * (2 * math.pi / length)
    return (Tensor(np.cos(angle)).cast(like.dtype), Tensor(np.sin(angle)).cast(like.dtype))


def _cut(x: Tensor, length: int) -> Tensor:
    """The first elements along the last dimension, zeros after them where there are too few."""
    have = int(x.shape[-1])
    return x[..., :length] if have >= length else x.pad((*[None] * (x.ndim - 1), (0, length - have)))


def _real_inverse(x: Tensor, length: int) -> Tensor:
    """Real numbers from the first half of their transform."""
    half = length // 2 + 1
    real, imaginary = _cut(x[..., 0], half), _cut(x[..., 1], half)
    cosine, sine = _waves(length, half, x)
    twice = np.full(half, 2.0)
    twice[0] = 1.0
    if length % 2 == 0: twice[-1] = 1.0
    weight = Tensor(twice).cast(x.dtype)
    made = (real * weight) @ cosine.T - (imaginary * weight) @ sine.T
    return (made / length).unsqueeze(-1)


@op("DFT", since=20, host=(1, 2))
def dft(x: Tensor, dft_length: np.ndarray | None = None, axis: np.ndarray | None = None, inverse: int = 0,
        onesided: int = 0) -> Tensor:
    """The discrete Fourier transform along an axis."""
    return _dft(x, dft_length, -2 if axis is None else int(axis), inverse, onesided)


@op("DFT", since=17, host=(1,))
def dft_17(x: Tensor, dft_length: np.ndarray | None = None, axis: int = 1, inverse: int = 0,
           onesided: int = 0) -> Tensor:
    """Computes `dft` with its axis as an attribute."""
    return _dft(x, dft_length, axis, inverse, onesided)


def _dft(x: Tensor, dft_length: np.ndarray | None, axis: int, inverse: int, onesided: int) -> Tensor:
    d = axis % x.ndim
    have = int(x.shape[d])
    length = int(dft_length) if dft_length is not None else 2 * (have - 1) if inverse and onesided else have
    return _transform(x.transpose(d, -2), length, bool(inverse), bool(onesided)).transpose(d, -2)


@op("STFT", host=(1, 3))
def stft(signal: Tensor, frame_step: np.ndarray, window: Tensor | None = None,
         frame_length: np.ndarray | None = None, onesided: int = 1) -> Tensor:
    """Transforms of frames of a signal [batch, samples, 1 or 2]: [batch, frames, bins, 2]."""
    step = int(frame_step)
    assert frame_length is not None or window is not None, "neither a window nor frame_length"
    length = int(frame_length) if frame_length is not None else int(window.shape[0])    # type: ignore[union-attr]
    frames = 1 + (int(signal.shape[1]) - length) // step
    budget().expect(frames, 1)
    pieces = [signal[:, i * step:i * step + length] for i in range(frames)]
    made = Tensor.stack(*pieces, dim=1)
    if window is not None: made = made * window.reshape(1, 1, -1, 1)
    return _transform(made, length, False, bool(onesided))


WINDOWS = {"HannWindow": (0.5, 0.5), "HammingWindow": (25 / 46, 21 / 46), "BlackmanWindow": (0.42, 0.5, 0.08)}


@op(*WINDOWS, host=(0,), call=True)
def window(call: Call, size: np.ndarray, output_datatype: int = TensorProto.FLOAT, periodic: int = 1
           ) -> Value:
    """Σ (-1)ᵏ aₖ cos(2πk i / n), computed in float64."""
    n = int(size)
    budget().check_bytes((n,), 8)
    angle = np.arange(n) * (2 * math.pi / (n if periodic else n - 1))
    made = sum((-1) ** k * a * np.cos(k * angle) for k, a in enumerate(WINDOWS[call.node.op]))
    return from_numpy(np.asarray(made).astype(helper.tensor_dtype_to_np_dtype(output_datatype)))


@op("MelWeightMatrix", host=(0, 1, 2, 3, 4))
def mel(bins: np.ndarray, length: np.ndarray, rate: np.ndarray, low: np.ndarray, high: np.ndarray,
        output_datatype: int = TensorProto.FLOAT) -> Value:
    """Triangles on the mel scale 2595 log₁₀(1 + f / 700): [length // 2 + 1, bins]."""
    def mels(hertz: float) -> float: return 2595 * math.log10(1 + hertz / 700)
    first, last, n = mels(float(low)), mels(float(high)), int(bins)
    budget().check_bytes((int(length) // 2 + 1, n), 8)
    points = first + np.arange(n + 2) * ((last - first) / (n + 2))
    places = ((int(length) + 1) * 700 * (10 ** (points / 2595) - 1) // int(rate)).astype(int)
    made = np.zeros((int(length) // 2 + 1, n))
    for i, (left, centre, right) in enumerate(zip(places, places[1:], places[2:], strict=False)):
        if left == centre: made[centre, i] = 1
        for j in range(left, centre + 1 if left < centre else left): made[j, i] = (j - left) / (centre - left)
        for j in range(centre, right): made[j, i] = (right - j) / (right - centre)
    return from_numpy(made.astype(helper.tensor_dtype_to_np_dtype(output_datatype)))
