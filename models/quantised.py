"""Quantised layers of a checkpoint: which they are, and how they get into the network.

Protocol: `planned(model, entries, file)` asks the reader of the config's `quantization` for every projection,
before a byte is read. A `Linear` of which some projection is quantised gets `parts` instead of its weight;
neighbours of one type become one matrix. The plan says which tensors of the checkpoint belong to quantised
matrices, and where in the network the projections beside them are stored that are not. `fill` then reads one
layer.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.errors import WeightError
from tinygrad_nv.functional import prepared
from tinygrad_nv.quant.activations import QWeight
from tinygrad_nv.quant.readers.reader import Activations, Get, Reader, StoredMatrix, reader_of
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import QType

from .checkpoint import TensorEntry, read_array, safetensors_dtype, widen_bfloat16
from .llama import Linear, Llama

HEAD = "lm_head"
# scales of keys, values and queries: how the cache is stored is said by --kv-cache-dtype
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_output_scale", ".k_proj.output_scale",
                ".v_proj.output_scale")


@dataclass(frozen=True)
class Projection:
    """Rows [first, first + rows) of a `Linear`, by its Hugging Face name without .weight."""
    name: str
    linear: Linear
    first: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of its matrix."""
        return self.rows, int(self.linear.weight.shape[1])


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer's projections in order; those that are not quantised have a Tensor of their own. Of the head
    `linear` is None."""
    linear: Linear | None
    parts: tuple[tuple[StoredMatrix, tuple[int, int]] | Tensor, ...]

    @property
    def tensors(self) -> list[str]:
        """Those of the checkpoint that its quantised matrices take."""
        return [name for part in self.parts if not isinstance(part, Tensor) for name in part[0].tensors]


@dataclass
class Plan:
    """`replaced`: weights that are no slots any more; `plain`: Tensors of projections that are not quantised,
    by name; `unread`: tensors that mean nothing here."""
    layers: list[QuantisedLayer] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)
    plain: dict[str, Tensor] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> set[str]:
        """All that belong to quantised matrices."""
        return {name for layer in self.layers for name in layer.tensors}


def projections(model: Llama, layer: int) -> list[Projection]:
    """Those of a layer, neighbours of a `Linear` one after the other."""
    c, made, block = model.config, list[Projection](), model.blocks[layer]
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention, ff = block.attention, block.feed_forward
    for linear, part, names in (
            (attention.qkv, "self_attn", {"q_proj": q, "k_proj": kv, "v_proj": kv}),
            (attention.output, "self_attn", {"o_proj": c.hidden_size}),
            (ff.gate_up, "mlp", {"gate_proj": ff.width, "up_proj": ff.width}),
            (ff.down, "mlp", {"down_proj": c.hidden_size})):
        first = 0
        for name, rows in names.items():
            made.append(Projection(f"model.layers.{layer}.{part}.{name}", linear, first, rows))
            first += rows
    return made


def planned(model: Llama, entries: Mapping[str, TensorEntry], file: str) -> Plan:
    """What is quantised. `file`: the config's, for messages. Raises `ModelError` of a config that cannot be
    read, `WeightError` of a layer that is not whole."""
    plan = Plan()
    if model.config.quantization is None: return plan
    reader = reader_of(model.config.quantization, file)
    stored = {name: (safetensors_dtype(entry), entry.shape) for name, entry in entries.items()}
    for layer in range(len(model.blocks)):
        for _, found in groupby(projections(model, layer), key=lambda each: id(each.linear)):
            _add_layer(plan, reader, list(found), stored, model)
    # of a tied GGUF file, blocks of the embedding are the head's, too
    if not model.config.tied or f"{HEAD}.weight" in model.config.quantization.get("types", ()):
        shape = tuple(map(int, model.head.shape))
        if (head := _as_run(model, reader.matrix(HEAD, (shape[0], shape[1]), stored))) is not None:
            plan.layers.append(QuantisedLayer(None, ((head, (shape[0], shape[1])),)))
            plan.replaced.add(f"{HEAD}.weight")
    plan.unread |= {name for name in entries if name.endswith(CACHE_SCALES)} - plan.tensors
    return plan


def _add_layer(plan: Plan, reader: Reader, found: list[Projection],
               stored: Mapping[str, tuple[str, tuple[int, ...]]], model: Llama) -> None:
    matrices = [_as_run(model, reader.matrix(each.name, each.shape, stored)) for each in found]
    if not any(matrices): return
    parts: list[tuple[StoredMatrix, tuple[int, int]] | Tensor] = []
    for each, matrix in zip(found, matrices, strict=True):
        weight = f"{each.name}.weight"
        plan.replaced.add(weight)
        if matrix is not None: parts.append((matrix, each.shape))
        else:
            plan.plain[weight] = Tensor.empty(*each.shape, dtype=model.dtype, device=model.device)
            parts.append(plan.plain[weight])
        # AutoGPTQ writes biases of zeros
        if each.linear.bias is None and (bias := f"{each.name}.bias") in stored: plan.unread.add(bias)
    plan.layers.append(QuantisedLayer(found[0].linear, tuple(parts)))


def _as_run(model: Llama, found: StoredMatrix | None) -> StoredMatrix | None:
    """Inputs are rounded where transformers rounds them, of compressed-tensors; FP8 blocks and the like it
    dequantises where there is no FP8 matmul."""
    assert model.config.quantization is not None
    if found is None or model.config.quantization.get("quant_method") == "compressed-tensors": return found
    return replace(found, activations=None)


def require_zeros(plan: Plan, entries: Mapping[str, TensorEntry]) -> None:
    """Raises `WeightError` for a bias where the architecture has none that is not 0."""
    for name in sorted(plan.unread):
        if name.endswith(".bias") and read_array(entries[name]).any():
            raise WeightError(f"{name} is not zero, and the model of config.json has no such bias",
                              "biases of zeros, which are left out, or none",
                              "use the config.json that belongs to these weights")


@dataclass(frozen=True)
class _Arrays:
    """A matrix that was read: what `QWeight` is made of."""
    type: QType
    shape: tuple[int, int]
    buffers: dict[str, np.ndarray]
    activations: Activations | None
    input_scale: float | None

    @staticmethod
    def read(stored: StoredMatrix, shape: tuple[int, int], get: Get) -> _Arrays:
        how, scale = stored.activations, None
        if how is not None and how.static:
            name = next(each for each in stored.tensors if each.endswith(".input_scale"))
            scale = float(_widened(get(name)).reshape(-1)[0])
        return _Arrays(stored.type, shape, stored.arrays(get), how, scale)

    def stacks_on(self, above: _Arrays) -> bool:
        """Whether its rows may follow those of another in one matrix."""
        kind, rows = self.type, above.shape[0]
        scales = [scale for scale in (kind.scale, kind.outer) if scale is not None]
        alike = (kind, self.activations, self.input_scale) == (above.type, above.activations,
                                                               above.input_scale)
        return alike and all(scale.rows and rows % scale.rows == 0 for scale in scales) and \
            (not kind.permuted or np.array_equal(self.buffers["order"], above.buffers["order"]))


def fill(model: Llama, layer: QuantisedLayer, entries: Mapping[str, TensorEntry]) -> int:
    """Reads one layer: bytes."""
    def get(name: str) -> np.ndarray: return read_array(entries[name])
    assert model.config.quantization is not None
    int8 = model.config.quantization["quant_method"] == "gguf"
    parts = tuple(replace(part, int8=int8) if isinstance(part, QWeight) else part
                  for part in _merged(layer.parts, get, model.device))
    if layer.linear is not None: layer.linear.parts = parts
    else:
        assert isinstance(parts[0], QWeight)
        model.quantised_head = parts[0]
    return sum(entries[name].nbytes for name in layer.tensors)


def _merged(parts: Iterable[tuple[StoredMatrix, tuple[int, int]] | Tensor], get: Get,
            device: str | None) -> Iterator[QWeight | Tensor]:
    """Parts, of neighbours of one type one matrix."""
    waiting: list[_Arrays] = []
    for part in parts:
        one = None if isinstance(part, Tensor) else _Arrays.read(part[0], part[1], get)
        if waiting and (one is None or not one.stacks_on(waiting[-1])):
            yield _stacked(waiting, device)
            waiting = []
        if one is not None: waiting.append(one)
        elif isinstance(part, Tensor): yield part
    if waiting: yield _stacked(waiting, device)


def _stacked(some: list[_Arrays], device: str | None) -> QWeight:
    first = some[0]
    arrays = {name: array if len(some) == 1 or name == "order" else
              np.concatenate([each.buffers[name] for each in some]) for name, array in first.buffers.items()}
    shape = sum(each.shape[0] for each in some), first.shape[1]
    return QWeight(prepared(QTensor.of(first.type, shape, arrays, device)), first.activations,
                   first.input_scale)


def _widened(array: np.ndarray) -> np.ndarray:
    return widen_bfloat16(array) if array.dtype == np.uint16 else array
