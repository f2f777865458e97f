"""Samples to the log-mel spectrogram that the encoder reads, as transformers' WhisperFeatureExtractor has it.

Protocol: frames of 25 ms, one each 10 ms, under a periodic Hann window, of a signal that is mirrored at both
ends. Their power spectra times triangles of equal area on the mel scale (Slaney, Auditory Toolbox, 1998),
which is linear up to 1 kHz and logarithmic beyond. Then log₁₀ of at least 1e-10, nothing more than 8 below
the largest of the whole recording, (x + 4) / 4. Recordings of at most a window are filled up with silence;
longer ones are as they are.
"""
from __future__ import annotations

from functools import cache

import numpy as np

RATE = 16000        # samples a second
FRAME, HOP = 400, 160       # samples
CHUNK = 1024        # frames whose spectra are computed at a time: 3 MB
MEL_LINEAR_HZ, MEL_BREAK_HZ, MEL_LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27
HIGHEST_HZ = 8000.0
FLOOR, RANGE = 1e-10, 8.0


def log_mel(samples: np.ndarray, mels: int, window: int) -> np.ndarray:
    """The spectrogram, float32 [frames, mels], of samples at 16 kHz, float32 [n], filled up to `window`
    samples. Frames are max(n, window) / 160, rounded down."""
    signal = np.asarray(samples, np.float32)
    if len(signal) < window: signal = np.pad(signal, (0, window - len(signal)))
    frames = len(signal) // HOP
    signal = np.pad(signal, FRAME // 2, "reflect")
    shifted = np.lib.stride_tricks.sliding_window_view(signal, FRAME)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    out, filters = np.empty((frames, mels), np.float32), mel_filters(mels)
    for first in range(0, frames, CHUNK):
        spectra = np.fft.rfft(shifted[first:first + CHUNK] * hann)     # float64: hann is
        powers = np.square(np.abs(spectra)) @ filters
        out[first:first + CHUNK] = np.log10(np.maximum(powers, FLOOR))
    return (np.maximum(out, out.max() - np.float32(RANGE)) + 4) / 4


@cache
def mel_filters(mels: int) -> np.ndarray:
    """Weights of each frequency of a spectrum, float64 [201, mels]: triangles between three neighbours of
    mels + 2 points from 0 to 8 kHz, 2 / width high."""
    points = hertz(np.linspace(0, mel_of(HIGHEST_HZ), mels + 2))
    bins = np.linspace(0, RATE / 2, FRAME // 2 + 1)[:, None]
    low, middle, high = points[:-2], points[1:-1], points[2:]
    rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def mel_of(hz: float) -> float:
    """The place of a frequency on Slaney's mel scale."""
    if hz < MEL_BREAK_HZ: return hz / MEL_LINEAR_HZ
    return float(MEL_BREAK_HZ / MEL_LINEAR_HZ + np.log(hz / MEL_BREAK_HZ) / MEL_LOG_STEP)


def hertz(mel: np.ndarray) -> np.ndarray:
    """Frequencies at places on Slaney's mel scale."""
    knee = MEL_BREAK_HZ / MEL_LINEAR_HZ
    return np.where(mel < knee, mel * MEL_LINEAR_HZ,
                    MEL_BREAK_HZ * np.exp(MEL_LOG_STEP * np.maximum(mel - knee, 0)))
