"""Quantised layers of a checkpoint: which they are, and how they get into the network.

Protocol: `planned(model, entries, file)` asks the reader of the config's `quantization` for every projection,
before a byte is read. A `Linear` of which some projection is quantised gets `parts` instead of its weight;
neighbours of one type become one matrix. The plan says which tensors of the checkpoint belong to quantised
matrices, and where in the network the projections beside them are stored that are not. `read_layer` then
reads one layer, in any thread, and `fill` puts it in its place.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv import functional as F
from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.activations import QWeight, SparseWeight, StackWeight
from tinygrad_nv.quant.floats import as_float32
from tinygrad_nv.quant.readers.checks import AGAIN, FLOATS
from tinygrad_nv.quant.readers.reader import Activations, GetPart, Reader, StoredMatrix, TensorPart, reader_of
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import QTensor, in_memory
from tinygrad_nv.quant.types import QType, Scale, buffers
from tinygrad_nv.runtime.memory import write

from ..cache_scales import SUFFIXES
from ..checkpoint import TensorEntry, convert, read_array, safetensors_dtype
from ..feed_forward import MixtureOfExperts
from ..layers import Linear
from ..llama import Llama
from ..parts import read_part
from . import experts, sparse
from .experts import Chunk, StoredStack

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
STATIC = (".input_scale", ".activation_scale")      # transformers' fp8 has the second


@dataclass(frozen=True)
class Projection:
    """Rows [first, first + rows) of a `Linear`, by its Hugging Face name without .weight."""
    name: str
    linear: Linear
    first: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of its matrix."""
        return self.rows, int(self.linear.weight.shape[1])


@dataclass(frozen=True)
class StoredFloats:
    """A matrix of floats that may be 2:4 sparse: its tensor's name."""
    name: str

    @property
    def tensors(self) -> tuple[str, ...]: return self.name,


Stored = StoredMatrix | StoredFloats


@dataclass(frozen=True)
class QuantisedLayer:
    """A layer's projections in order; those that are neither quantised nor sparse have a Tensor of their own.
    `linear` is their `Linear`, the stack of experts, or the name of the head or the embedding."""
    linear: Linear | StoredStack | str
    parts: tuple[tuple[Stored, tuple[int, int]] | Tensor, ...]

    @property
    def tensors(self) -> list[str]:
        """Tensors of the checkpoint that its quantised matrices take."""
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
    """Returns the projections of a layer, neighbours of a `Linear` one after the other."""
    c, made, block = model.config, list[Projection](), model.blocks[layer]
    half, names = block.feed_forward, c.names
    linears = [] if block.attention is None else block.attention.linears
    gate_up, down = list(names.gate_up), names.down
    if isinstance(half, MixtureOfExperts):
        matrices = names.shared_matrices or names.expert_matrices
        dense, (*gate_up, down) = half.shared, (f"{names.shared_expert}.{x}" for x in matrices)
    else: dense = half
    if isinstance(half, MixtureOfExperts) and half.latents is not None:
        linears += [(each, (name,), (int(each.weight.shape[0]),))
                    for each, name in zip(half.latents, names.latents, strict=True)]
    if dense is not None:
        linears += [(dense.gate_up, tuple(gate_up), (dense.width,) * (1 + dense.gated)),
                    (dense.down, (down,), (c.hidden_size,))]
    for linear, stored, rows in linears:
        if len(stored) == 1: rows = sum(rows),
        for i, name in enumerate(stored):
            made.append(Projection(f"model.layers.{layer}.{name}", linear, sum(rows[:i]), rows[i]))
    return made


def make_plan(model: Llama, entries: Mapping[str, TensorEntry], file: str,
            reader: Reader | None = None) -> Plan:
    """Plans what is quantised, by the reader of a config in `file` if no other is given. Raises `ModelError`
    of a config that cannot be read, `WeightError` of a layer that is not whole."""
    plan = Plan()
    if model.config.quantization is None: return plan
    reader = reader or reader_of(model.config.quantization, file)
    stored = {name: (safetensors_dtype(entry), entry.shape) for name, entry in entries.items()}
    for layer in range(len(model.blocks)):
        for _, found in groupby(projections(model, layer), key=lambda each: id(each.linear)):
            _add_layer(plan, reader, list(found), stored, model)
        for stack in experts.plan_stacks(model, layer, reader, stored):
            _add_experts(plan, stack, stored, model)
    # of a tied GGUF file, blocks of the embedding are the head's, too
    gguf = model.config.quantization["quant_method"] == "gguf"
    blocks = model.config.quantization["types"] if gguf else ()
    tied, stage = model.config.tied, model.parallel
    embeds, ends = stage is None or stage.first, stage is None or stage.last
    if ends and (not tied or f"{HEAD}.weight" in blocks): _add_table(plan, reader, HEAD, stored, model)
    if (table := f"{EMBEDDING}.weight") in blocks and tied and ends:
        plan.replaced.add(table)
        plan.unread.add(table)
    elif table in blocks and embeds: _add_table(plan, reader, EMBEDDING, stored, model)
    plan.unread |= {name for name in entries if name.endswith(SUFFIXES)} - plan.tensors
    return plan


def _add_layer(plan: Plan, reader: Reader, found: list[Projection],
               stored: Mapping[str, tuple[str, tuple[int, ...]]], model: Llama) -> None:
    matrices = [_as_run(model, reader.matrix(each.name, each.shape, stored), each.shape)
                or _sparse(model, each, stored) for each in found]
    if not any(matrices): return
    parts: list[tuple[Stored, tuple[int, int]] | Tensor] = []
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


def _add_experts(plan: Plan, stack: StoredStack, stored: Mapping[str, tuple[str, tuple[int, ...]]],
                 model: Llama) -> None:
    if not stack.codes:
        found = [_as_run(model, each, stack.shape, codes=False) for each in stack.matrices]
        stack = replace(stack, matrices=tuple(each for each in found if each is not None))
    experts.require_dynamic(stack)
    plan.layers.append(QuantisedLayer(stack, tuple((each, stack.shape) for each in stack.matrices)))
    plan.replaced |= {f"{name}.weight" for name in stack.names}
    assert model.config.quantization is not None
    if model.config.quantization.get("quant_method") == "gptq":     # AutoGPTQ writes biases of zeros
        plan.unread |= {bias for name in stack.names if (bias := f"{name}.bias") in stored}


def _sparse(model: Llama, one: Projection, stored: Mapping[str, tuple[str, tuple[int, ...]]]
            ) -> StoredFloats | None:
    """A projection of floats that may be sparse."""
    name = f"{one.name}.weight"
    kind, shape = stored.get(name, ("", ()))
    fits = kind in FLOATS and shape == one.shape
    return StoredFloats(name) if fits and sparse.candidate(model, one.shape) else None


def _add_table(plan: Plan, reader: Reader, name: str, stored: Mapping[str, tuple[str, tuple[int, ...]]],
               model: Llama) -> None:
    """The head or the embedding, if it is quantised."""
    rows, parallel = model.config.vocab_size, model.parallel
    shape = rows if parallel is None else parallel.rows(rows)[1], model.config.hidden_size
    if (found := _as_run(model, reader.matrix(name, shape, stored), shape)) is None: return
    plan.layers.append(QuantisedLayer(name, ((found, shape),)))
    plan.replaced.add(f"{name}.weight")


def _as_run(model: Llama, found: StoredMatrix | None, shape: tuple[int, int],
            codes: bool = True) -> StoredMatrix | None:
    """Inputs are rounded where transformers rounds them, of compressed-tensors; of FP8 blocks and the like,
    where codes are multiplied: where there is no FP8 matmul it dequantises them."""
    assert model.config.quantization is not None
    if found is None or model.config.quantization.get("quant_method") == "compressed-tensors": return found
    return found if codes and _codes(found.type, shape, found.activations, model.device) else \
        replace(found, activations=None)


def _codes(type: QType, shape: tuple[int, int], how: Activations | None, device: str | None) -> bool:
    """Whether codes of inputs and of a matrix are multiplied: on devices that have a kernel."""
    return how is not None and F.multiplies_codes(type, shape, how.element, how.scale, device)


def require_zeros(plan: Plan, entries: Mapping[str, TensorEntry]) -> None:
    """Raises `WeightError` for a bias where the architecture has none that is not 0."""
    for name in sorted(plan.unread):
        if name.endswith(".bias") and read_array(entries[name]).any():
            raise WeightError(f"{name} is not zero, and the model of config.json has no such bias",
                              "biases of zeros, which are left out, or none",
                              "use the config.json that belongs to these weights")


@dataclass(frozen=True)
class _Floats:
    """A matrix of floats that was read, in their own dtype; bits of bfloat16."""
    values: np.ndarray

    def stacks_on(self, above: _Arrays | _Floats) -> bool: return isinstance(above, _Floats)

    def in_memory(self, model: Llama) -> SparseWeight | Tensor:
        """In the model's dtype, sparse if it is."""
        kind = {"u": "bfloat16", "f": self.values.dtype.name}[self.values.dtype.kind]
        (n, k), data = self.values.shape, np.ascontiguousarray(self.values).reshape(-1).data.cast("B")
        bits = np.frombuffer(convert(data, kind, model.dtype), f"u{model.dtype.itemsize}").reshape(n, k)
        if (found := sparse.pack(model.dtype, (n, k), bits, None, model.device)) is not None:
            return SparseWeight(found)
        made = Tensor.empty(n, k, dtype=model.dtype, device=model.device)
        write(made, 0, bits.reshape(-1).data.cast("B"))
        return made


@dataclass(frozen=True)
class _Arrays:
    """A matrix that was read: what `QWeight` is made of."""
    type: QType
    shape: tuple[int, int]
    buffers: dict[str, np.ndarray]
    activations: Activations | None
    input_scale: float | None

    @staticmethod
    def read(stored: StoredMatrix, shape: tuple[int, int], get: GetPart) -> _Arrays:
        how, scale = stored.activations, None
        if how is not None and how.static:
            name = next((each for each in stored.tensors if each.endswith(STATIC)), None)
            if name is None:
                raise WeightError(f"{stored.tensors[0]} has no input_scale beside it",
                                  "a scale of inputs, as quantization_config calls them static", AGAIN)
            scale = float(as_float32(get(name, None)).reshape(-1)[0])
        return _Arrays(stored.type, shape, stored.read(get), how, scale)

    def for_codes(self) -> _Arrays:
        """Returns the arrays as codes are multiplied: with a scale of each row where there is one of the
        matrix, as such stack; scales of blocks in float32."""
        scale, scales = self.type.scale, self.buffers["scales"]
        if self.activations is None or self.type != self.type.element @ scale or scale.e8m0: return self
        if (scale.rows, scale.columns) == (0, 0):
            scale, scales = replace(scale, rows=1), np.repeat(scales.reshape(1, 1), self.shape[0], 0)
        elif scale.columns: scale, scales = replace(scale, dtype=dtypes.float32), as_float32(scales)
        return replace(self, type=self.type.element @ scale, buffers={**self.buffers, "scales": scales})

    def by_rows(self) -> _Arrays:
        """With scales of each row where there are such of the matrix, as these stack."""
        def of(scale: Scale) -> Scale: return scale if scale.rows else replace(scale, rows=1)
        outer = None if self.type.outer is None else of(self.type.outer)
        type = replace(self.type, scale=of(self.type.scale), outer=outer)
        wanted = buffers(type, *self.shape)
        made = {name: one if name in ("codes", "high", "order") else
                np.broadcast_to(one.reshape(-1, wanted[name].shape[1]), wanted[name].shape)
                for name, one in self.buffers.items()}
        return replace(self, type=type, buffers=made)

    def stacks_on(self, above: _Arrays | _Floats) -> bool:
        """Whether its rows may follow those of another in one matrix."""
        if isinstance(above, _Floats): return False
        kind, rows = self.type, above.shape[0]
        scales = [scale for scale in (kind.scale, kind.outer) if scale is not None]
        alike = (kind, self.activations, self.input_scale) == (above.type, above.activations,
                                                               above.input_scale)
        return alike and all(scale.rows and rows % scale.rows == 0 for scale in scales) and \
            (not kind.permuted or np.array_equal(self.buffers["order"], above.buffers["order"]))

    def in_memory(self, model: Llama) -> QWeight | SparseWeight:
        """On the model's device, sparse if it is."""
        how, device = self.activations, model.device
        if sparse.candidate(model, self.shape, self.type, how):
            scales = as_float32(self.buffers["scales"])
            found = sparse.pack(self.type.element.dtype, self.shape, self.buffers["codes"],
                                  np.broadcast_to(scales, (self.shape[0], 1)), device)
            if found is not None: return SparseWeight(found, how, self.input_scale)
        return QWeight(_in_memory(self.type, self.shape, self.buffers, device), how, self.input_scale,
                       codes=_codes(self.type, self.shape, how, device))


Read: TypeAlias = _Arrays | _Floats | Tensor
Part: TypeAlias = QWeight | SparseWeight | StackWeight | Tensor     # of a layer in memory


def read_layer(layer: QuantisedLayer, entries: Mapping[str, TensorEntry]) -> list[Read] | Iterator[Chunk]:
    """The parts of a layer, neighbours of one type as one matrix; experts are read while they are used."""
    def get(name: str, part: TensorPart | None) -> np.ndarray: return read_part(entries[name], part)
    if isinstance(layer.linear, StoredStack): return experts.read(layer.linear, get)
    return list(_merge(layer.parts, get))


def fill(model: Llama, layer: QuantisedLayer, found: Iterable[Any]) -> tuple[Part, ...]:
    """Repacks the parts of a layer, as kernels read them, and puts them in their place."""
    assert model.config.quantization is not None
    int8 = model.config.quantization["quant_method"] == "gguf" and model.int8_inputs
    parts = (experts.fill(model, layer.linear, found, int8),) \
        if isinstance(layer.linear, StoredStack) else _repack(model, layer, found, int8)
    place(model, layer, parts)
    return parts


def _repack(model: Llama, layer: QuantisedLayer, found: Iterable[Read], int8: bool) -> tuple[Part, ...]:
    alone = layer.linear == EMBEDDING   # nothing is multiplied with it: its rows stay in one piece
    def lay_out(one: QWeight) -> QTensor: return one.matrix if alone else F.prepare_matrix(one.matrix,
                                                                                           one.codes)
    made = (each if isinstance(each, Tensor) else each.in_memory(model) for each in found)
    return tuple(replace(part, int8=int8, matrix=lay_out(part)) if isinstance(part, QWeight) else part
                 for part in made)


def place(model: Llama, layer: QuantisedLayer, parts: tuple[Part, ...]) -> None:
    """Puts the parts of a layer, as kernels read them, in their place."""
    if isinstance(layer.linear, Linear):
        layer.linear.parts = tuple(part for part in parts if not isinstance(part, StackWeight))
    elif isinstance(layer.linear, StoredStack):
        assert isinstance(parts[0], StackWeight)
        layer.linear.place.put(parts[0])
    else:
        assert isinstance(parts[0], QWeight)
        if layer.linear != EMBEDDING: model.quantised_head = parts[0]
        if layer.linear == EMBEDDING or model.config.tied: model.quantised_embedding = parts[0].matrix


def matrices(model: Llama) -> list[tuple[QTensor | QStack | SparseTensor, Activations | None]]:
    """The quantised and sparse matrices of a network, and how the inputs of each are rounded; one that is
    both head and embedding once, those of a layer's experts as one."""
    found = [each for layer in range(len(model.blocks)) for each in projections(model, layer)]
    linears = {id(each.linear): each.linear for each in found}.values()
    made: list[tuple[QTensor | QStack | SparseTensor, Activations | None]] = [
        (part.matrix, part.activations) for linear in linears for part in linear.parts
        if not isinstance(part, Tensor)]
    made += [(stack.matrix, stack.activations) for stack in experts.stacks(model)]
    head, table = model.quantised_head, model.quantised_embedding
    if head is not None: made.append((head.matrix, head.activations))
    if table is not None and (head is None or table is not head.matrix): made.append((table, None))
    return made


def sparse_savings(model: Llama) -> int:
    """Bytes that sparse matrices of a network take less than with their zeros."""
    found = [matrix for matrix, _ in matrices(model) if isinstance(matrix, SparseTensor)]
    return sum(one.shape[0] * one.shape[1] * one.dtype.itemsize - int(one.values.nbytes())
               - int(one.metadata.nbytes()) for one in found)


def _merge(parts: Iterable[tuple[Stored, tuple[int, int]] | Tensor], get: GetPart) -> Iterator[Read]:
    """Parts, of neighbours of one type one matrix."""
    waiting, parts = list[_Arrays | _Floats](), list(parts)
    for part in parts:
        one = None if isinstance(part, Tensor) else _read(part[0], part[1], get)
        if isinstance(one, _Arrays) and len(parts) > 1: one = one.by_rows()
        if waiting and (one is None or not one.stacks_on(waiting[-1])):
            yield _concatenate(waiting)
            waiting = []
        if one is not None: waiting.append(one)
        elif isinstance(part, Tensor): yield part
    if waiting: yield _concatenate(waiting)


def _read(stored: Stored, shape: tuple[int, int], get: GetPart) -> _Arrays | _Floats:
    if isinstance(stored, StoredFloats): return _Floats(get(stored.name, None))
    return _Arrays.read(stored, shape, get).for_codes()


def _concatenate(some: list[_Arrays | _Floats]) -> _Arrays | _Floats:
    first = some[0]
    if isinstance(first, _Floats):
        return _Floats(np.concatenate([each.values for each in some if isinstance(each, _Floats)]))
    arrays = {name: array if len(some) == 1 or name == "order" else
              np.concatenate([each.buffers[name] for each in some if isinstance(each, _Arrays)])
              for name, array in first.buffers.items()}
    rows = sum(each.shape[0] for each in some if isinstance(each, _Arrays))
    return replace(first, shape=(rows, first.shape[1]), buffers=arrays)


def _in_memory(type: QType, shape: tuple[int, int], arrays: Mapping[str, np.ndarray],
               device: str | None) -> QTensor:
    """`QTensor.of`, with one copy of each array."""
    made = {}
    for name, (extents, dtype) in buffers(type, *shape).items():
        made[name] = Tensor.empty(*extents, dtype=in_memory(dtype), device=device)
        write(made[name], 0, np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return QTensor(type, shape, made)
