"""Rotary position embedding: frequencies and tables.

Protocol: `inverse_frequencies(rope)` gives the angular step of each pair of dimensions, `tables(rope, n)`
the cosines and sines of n positions, computed in float32 as transformers does (so that logits agree to
float32 rounding). The rotation pairs dimension i with i + dim/2 (the Hugging Face layout of weights), see
`llama.rotate`.

Sources: RoFormer (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071),
LongRoPE (arXiv 2402.13753), and the frequency bands of Llama 3.1 as published with its weights.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_CONTEXT = 1 << 20           # limit: tokens of a context without --max-model-len
MAX_TABLE_BYTES = 256 << 20     # limit: bytes of the tables of a rope without --max-model-len
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True)
class RopeConfig:
    """`dim` rotary dimensions of each head, base `theta`; the rest is used by the kinds that name it.

    `dynamic` differs from `default` only past the trained length, which we never exceed. `factors`, one of
    each pair, divide frequencies: GGUF files have the bands of Llama 3 so. `longrope` divides them by
    `short_factor`, or by `long_factor` where sequences may be longer than `original_positions`.
    """
    kind: str
    theta: float
    dim: int
    original_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def distinct(ropes: Sequence[RopeConfig | None]) -> tuple[RopeConfig, ...]:
    """The ropes of all layers, each once."""
    return tuple(dict.fromkeys(each for each in ropes if each is not None))


def default_context(ropes: Sequence[RopeConfig]) -> int:
    """Tokens whose tables are within `MAX_TABLE_BYTES`: config.json's positions are in no tensor."""
    return max(min(MAX_CONTEXT, MAX_TABLE_BYTES // (4 * sum(rope.dim for rope in ropes) or 1)), 2048)


def inverse_frequencies(rope: RopeConfig, positions: int) -> np.ndarray:
    """Radians per position of each of the dim/2 pairs, float32, for sequences of up to `positions`."""
    exponents = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "factors": return frequencies / np.array(rope.factors, np.float32)
    if rope.kind == "longrope":
        factors = rope.long_factor if positions > rope.original_positions else rope.short_factor
        return (frequencies / np.array(factors, np.float32)).astype(np.float32)
    if rope.kind == "linear": return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3": return _llama3(rope, frequencies)
    if rope.kind == "yarn": return _yarn(rope, frequencies)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Short waves kept, long waves stretched by `factor`, a linear blend between."""
    turns = rope.original_positions * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(blend, 0.0, 1.0).astype(np.float32)
    return ((1 - smooth) * frequencies / np.float32(rope.factor) + smooth * frequencies).astype(np.float32)


def _yarn(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """YaRN's ramp by dimension between interpolated and unchanged frequencies (paper §3.2)."""
    def dimension(turns: float) -> float:
        period = rope.original_positions / (turns * 2 * math.pi)  # positions a radian
        return rope.dim * math.log(period) / (2 * math.log(rope.theta))
    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate: low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)
    return (frequencies / np.float32(rope.factor) * ramp + frequencies * (1 - ramp)).astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """The scale of cosines and sines: YaRN's (its temperature, paper §3.3), LongRoPE's (paper §3.3), else
    1."""
    if rope.kind not in ("yarn", "longrope"): return 1.0
    if rope.attention_factor is not None: return rope.attention_factor
    if rope.kind == "longrope":
        if rope.factor <= 1: return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))
    def scale(m: float) -> float: return 1.0 if rope.factor <= 1 else 0.1 * m * math.log(rope.factor) + 1.0
    if rope.mscale and rope.mscale_all_dim: return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def tables(rope: RopeConfig, positions: int, longest: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32, shape (positions, dim/2) each, for sequences of up to `longest` tokens, by
    default `positions`."""
    frequencies = inverse_frequencies(rope, positions if longest is None else longest)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = np.float32(attention_factor(rope))
    return np.cos(angles) * factor, np.sin(angles) * factor
