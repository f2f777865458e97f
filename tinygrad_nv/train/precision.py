"""A model's linear layers in FP8, by the recipe and the rule of a run.

Protocol: `in_fp8(model, recipe, rule)` gives each linear layer whose matrices may be in FP8 a matmul of its
own for training (numerics/fp8.py). A layer of several matrices of a checkpoint (q, k, v) stays as it is where
the rule keeps one of them. Evaluations, samples and what is saved are of the weights as they are: FP8 is for
training alone. Latent attention and experts stay as they are.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import adaptable
from tinygrad_nv.numerics import HighPrecision
from tinygrad_nv.numerics.fp8 import Fp8State, Maximum
from tinygrad_nv.numerics.recipes import Fp8Recipe
from tinygrad_nv.numerics.rule import ALWAYS


@dataclass(frozen=True)
class Fp8Model:
    """The state of the layers in FP8, each named by its matrices, and why others are `kept` as they are."""
    state: Fp8State
    kept: Mapping[str, str]

    def __str__(self) -> str:
        reasons = [f"{name} ({reason})" for name, reason in self.kept.items()]
        more = f"; as they are: {', '.join(reasons)}" if reasons else ""
        return f"{len(self.state.names)} layers in FP8{more}"


def in_fp8(model: Llama, recipe: Fp8Recipe, rule: HighPrecision, maximum: Maximum | None = None) -> Fp8Model:
    """Puts the layers of a model in FP8. Raises `ConfigError` where the rule leaves none, and for a pattern
    that names no matrix."""
    every = adaptable(model)
    for pattern in rule.patterns:
        own = HighPrecision((pattern,))
        if not any(own.excludes(each.name) for each in every):
            raise ConfigError(f"--fp8-exclude {pattern}, which names no matrix",
                              f"names such as {every[0].name}" if every else "a model with linear layers",
                              "correct it: * stands for any text")
    found, kept = {}, dict[str, str]()
    for _, group in groupby(every, key=lambda each: id(each.linear)):
        parts = list(group)
        reasons = [(part.name, rule.why(part.name, part.shape)) for part in parts]
        why = next(((name, reason) for name, reason in reasons if reason is not None), None)
        if why is None: found[" ".join(part.name for part in parts)] = parts[0].linear
        else: kept[why[0]] = why[1]
    if not found:
        words = "; ".join(f"{name}: {reason}" for name, reason in list(kept.items())[:3])
        raise ConfigError("FP8 without a matrix that may be in it" + (f" ({words})" if words else ""),
                          "linear layers that --fp8-exclude leaves",
                          f"name fewer, or choose another --precision; always kept: {', '.join(ALWAYS)}")
    state = Fp8State(recipe, tuple(found), model.device, maximum)
    for linear, layer in zip(found.values(), state.layers, strict=True): linear.training = layer
    return Fp8Model(state, kept)
