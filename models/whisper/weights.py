"""Tensors that a Whisper checkpoint must hold, and where in the network each is stored.

Protocol: as ../weights.py. Names are found with and without the prefix "model.". A tied head that is stored,
too, is not read.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from tinygrad import Tensor

from tinygrad_nv.runtime.memory import allocate_arena, write
from tinygrad_nv.runtime.memory_pool import label_allocations

from ..checkpoint import open_checkpoint
from ..encoder_weights import whole
from ..fit import Module, Shapes, Stack, require_sizes
from ..layers import LayerNorm, Linear
from ..weights import WeightSlice, check, fill_slots, tensors_of
from .config import StackConfig, WhisperConfig
from .network import KERNEL, Convolution, DecoderLayer, EncoderLayer, SpeechDecoder, SpeechEncoder, Whisper

# prefix, names of what is stacked, and what holds it
Part: TypeAlias = tuple[str, tuple[str, ...], Linear | LayerNorm | Convolution]
HEAD, KEYS = "proj_out.weight", "k_proj"


def slots(model: Whisper) -> dict[str, WeightSlice]:
    """Every tensor that the checkpoint must hold, by its name without the prefix."""
    encoder, decoder = model.encoder, model.decoder
    out = {"encoder.embed_positions.weight": whole(encoder.positions),
           "decoder.embed_positions.weight": whole(decoder.positions),
           "decoder.embed_tokens.weight": whole(decoder.words)}
    if decoder.head is not decoder.words: out[HEAD] = whole(decoder.head)
    for name, stored, one in _parts(encoder, decoder):
        for kind, tensor in (("weight", one.weight), ("bias", one.bias)):
            if tensor is None: continue
            rows, *rest = map(int, tensor.shape)
            count = rows // len(stored)
            for at, each in enumerate(stored):
                if (each, kind) == (KEYS, "bias"): continue
                full = ".".join(filter(None, (name, each, kind)))
                out[full] = WeightSlice(tensor, at * count, (count, *rest))
    return out


def _parts(encoder: SpeechEncoder, decoder: SpeechDecoder) -> Iterator[Part]:
    """All that has parameters but tables."""
    yield "encoder.conv1", ("",), encoder.conv1
    yield "encoder.conv2", ("",), encoder.conv2
    yield "encoder.layer_norm", ("",), encoder.norm
    yield "decoder.layer_norm", ("",), decoder.norm
    for i, each in enumerate(encoder.layers): yield from _layer(f"encoder.layers.{i}", each)
    for i, layer in enumerate(decoder.layers):
        prefix = f"decoder.layers.{i}"
        yield from _layer(prefix, layer)
        yield f"{prefix}.encoder_attn", ("q_proj",), layer.cross_q
        yield f"{prefix}.encoder_attn", (KEYS, "v_proj"), layer.cross_kv
        yield f"{prefix}.encoder_attn", ("out_proj",), layer.cross_output
        yield f"{prefix}.encoder_attn_layer_norm", ("",), layer.cross_norm


def _layer(prefix: str, layer: EncoderLayer | DecoderLayer) -> Iterator[Part]:
    """Yields the parts that the layers of both stacks have."""
    yield f"{prefix}.self_attn", ("q_proj", KEYS, "v_proj"), layer.qkv
    yield f"{prefix}.self_attn", ("out_proj",), layer.output
    yield f"{prefix}.self_attn_layer_norm", ("",), layer.attention_norm
    yield f"{prefix}.fc1", ("",), layer.feed_forward.up
    yield f"{prefix}.fc2", ("",), layer.feed_forward.down
    yield f"{prefix}.final_layer_norm", ("",), layer.norm


def require_whisper_sizes(c: WhisperConfig, directory: Path) -> None:
    """Raises `WeightError` where headers have other sizes than config.json."""
    hidden = "d_model", c.hidden_size

    def stack(name: str, own: StackConfig) -> Stack:
        width = f"{name}_ffn_dim", own.ffn_width
        layer = Module({"fc1.weight": (width, hidden), "fc2.weight": (hidden, width),
                        "self_attn.q_proj.weight": (hidden, hidden)})
        return Stack(f"{name}.layers.", f"{name}_layers", own.layers, lambda number: layer)
    tensors: Shapes = {
        "encoder.conv1.weight": (hidden, ("num_mel_bins", c.mels), ("the kernel", KERNEL)),
        "encoder.embed_positions.weight": (("max_source_positions", c.positions), hidden),
        "decoder.embed_positions.weight": (("max_target_positions", c.max_tokens), hidden),
        "decoder.embed_tokens.weight": (("vocab_size", c.vocab_size), hidden)}
    entries = {name.removeprefix("model."): entry
               for name, entry in open_checkpoint(directory).entries.items()}
    require_sizes(Module(tensors, (stack("encoder", c.encoder), stack("decoder", c.decoder))), entries,
                  directory)


def nbytes(model: Whisper) -> int:
    """Returns the bytes of all parameters."""
    return sum(int(each.nbytes()) for each in tensors_of(slots(model).values()))


def load(model: Whisper, directory: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Fills every parameter of `model` from `directory`; returns bytes read. Raises `WeightError`."""
    checkpoint, wanted = open_checkpoint(directory), slots(model)
    entries = {name.removeprefix("model."): entry for name, entry in checkpoint.entries.items()}
    if HEAD not in wanted: entries.pop(HEAD, None)
    checkpoint.entries = entries
    check(wanted, entries, False, directory)
    with label_allocations("weights"):
        allocate_arena(tensors_of(wanted.values()))
    for name, slot in wanted.items():
        if name.endswith("v_proj.bias"): _without_bias(slot.tensor, slot)
    return fill_slots(checkpoint, wanted, progress)


def _without_bias(bias: Tensor, values: WeightSlice) -> None:
    """Zeros in front of the values' rows: keys have no bias. (Those of queries are filled later.)"""
    write(bias, 0, memoryview(bytes(values.offset)))
    assert math.prod(values.shape) * bias.dtype.itemsize + values.offset == int(bias.nbytes())
