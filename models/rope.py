"""Rotary position embedding: frequencies and tables, and its parameters in a config.json.

Protocol: `inverse_frequencies(rope)` gives the angular step of each pair of dimensions, `tables(rope, n)`
the cosines and sines of n positions, computed in float32 as transformers does (so that logits agree to
float32 rounding). The rotation pairs dimension i with i + dim/2 (the Hugging Face layout of weights), see
`llama.rotate`.

Sources: RoFormer (arXiv 2104.09864), linear interpolation (arXiv 2306.15595), YaRN (arXiv 2309.00071),
LongRoPE (arXiv 2402.13753), and the frequency bands of Llama 3.1 as published with its weights.

`rope_config` reads the parameters in every spelling that transformers reads: transformers 5 writes
rope_parameters (rope_theta inside); before that rope_theta and rope_scaling stood apart. Where a file has
both, transformers reads rope_scaling.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, brief

from .fields import CORRECT, Fields

MAX_CONTEXT = 1 << 20           # limit: tokens of a context without --max-model-len
MAX_TABLE_BYTES = 256 << 20     # limit: bytes of the tables of a rope without --max-model-len
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "factors")
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
           "mscale", "mscale_all_dim")
NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
          "yarn": ("factor",), "dynamic": ("factor",)}
LISTS = {"factors": ("factors",), "longrope": ("short_factor", "long_factor")}
ORIGINAL = "original_max_position_embeddings"


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


# **** config.json ****

def rope_parameters(f: Fields) -> Mapping[str, Any]:
    """Returns the rope parameters of a file that has the same for all layers. Raises `ModelError` for
    others."""
    given = f.get("rope_scaling") or f.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ModelError(f"{f.name}: rope parameters are {brief(given)}",
                         "an object of numbers, the same for all layers")
    return given


def rope_config(f: Fields, given: Mapping[str, Any], head_dim: int, partial: bool = False) -> RopeConfig:
    """Parameters of a `Fields` with a section `given` of rope parameters. `partial`: the family rotates
    partial_rotary_factor of a head; others ignore the field, unless a scaled kind of rope reads it. Raises
    `ModelError`."""
    kind, name = given.get("rope_type", given.get("type", "default")), f.name
    if kind not in ROPE_TYPES:
        raise ModelError(f"{name}: rope type {brief(kind)} is not supported",
                         f"one of: {', '.join(ROPE_TYPES)}")
    if head_dim % 2: raise ModelError(f"{name}: head_dim is {head_dim}", "an even number: rope rotates pairs")
    both = Fields({"rope_theta": 10000.0, **f.raw, **given}, name)
    dim = _partial_dim(both, head_dim) if partial and kind != "proportional" else head_dim
    if not partial: _require_whole_heads(both, kind)
    mine = Fields(given, name)
    numbers: dict[str, Any] = {key: mine.number(key, zero=key.startswith("mscale"))
               for key in NUMBERS if given.get(key) is not None}
    if missing := [key for key in NEEDED.get(kind, ()) if key not in numbers]:
        raise ModelError(f"{name}: rope type {kind} lacks {', '.join(missing)}", ", ".join(NEEDED[kind]))
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ModelError(f"{name}: low_freq_factor {numbers['low_freq_factor']:g} is not below "
                         f"high_freq_factor {numbers['high_freq_factor']:g}",
                         "a smaller and a larger number of rotations")
    # at 1 every frequency is 1, and YaRN divides by its logarithm
    theta, positions = both.number("rope_theta", 1.0), f.positive("max_position_embeddings")
    original = positions
    # beside the rope parameters it precedes the one among them, as in transformers
    for section in (mine, f):
        if section.get(ORIGINAL) is not None: original = section.positive(ORIGINAL)
    if kind == "longrope" and original < 2:     # its attention factor divides by the logarithm
        raise ModelError(f"{name}: {ORIGINAL} is {original} with rope type longrope", "2 or more", CORRECT)
    if kind == "longrope": numbers.setdefault("factor", positions / original)
    lists: dict[str, Any] = {key: _factors(given, key, dim, name) for key in LISTS.get(kind, ())}
    if kind == "proportional": kind, lists["factors"] = "factors", _make_factors(both, dim, numbers)
    return RopeConfig(kind=kind, theta=theta, dim=dim, original_positions=original,
                      truncate=bool(given.get("truncate", True)), **lists, **numbers)


def _factors(given: Mapping[str, Any], key: str, dim: int, name: str) -> tuple[float, ...]:
    """One for each pair of dimensions."""
    factors = given.get(key)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise ModelError(f"{name}: {key} of the rope parameters has {count} factors",
                         f"{dim // 2}, one for each pair of dimensions that are rotated")
    return tuple(Fields({key: each}, name).number(key) for each in factors)


def _make_factors(both: Fields, dim: int, numbers: dict[str, Any]) -> tuple[float, ...]:
    """Factors of a rope that leaves all pairs but the first partial_rotary_factor of them as they are."""
    share = 1.0 if both.get("partial_rotary_factor") is None else both.number("partial_rotary_factor")
    if (turned := int(share * dim // 2)) > dim // 2:
        raise ModelError(f"{both.name}: partial_rotary_factor is {share:g}", "at most 1", CORRECT)
    return (numbers.get("factor", 1.0),) * turned + (math.inf,) * (dim // 2 - turned)


def _partial_dim(both: Fields, head_dim: int) -> int:
    """Rotated dimensions of a head."""
    if both.get("partial_rotary_factor") is None: return head_dim
    dim = int(head_dim * (factor := both.number("partial_rotary_factor")))
    if factor > 1 or dim < 2 or dim % 2:
        raise ModelError(f"{both.name}: partial_rotary_factor {factor:g} rotates {dim} of {head_dim} "
                         "dimensions", "an even number of a head's dimensions", "correct the file")
    return dim


def _require_whole_heads(both: Fields, kind: str) -> None:
    """Refuses a partial_rotary_factor that transformers cannot run."""
    factor = both.get("partial_rotary_factor")
    if kind in ("default", "proportional") or factor is None: return
    if both.number("partial_rotary_factor") != 1.0:
        raise ModelError(f"{both.name}: partial_rotary_factor is {brief(factor)} with rope type {kind}",
                         "1: this family rotates whole heads", "remove the field, or correct it")
