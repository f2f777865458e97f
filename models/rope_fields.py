"""The rope parameters of a config.json, in every spelling that transformers reads, as a `RopeConfig`.

Protocol: transformers 5 writes rope_parameters (rope_theta inside); before that rope_theta and rope_scaling
stood apart. Where a file has both, transformers reads rope_scaling.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from .fields import CORRECT, Fields
from .rope import ROPE_TYPES, RopeConfig

NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
           "mscale", "mscale_all_dim")
NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
          "yarn": ("factor",), "dynamic": ("factor",)}
ORIGINAL = "original_max_position_embeddings"


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
    dim = _partial_dim(both, head_dim) if partial else head_dim
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
    lists: dict[str, Any] = {key: _factors(given, key, dim, name) for key in _LISTS.get(kind, ())}
    return RopeConfig(kind=kind, theta=theta, dim=dim, original_positions=original,
                      truncate=bool(given.get("truncate", True)), **lists, **numbers)


_LISTS = {"factors": ("factors",), "longrope": ("short_factor", "long_factor")}


def _factors(given: Mapping[str, Any], key: str, dim: int, name: str) -> tuple[float, ...]:
    """One for each pair of dimensions."""
    factors = given.get(key)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise ModelError(f"{name}: {key} of the rope parameters has {count} factors",
                         f"{dim // 2}, one for each pair of dimensions that are rotated")
    return tuple(Fields({key: each}, name).number(key) for each in factors)


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
    if kind == "default" or factor is None: return
    if both.number("partial_rotary_factor") != 1.0:
        raise ModelError(f"{both.name}: partial_rotary_factor is {brief(factor)} with rope type {kind}",
                         "1: this family rotates whole heads", "remove the field, or correct it")
