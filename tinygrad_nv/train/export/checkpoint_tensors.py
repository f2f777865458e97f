"""A network's tensors as the family's checkpoints have them: the reverse of models/weights.py.

Protocol: `sources(model, dtype)` maps Hugging Face names to `Source`s, which read rows of the network's
matrices (q, k, v and gate, up lie below each other there) and convert them when they are written. Experts of
families that store them as one tensor a layer (models/parts.py) are joined again:

    gate_up_proj [E, H, 2 I]    columns gate, up, gate, up … ("interleaved"), or gate | up ("halves")
    down_proj    [E, I, H]

of the [2 I, H] and [H, I] of each expert here. A tied head is not stored.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.attention import Attention
from tinygrad_nv.models.checkpoint import SAFETENSORS_DTYPES, convert
from tinygrad_nv.models.feed_forward import MixtureOfExperts
from tinygrad_nv.models.fit import EMBEDDING
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parts import BIAS
from tinygrad_nv.models.weights import WeightSlice, slots, tensors_of
from tinygrad_nv.runtime.memory import read_part
from tinygrad_nv.train.files import CHUNK, DTYPES, Source

BACKBONE_NORM = "model.norm_f"
# floats of checkpoints: by safetensors' names, and by those of config.json
FLOATS = {dtype: name for dtype, name in DTYPES.items() if name in SAFETENSORS_DTYPES}
CONFIG_NAMES = {dtype: SAFETENSORS_DTYPES[name] for dtype, name in FLOATS.items()}


def sources(model: Llama, dtype: DType) -> dict[str, Source]:
    """Every tensor of the checkpoint, stored as `dtype`; sinks and biases of choices, which a model of any
    dtype has in float32, are stored so. Raises `ModelError` for a model that is quantised, or of which this
    process has a part."""
    if model.parallel is not None:
        raise ModelError("this process has a part of the model", "a whole model",
                         "gather its tensors on one rank, in a model without parallel=")
    if model.config.quantization is not None:
        raise ModelError("the model's weights are quantised", "weights of float32, float16 or bfloat16",
                         "save the adapter that was trained on it: save_adapter")
    every = slots(model)
    Tensor.realize(*tensors_of(every.values()))
    exact = _exact(model)
    def find_stored(tensor: Tensor) -> DType: return tensor.dtype if id(tensor) in exact else dtype
    joined = _join(model, dtype) if model.config.names.fused else {}
    experts = model.config.names.expert.partition("{}")[0]
    prefixes = tuple(f"model.layers.{i}.{experts}" for i in range(len(model.blocks)) if joined)
    apart = {name: slot for name, slot in every.items() if not (prefixes and name.startswith(prefixes))}
    made = {name: Source(FLOATS[find_stored(slot.tensor)], slot.shape,
                         partial(_rows, slot, find_stored(slot.tensor)))
            for name, slot in apart.items()} | joined
    return {_rename(model, name): each for name, each in made.items()}


def _rename(model: Llama, name: str) -> str:
    """Returns the name in files of a network that is called backbone, as state-space models call it."""
    if model.config.names.last_norm != BACKBONE_NORM: return name
    if name == EMBEDDING: return "backbone.embeddings.weight"
    return name.replace("model.", "backbone.", 1)


def _exact(model: Llama) -> set[int]:
    """Tensors, by id, that have their own dtype whatever the model's is."""
    made = [block.attention.sinks for block in model.blocks if isinstance(block.attention, Attention)]
    made += [block.feed_forward.choice_bias for block in model.blocks
             if isinstance(block.feed_forward, MixtureOfExperts)]
    return {id(each) for each in made if each is not None}


def elements(tensor: Tensor, dtype: DType) -> Source:
    """A whole tensor, realized and of floats, stored as `dtype`. One that is a view is copied."""
    if not tensor.uop.has_buffer_identity(): tensor = tensor.clone().realize()
    slot = WeightSlice(tensor, 0, tuple(int(extent) for extent in tensor.shape))
    return Source(FLOATS[dtype], slot.shape, partial(_rows, slot, dtype))


def _rows(slot: WeightSlice, dtype: DType) -> Iterator[memoryview]:
    """The elements of a slot, some at a time."""
    left, done, item = math.prod(slot.shape), 0, slot.tensor.dtype.itemsize
    while left:
        count = min(left, CHUNK // item)
        yield _convert(slot.tensor, slot.offset + done * item, count, dtype)
        left, done = left - count, done + count


def _convert(tensor: Tensor, offset: int, count: int, dtype: DType) -> memoryview:
    """So many elements of a tensor's memory from byte `offset` on, in a dtype, rounded to nearest even."""
    data = read_part(tensor, offset, count * tensor.dtype.itemsize)
    return convert(memoryview(data), CONFIG_NAMES[tensor.dtype], dtype)


# **** experts that are one tensor a layer ****

def _join(model: Llama, dtype: DType) -> dict[str, Source]:
    """The tensors of all experts, by name."""
    names, made = model.config.names, dict[str, Source]()
    for i, block in enumerate(model.blocks):
        mixture = block.feed_forward
        if not isinstance(mixture, MixtureOfExperts): continue
        experts, width, hidden = mixture.moe.experts, mixture.moe.width, mixture.inputs
        inner, (gate_up, down) = mixture.moe.inner, names.fused_tensors
        for name, tensor, rows, columns in (
                (gate_up, mixture.gate_up, inner, hidden), (down, mixture.down, hidden, width),
                (gate_up + BIAS, mixture.gate_up_bias, inner, 1),
                (down + BIAS, mixture.down_bias, hidden, 1)):
            if tensor is None: continue
            woven, turned = names.fused == "interleaved" and name.startswith(gate_up), names.fused != "rows"
            shape: tuple[int, ...] = (experts, columns, rows) if turned else (experts, rows, columns)
            if name.endswith(BIAS): shape = (experts, rows)
            made[f"model.layers.{i}.{name}"] = Source(FLOATS[dtype], shape, partial(
                _experts, tensor, experts, rows, columns, woven, turned, dtype))
    return made


def _experts(tensor: Tensor, experts: int, rows: int, columns: int, woven: bool, turned: bool,
             dtype: DType) -> Iterator[memoryview]:
    """The matrix [rows, columns] of each expert, transposed if `turned`; `woven` rows i and i + rows / 2
    become neighbours."""
    size, kind = rows * columns, np.dtype(f"u{dtype.itemsize}")
    for i in range(experts):
        data = _convert(tensor, i * size * tensor.dtype.itemsize, size, dtype)
        matrix = np.frombuffer(data, kind).reshape(rows, columns)
        if woven: matrix = matrix.reshape(2, rows // 2, columns).transpose(1, 0, 2).reshape(rows, columns)
        yield np.ascontiguousarray(matrix.T if turned else matrix).reshape(-1).data.cast("B")
