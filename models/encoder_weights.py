"""Which tensors an encoder's checkpoint must hold, and where in the network each is stored.

Protocol: as weights.py. Names are found with and without the prefix of a whole model ("bert."), and
LayerNorm's with their oldest names, gamma and beta.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinygrad import Tensor

from tinygrad_nv.runtime.memory import allocate_arena
from tinygrad_nv.runtime.memory_pool import labelled

from .checkpoint import TensorEntry, open_checkpoint
from .encoder import Encoder, LayerNorm
from .encoder_config import EncoderConfig
from .layers import Linear
from .weights import WeightSlice, check, fill_slots

OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def whole(tensor: Tensor) -> WeightSlice:
    """All rows of a parameter."""
    return WeightSlice(tensor, 0, tuple(map(int, tensor.shape)))


def encoder_slots(model: Encoder) -> dict[str, WeightSlice]:
    """Every tensor that the checkpoint must hold, by its name without the model's prefix."""
    names, hidden = model.config.names, model.config.hidden_size
    out = {"embeddings.word_embeddings.weight": whole(model.words),
           "embeddings.position_embeddings.weight": whole(model.positions)}
    if model.types is not None: out["embeddings.token_type_embeddings.weight"] = whole(model.types)

    def add(name: str, one: Linear | LayerNorm) -> None:
        assert isinstance(one.bias, Tensor)
        out[f"{name}.weight"], out[f"{name}.bias"] = whole(one.weight), whole(one.bias)
    add("embeddings.LayerNorm", model.norm)
    for i, block in enumerate(model.blocks):
        layer = names.layer.format(i)
        for at, name in enumerate(names.qkv):
            assert block.qkv.bias is not None
            out[f"{layer}.{name}.weight"] = WeightSlice(block.qkv.weight, at * hidden, (hidden, hidden))
            out[f"{layer}.{name}.bias"] = WeightSlice(block.qkv.bias, at * hidden, (hidden,))
        for name, linear in ((names.output, block.output), (names.up, block.up), (names.down, block.down)):
            add(f"{layer}.{name}", linear)
        for name, norm in ((names.attention_norm, block.attention_norm), (names.norm, block.norm)):
            add(f"{layer}.{name}", norm)
    return out


def encoder_entries(config: EncoderConfig, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The encoder's tensors by the names of `encoder_slots`."""
    out = {}
    for name, entry in entries.items():
        for prefix in config.names.prefixes: name = name.removeprefix(prefix)
        for old, new in OLD.items(): name = name.replace(old, new)
        if not name.startswith(config.names.unread): out[name] = entry
    return out


def load(model: Encoder, directory: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Fills every parameter of `model` from `directory`; returns bytes read. Raises `WeightError`."""
    checkpoint, wanted = open_checkpoint(directory), encoder_slots(model)
    checkpoint.entries = encoder_entries(model.config, checkpoint.entries)
    check(wanted, checkpoint.entries, False, directory)
    with labelled("weights"):
        allocate_arena(list({id(slot.tensor): slot.tensor for slot in wanted.values()}.values()))
    return fill_slots(checkpoint, wanted, progress)
