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

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError, ModelError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import load, slots
from tinygrad_nv.progress import bar

INITIALIZER_RANGE = 0.02    # transformers' default


def opened(directory: Path, dtype: DType, device: str | None = None) -> Llama:
    """The model of a directory with its weights. Raises `ModelError`, `WeightError`."""
    model = Llama(read_config(directory), dtype, device)
    with bar("loading weights") as shown: load(model, directory, shown)
    return model


def drawn(directory: Path, dtype: DType, seed: int, device: str | None = None) -> Llama:
    """A model of the directory's config.json with new weights. Raises `ModelError`."""
    model = Llama(read_config(directory), dtype, device)
    draw(model, directory, seed)
    return model


def draw(model: Llama, directory: Path, seed: int) -> None:
    """Draws the weights of a model, or of a stage of one those that it has."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    scale, random = float(config.get("initializer_range", INITIALIZER_RANGE)), np.random.default_rng(seed)
    norm = 0.0 if model.config.norm_offset else 1.0     # weights that 1 is added to begin at 0
    whole = model if model.parallel is None else Llama(model.parallel.whole, model.dtype, model.device)
    own = named(model)
    for name, each in named(whole).items():
        shape = tuple(int(n) for n in each.shape)
        if len(shape) > 1: values = random.standard_normal(shape, np.float32) * np.float32(scale)
        else: values = np.full(shape, norm if name.endswith("norm.weight") else 0.0, np.float32)
        if (tensor := own.get(name)) is not None:
            tensor.assign(Tensor(values, device=tensor.device).cast(tensor.dtype)).realize()


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
    return {name: tensor.is_param_() for name, tensor in named(model).items() if id(tensor) not in fixed}


def named(model: Llama) -> dict[str, Tensor]:
    """The tensors of a network, each by the first of its names in the whole network: of a stage of a pipeline
    layers have the numbers that they have there."""
    if first := 0 if model.parallel is None else model.parallel.layers.start:
        from tinygrad_nv.models.shares import moved  # which loads dist/
    out, seen = dict[str, Tensor](), set[int]()
    for name, slot in slots(model).items():
        if id(slot.tensor) in seen: continue
        seen.add(id(slot.tensor))
        out[moved(name, first) if first else name] = slot.tensor
    return out


def projections(model: Llama) -> dict[str, tuple[int, ...]]:
    """Rows of the matrices of a checkpoint in each parameter that has several, by the parameter's name."""
    names, rows = {id(tensor): name for name, tensor in named(model).items()}, dict[str, list[int]]()
    for slot in slots(model).values():
        if slot.tensor.ndim == 2: rows.setdefault(names[id(slot.tensor)], []).append(slot.shape[0])
    return {name: tuple(found) for name, found in rows.items() if len(found) > 1}


def extend(model: Llama, length: int) -> None:
    """Has rope tables for rows of so many tokens. Raises `ConfigError` for more than the model has."""
    if length > model.positions:
        raise ConfigError(f"--max-length {length}", f"at most {model.positions}: the model's "
                          "max_position_embeddings", "lower it, or raise that in config.json")
    model.rope_rows = length
