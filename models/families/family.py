"""The record of a family, one for each architecture of config.json, and what several use: attention of each
layer, full or a sliding window, and rope that differs between the two.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..rope import RopeConfig, rope_config


@dataclass(frozen=True)
class Family:
    """`defaults` are what transformers' own config class fills in where config.json leaves a key out;
    `honours` the fields that change what is computed, and that this family computes (`config.REFUSED` has
    all); `settings(f)` what of `ModelConfig` differs from LLaMA's. It raises `ModelError`. `head_dim` is the
    key of the elements of a head that rope may rotate. `complete(f)` adds what a file says by other keys."""
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    honours: frozenset[str] = frozenset()
    settings: Callable[[Fields], dict[str, Any]] = lambda f: {}
    head_dim: str = "head_dim"
    complete: Callable[[Fields], Fields] = lambda f: f


FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = (FULL, SLIDING, "attention")    # the last: full attention in older files


def layer_types(f: Fields, slides: Callable[[int], bool]) -> list[str]:
    """layer_types, or where there are none `SLIDING` in the layers of which `slides(i)` is true. Raises
    `ModelError`."""
    if f.get("layer_types") is None:
        return [SLIDING if slides(i) else FULL for i in range(f.positive("num_hidden_layers"))]
    types = f.each_layer("layer_types")
    if unknown := [kind for kind in types if kind not in KINDS]:
        raise ModelError(f"{f.name}: layer type {brief(unknown[0])} is not supported",
                         "full_attention or sliding_attention")
    return types


def windows(f: Fields, types: list[str]) -> tuple[int | None, ...]:
    """sliding_window in the layers that have one. Raises `ModelError`."""
    if SLIDING not in types: return (None,) * len(types)
    if f.get("sliding_window") is None:
        raise ModelError(f"{f.name}: layer_types has sliding_attention, but no sliding_window is in use",
                         "a sliding_window (in Qwen models with use_sliding_window: true), or full_attention "
                         "in every layer", "correct the file, or download it again")
    window = f.positive("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def has_rope(f: Fields) -> list[bool]:
    """Tells for each layer whether it has rope. Raises `ModelError`."""
    if f.get("no_rope_layers"): return [bool(each) for each in f.each_layer("no_rope_layers", (int,))]
    every = f.positive("no_rope_layer_interval")
    return [(i + 1) % every != 0 for i in range(f.positive("num_hidden_layers"))]


def ropes_by_type(f: Fields, types: list[str], theta: float,
                  local_theta: float) -> tuple[RopeConfig | None, ...]:
    """The rope of each layer: rope_parameters has a section for each type. Older files have a
    rope_scaling, of full attention alone. `theta` and `local_theta` are the bases of layers without a
    window and with one, where the section has none. Raises `ModelError`."""
    given, scaling = f.get("rope_parameters") or {}, f.section("rope_scaling")
    flat = not isinstance(given, dict) or any(not isinstance(each, dict | None) for each in given.values())
    if flat or (scaling and given and FULL not in given):
        raise ModelError(f"{f.name}: rope parameters are {brief(given)}",
                         f"a section for {FULL} and one for {SLIDING}")
    sections = {FULL: {"rope_theta": theta, **(given.get(FULL) or {}), **scaling},
                SLIDING: {"rope_theta": local_theta, **(given.get(SLIDING) or {})}}
    d = f.positive("head_dim")
    made = {kind: rope_config(f, section, d) for kind, section in sections.items()}
    return tuple(made[SLIDING if kind == SLIDING else FULL] for kind in types)


def require_silu(f: Fields) -> None:
    """Raises `ModelError` unless hidden_act, which convolutions have too, is silu."""
    own = Fields({"hidden_act": "silu", **f.raw}, f.name)
    own.one_of("hidden_act", ("silu", "swish"), "use a model whose convolutions have silu")


def require_absent(f: Fields, *keys: str) -> None:
    """Raises `ModelError` for a key that says nothing in a family's files."""
    for key in keys:
        if f.get(key) is None: continue
        raise ModelError(f"{f.name}: {key} is {brief(f.get(key))}", "a file without it",
                         "use a model as it was published")
