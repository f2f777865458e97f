"""A model to train: from a directory or from a seed, and its parameters by name.

Protocol: `opened(directory, dtype)` loads a Hugging Face directory; `drawn(directory, dtype, seed)` reads its
config.json alone, and draws weights as transformers does: normal with `initializer_range` for matrices and
the embedding, ones for norms, zeros for biases. `parameters(model)` are the tensors that a step changes. A
tensor in which a checkpoint's matrices lie one below the other (q, k, v; gate, up; experts) has the name of
the first of them, and `projections` gives their rows.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError, ModelError
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import load, slots
from tinygrad_nv.progress import bar

if TYPE_CHECKING:    # a run of one rank does not load it
    from tinygrad_nv.models.parallel import Parallel

INITIALIZER_RANGE = 0.02    # transformers' default


def opened(directory: Path, dtype: DType, device: str | None = None, parallel: Parallel | None = None
           ) -> Llama:
    """The model of a directory with its weights, or a rank's part of it. Raises `ModelError`, `WeightError`.
    """
    model = _network(read_config(directory), dtype, device, parallel)
    with bar("loading weights") as shown: load(model, directory, shown)
    return model


def drawn(directory: Path, dtype: DType, seed: int, device: str | None = None,
          parallel: Parallel | None = None) -> Llama:
    """A model of the directory's config.json with new weights, or a rank's part of what one rank draws.
    Raises `ModelError`."""
    model = _network(read_config(directory), dtype, device, parallel)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    scale, random = float(config.get("initializer_range", INITIALIZER_RANGE)), np.random.default_rng(seed)
    norm = 0.0 if model.config.norm_offset else 1.0     # weights that 1 is added to begin at 0

    def value(name: str, tensor: Tensor) -> np.ndarray:
        shape = tuple(int(n) for n in tensor.shape)
        if len(shape) > 1: return random.standard_normal(shape, np.float32) * np.float32(scale)
        return np.full(shape, norm if name.endswith("norm.weight") else 0.0, np.float32)
    if parallel is not None:
        from tinygrad_nv.train.cuts import take  # which loads dist/
        take(model, value)
        return model
    first = dict[int, tuple[str, Tensor]]()
    for name, slot in slots(model).items(): first.setdefault(id(slot.tensor), (name, slot.tensor))
    for name, tensor in first.values():
        made = Tensor(value(name, tensor), device=tensor.device)
        tensor.assign(made.cast(tensor.dtype)).realize()
    return model


def _network(config: ModelConfig, dtype: DType, device: str | None, parallel: Parallel | None) -> Llama:
    if parallel is None: return Llama(config, dtype, device)
    from tinygrad_nv.models.parallel import local_config  # which loads dist/
    own = local_config(config, parallel.ranks, parallel.experts)
    return Llama(own, dtype, device, parallel=parallel)


def require_floats(model: Llama) -> None:
    """Raises `ModelError` for weights that are quantised."""
    if model.config.quantization is not None or model.quantised_head is not None or \
            model.quantised_embedding is not None:
        raise ModelError("the weights are quantised", "weights of float32, bfloat16 or float16",
                         "train the model that they were made of")


def parameters(model: Llama) -> dict[str, Tensor]:
    """What a step changes, by name. Biases that choose experts are no parameters: DeepSeek-V3 moves them by
    load, not by a gradient."""
    fixed = {id(block.feed_forward.choice_bias) for block in model.blocks
             if isinstance(block.feed_forward, MixtureOfExperts)}
    out, seen = dict[str, Tensor](), set[int]()
    for name, slot in slots(model).items():
        if id(slot.tensor) in seen or id(slot.tensor) in fixed: continue
        seen.add(id(slot.tensor))
        out[name] = slot.tensor.is_param_()
    return out


def projections(model: Llama) -> dict[str, tuple[int, ...]]:
    """Rows of the matrices of a checkpoint in each parameter that has several, by the parameter's name."""
    names, rows = dict[int, str](), dict[str, list[int]]()
    for name, slot in slots(model).items():
        first = names.setdefault(id(slot.tensor), name)
        if slot.tensor.ndim == 2: rows.setdefault(first, []).append(slot.shape[0])
    return {name: tuple(found) for name, found in rows.items() if len(found) > 1}


def extend(model: Llama, length: int) -> None:
    """Has rope tables for rows of so many tokens. Raises `ConfigError` for more than the model has."""
    if length > model.positions:
        raise ConfigError(f"--max-length {length}", f"at most {model.positions}: the model's "
                          "max_position_embeddings", "lower it, or raise that in config.json")
    model.rope_rows = length
