"""Tensors that an encoder's checkpoint must hold, and where in the network each is stored.

Protocol: as weights.py. Names are found with and without the prefix of a whole model ("bert."), and
LayerNorm's with their oldest names, gamma and beta. Matrices that a network stacks are stored as one, or
apart.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinygrad import Tensor

from tinygrad_nv.runtime.memory import allocate_arena
from tinygrad_nv.runtime.memory_pool import label_allocations

from .checkpoint import TensorEntry, open_checkpoint
from .encoder import Encoder
from .encoder_config import EncoderConfig
from .fit import Module, Shapes, Stack, require_sizes
from .layers import LayerNorm, Linear
from .weights import WeightSlice, check, fill_slots, tensors_of

OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def whole(tensor: Tensor) -> WeightSlice:
    """All rows of a parameter."""
    return WeightSlice(tensor, 0, tuple(map(int, tensor.shape)))


def encoder_slots(model: Encoder) -> dict[str, WeightSlice]:
    """Every tensor that the checkpoint must hold, by its name without the model's prefix."""
    names, out = model.config.names, dict[str, WeightSlice]()

    def add(stored: tuple[str, ...], one: Linear | LayerNorm) -> None:
        for kind, tensor in (("weight", one.weight), ("bias", one.bias)):
            if tensor is None: continue
            rows, *rest = map(int, tensor.shape)
            count = rows // len(stored)
            for at, name in enumerate(stored):
                out[f"{name}.{kind}"] = WeightSlice(tensor, at * count, (count, *rest))
    for name, table in ((names.words, model.words), (names.positions, model.positions),
                        (names.types, model.types), (names.distances, model.distances)):
        if table is not None: out[f"{name}.weight"] = whole(table)
    add((names.embedding_norm,), model.norm)
    if model.final_norm is not None: add((names.final_norm,), model.final_norm)
    for i, block in enumerate(model.blocks):
        named: list[tuple[tuple[str, ...], Linear | LayerNorm | None]] = [
            (names.qkv, block.qkv), ((names.output,), block.output), (names.up, block.up),
            ((names.down,), block.down), ((names.attention_norm,), block.attention_norm),
            ((names.norm,), block.norm)]
        for stored, one in named:
            if one is not None: add(tuple(f"{names.layer.format(i)}.{each}" for each in stored), one)
    return out


def encoder_entries(config: EncoderConfig, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The encoder's tensors by the names of `encoder_slots`."""
    out = {}
    for name, entry in entries.items():
        for prefix in config.names.prefixes: name = name.removeprefix(prefix)
        for old, new in OLD.items(): name = name.replace(old, new)
        if not name.startswith(config.names.unread): out[name] = entry
    return out


def require_encoder_sizes(c: EncoderConfig, directory: Path) -> None:
    """Raises `WeightError` where headers have other sizes than config.json."""
    names, hidden = c.names, ("hidden_size", c.hidden_size)
    heads = "num_attention_heads × head_dim", c.num_heads * c.head_dim
    tables = ((names.words, "vocab_size", c.vocab_size), (names.types, "type_vocab_size", c.token_types),
              (names.positions, "max_position_embeddings", c.position_rows))
    qkv = heads if len(names.qkv) == 3 else (f"3 × {heads[0]}", 3 * heads[1])
    width = "intermediate_size", c.intermediate_size
    up = width if len(names.up) == 1 + c.gated else ("2 × intermediate_size", c.up_width)
    layer: Shapes = {f"{names.output}.weight": (hidden, heads), f"{names.down}.weight": (hidden, width),
                     **{f"{name}.weight": (qkv, hidden) for name in names.qkv},
                     **{f"{name}.weight": (up, hidden) for name in names.up}}
    prefix = names.layer.removesuffix("{}")
    require_sizes(Module({f"{name}.weight": ((field, rows), hidden) for name, field, rows in tables},
                         (Stack(prefix, "num_hidden_layers", c.num_layers, lambda number: Module(layer)),)),
                  encoder_entries(c, open_checkpoint(directory).entries), directory)


def load(model: Encoder, directory: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Fills every parameter of `model` from `directory`; returns bytes read. Raises `WeightError`."""
    checkpoint, wanted = open_checkpoint(directory), encoder_slots(model)
    checkpoint.entries = encoder_entries(model.config, checkpoint.entries)
    check(wanted, checkpoint.entries, False, directory)
    with label_allocations("weights"):
        allocate_arena(tensors_of(wanted.values()))
    made = fill_slots(checkpoint, wanted, progress)
    # inside a captured step every replay would compute them
    _ = model.rope_tables, model.distance_biases
    return made
