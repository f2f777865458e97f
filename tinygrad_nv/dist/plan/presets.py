"""Public architectures by name: presets.json, the config.json that their makers published, without weights.

Protocol: `find(name)` is the configuration of a preset ("llama-3.1-70b"), or of a model directory, GGUF file
or hub name, of which only config.json has to be there. Raises `ModelError`.
"""
from __future__ import annotations

import functools
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ModelError, PlanError
from tinygrad_nv.models.config import ModelConfig, parse_config, read_config

SPELLED = {"llama-3.3-70b": "llama-3.1-70b", "llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b",
           "deepseek-r1": "deepseek-v3"}


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(
        (resources.files("tinygrad_nv.dist.plan") / "presets.json").read_text())
    return found


def names() -> tuple[str, ...]:
    """Returns the names of all presets."""
    return tuple(_presets())


@functools.cache
def preset(name: str) -> ModelConfig:
    """A preset by its name, in any case."""
    key = name.lower()
    if (found := _presets().get(SPELLED.get(key, key))) is None:
        raise ModelError(f"no model {name!r}", f"a model directory, or one of {', '.join(names())}",
                         "name a directory that has the model's config.json")
    return parse_config(found, key)


def find(name: str, path: Path | None = None) -> ModelConfig:
    """The configuration of a model; `path`: where a hub name was found."""
    where = Path(name) if path is None else path
    if name.lower() in _presets() or name.lower() in SPELLED: return preset(name)
    return read_config(where) if os.path.exists(where) else preset(name)


def storage_of(config: ModelConfig) -> str:
    """How a checkpoint's matrices are stored, as `Inference.quantization` names it. Raises `PlanError` for a
    way that plans do not know."""
    if (given := config.quantization) is None: return "bf16"
    method = str(given["quant_method"])
    groups = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    said = [method, given.get("quant_algo"), *(each.get("type") for each in groups)]
    sizes = [given.get("bits"), *(each.get("num_bits") for each in groups)]
    bits, floats = next(filter(None, sizes), None), "float" in said
    if any("fp8" in str(word).lower() for word in said) or (floats and bits == 8): return "fp8"
    if bits in (4, 8) and not floats: return f"int{bits}"
    raise PlanError(f"weights are quantised by {method}", "bf16, fp8, and integers of 8 or 4 bits",
                    "say what is most like it: --quantization int4")
