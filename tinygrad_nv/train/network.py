"""A model to train: from a directory or from a seed, and its parameters by name.

Protocol: `open_network(directory, dtype)` loads a Hugging Face directory, with `quantization` one of floats
whose matrices are quantised as they are read; adapters are trained on such weights, and on quantised
checkpoints. `draw_weights(directory, dtype, seed)` reads its config.json alone, and draws weights as
transformers does: normal with `initializer_range` for matrices and the embedding, ones for norms, zeros for
biases. `parameters(model)` are the tensors that a step changes. A tensor in which a checkpoint's matrices lie
one below the other (q, k, v; gate, up; experts) has the name of the first of them, and `projections` gives
their rows.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.engine.loading import with_quantization
from tinygrad_nv.errors import ConfigError, ModelError
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.lora import adaptable
from tinygrad_nv.models.quantised.layers import matrices
from tinygrad_nv.models.quantised.layers import projections as layer_projections
from tinygrad_nv.models.tied import load_config
from tinygrad_nv.models.weights import load, slots
from tinygrad_nv.numerics import HighPrecision
from tinygrad_nv.numerics.fp8 import Fp8State, Maximum
from tinygrad_nv.numerics.recipes import ALWAYS, Fp8Recipe
from tinygrad_nv.progress import bar
from tinygrad_nv.quant.activations import QWeight
from tinygrad_nv.quant.readers.online import SCHEMES
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.tensor import QTensor, in_memory
from tinygrad_nv.quant.types import buffers

if TYPE_CHECKING:    # a run of one rank does not load it
    from tinygrad_nv.models.parallel import Parallel

INITIALIZER_RANGE = 0.02    # transformers' default


def open_network(directory: Path, dtype: DType, device: str | None = None, quantization: str | None = None,
           parallel: Parallel | None = None) -> Llama:
    """The model of a directory with its weights, or a rank's part of it. Raises `ModelError`, `WeightError`.
    """
    config = with_quantization(quantization, load_config(directory), directory)
    model = _network(config, dtype, device, parallel)
    with bar("loading weights") as shown: load(model, directory, shown)
    return model


def draw_weights(directory: Path, dtype: DType, seed: int, device: str | None = None,
          parallel: Parallel | None = None) -> Llama:
    """A model of the directory's config.json with new weights, or a rank's part of what one rank draws.
    Raises `ModelError`."""
    model = _network(read_config(directory), dtype, device, parallel)
    draw(model, directory, seed)
    return model


def draw(model: Llama, directory: Path, seed: int) -> None:
    """Draws the weights of a model, or of a part or a stage of one those that it has."""
    config, parallel = json.loads((directory / "config.json").read_text(encoding="utf-8")), model.parallel
    scale, random = float(config.get("initializer_range", INITIALIZER_RANGE)), np.random.default_rng(seed)
    norm = 0.0 if model.config.norm_offset else 1.0     # weights that 1 is added to begin at 0

    def value(name: str, tensor: Tensor) -> np.ndarray:
        shape = tuple(int(n) for n in tensor.shape)
        if len(shape) > 1: return random.standard_normal(shape, np.float32) * np.float32(scale)
        return np.full(shape, norm if name.endswith("norm.weight") else 0.0, np.float32)
    if parallel is not None and parallel.ranks > 1:
        from tinygrad_nv.train.cuts import take  # which loads dist/
        take(model, value)
        return
    own, whole = name_parameters(model), model if parallel is None else Llama(parallel.whole, model.dtype,
                                                                              model.device)
    for name, each in name_parameters(whole).items():
        made = value(name, each)
        if (tensor := own.get(name)) is not None:
            tensor.assign(Tensor(made, device=tensor.device).cast(tensor.dtype)).realize()


def _network(config: ModelConfig, dtype: DType, device: str | None, parallel: Parallel | None) -> Llama:
    if parallel is None: return Llama(config, dtype, device)
    from tinygrad_nv.models.parallel import local_config  # which loads dist/
    own = local_config(config, parallel.ranks, parallel.experts)
    return Llama(own, dtype, device, parallel=parallel)


def require_trainable(model: Llama, adapter: bool, fp8: bool) -> None:
    """Raises `ModelError` for quantised weights that cannot be trained, or have no `adapter` trained on them;
    with `fp8` matmuls are those of floats."""
    if model.config.quantization is None: return
    if not adapter:
        raise ModelError("the weights are quantised", "weights of float32, bfloat16 or float16",
                         "train an adapter on them (--use-peft), or the model that they were made of")
    if fp8:
        raise ModelError("the weights are quantised, and --precision is of FP8", "weights of floats, which "
                         "FP8 rounds itself", "choose --precision bfloat16, or leave it out")
    if any(isinstance(each, SparseTensor) for each, _ in matrices(model)):
        raise ModelError("the weights are 2:4 sparse", "dense weights, quantised or not",
                         "train an adapter on the model that they were made of")


def with_empty_matrices(model: Llama, scheme: str) -> None:
    """Gives a model that is planned quantised matrices of a scheme (`SCHEMES`), without memory."""
    type = SCHEMES[scheme]
    for number in range(len(model.blocks)):
        for linear in {id(each.linear): each.linear for each in layer_projections(model, number)}.values():
            n, k = (int(extent) for extent in linear.weight.shape)
            empty = {name: Tensor.empty(*shape, dtype=in_memory(dtype), device=model.device)
                     for name, (shape, dtype) in buffers(type, n, k).items()}
            linear.parts = QWeight(QTensor(type, (n, k), empty)),


def whole_head(model: Llama) -> None:
    """Dequantises the head, which the loss reads: it is multiplied in parts of the vocabulary."""
    if (head := model.quantised_head) is None: return
    model.head = head.matrix.dequantize(model.dtype).contiguous().realize().is_param_(False)


def parameters(model: Llama) -> dict[str, Tensor]:
    """Returns the parameters that a step changes, by name. Biases that choose experts are no parameters:
    DeepSeek-V3 moves them by load, not by a gradient."""
    fixed = {id(block.feed_forward.choice_bias) for block in model.blocks
             if isinstance(block.feed_forward, MixtureOfExperts)}
    return {name: tensor.is_param_() for name,
            tensor in name_parameters(model).items() if id(tensor) not in fixed}


def name_parameters(model: Llama) -> dict[str, Tensor]:
    """The tensors of a network, each by the first of its names in the whole network: of a stage of a pipeline
    layers have the numbers that they have there."""
    if first := 0 if model.parallel is None else model.parallel.layers.start:
        from tinygrad_nv.models.shares import move_layer  # which loads dist/
    out, seen = dict[str, Tensor](), set[int]()
    for name, slot in slots(model).items():
        if id(slot.tensor) in seen: continue
        seen.add(id(slot.tensor))
        out[move_layer(name, first) if first else name] = slot.tensor
    return out


def projections(model: Llama) -> dict[str, tuple[int, ...]]:
    """Rows of the matrices of a checkpoint in each parameter that has several, by the parameter's name."""
    names, rows = {id(tensor): name for name, tensor in name_parameters(model).items()}, dict[str,
                                                                                              list[int]]()
    for slot in slots(model).values():
        if slot.tensor.ndim == 2: rows.setdefault(names[id(slot.tensor)], []).append(slot.shape[0])
    return {name: tuple(found) for name, found in rows.items() if len(found) > 1}


def extend(model: Llama, length: int) -> None:
    """Has rope tables for rows of so many tokens. Raises `ConfigError` for more than the model has."""
    if length > model.positions:
        raise ConfigError(f"--max-length {length}", f"at most {model.positions}: the model's "
                          "max_position_embeddings", "lower it, or raise that in config.json")
    model.rope_rows = length


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
    """Puts the layers of a model in FP8, by the recipe and the rule of a run: each linear layer whose
    matrices may be in FP8 gets a matmul of its own for training (numerics/fp8.py). A layer of several
    matrices of a checkpoint (q, k, v) stays as it is where the rule keeps one of them; so do latent attention
    and experts. Evaluations, samples and what is saved are of the weights as they are. Raises `ConfigError`
    where the rule leaves none, and for a pattern that names no matrix."""
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
