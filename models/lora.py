"""Low-rank adapters (LoRA) of a network: their matrices on the device, in slots, and which rows have which.

Protocol: `ModelAdapters(model, slots, rank, dtype)` gives each linear layer of `model` room for the A and B
of `slots` adapters of rank ≤ `rank` (`LayerAdapters`). `write(slot, matrices)` puts an adapter there. A step
is built with adapters inside

    with adapters.of_rows(slot_of_row): model.step_paged(…)

where `slot_of_row` is int32 (T,), the number of slots for a row without an adapter: each layer then adds
what the adapters of its rows make of its input. Rows are sorted by slot once for all layers. Outside, layers
compute what they compute without adapters, in the same kernels.

An adapter's matrices lie beside those of other slots: what a layer of q|k|v has of an adapter that changes q
alone is its A and B of q, and a rank of 0 for k and v (tile/lora/spec.py).
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.functional import group_rows, lora_added
from tinygrad_nv.runtime.memory import allocate_arena, write

from .attention import Attention
from .llama import Llama
from .quantised.layers import Projection, projections

# NumPy has no bfloat16
BITS: dict[DType, np.dtype[Any]] = {dtypes.float32: np.dtype(np.float32),
                                    dtypes.float16: np.dtype(np.float16),
                                    dtypes.bfloat16: np.dtype(np.uint16)}


@dataclass(frozen=True)
class AdapterMatrices:
    """Matrices that an adapter adds to a projection: `a` (r, in) and `b` (r, out), the transposed B times the
    adapter's scale; bits of the slots' dtype."""
    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class Rows:
    """The rows of a step by slot, as `group_rows` sorts them."""
    order: Tensor
    offsets: Tensor


class CurrentStep:
    """The rows of the step that is built now; None outside of one with adapters."""
    rows: Rows | None = None


class LayerAdapters:
    """The adapters of one `Linear`, whose projections are `parts`, in order."""

    def __init__(self, parts: tuple[Projection, ...], slots: int, rank: int, dtype: DType,
                 step: CurrentStep) -> None:
        device, inputs = parts[0].linear.weight.device, parts[0].shape[1]
        # no reference to the layer, which has this: a model's tensors are found by walking its attributes
        self.names, self.rank, self.dtype, self.step = tuple(part.name for part in parts), rank, dtype, step
        self.segments = tuple(part.rows for part in parts)
        self.a = Tensor.empty(slots, len(parts) * rank, inputs, dtype=dtype, device=device)
        self.b = Tensor.empty(slots, rank, sum(self.segments), dtype=dtype, device=device)
        self.ranks = Tensor.empty(slots, len(parts), dtype=dtypes.int32, device=device)
        self.filled = set[int]()    # slots whose matrices are not 0

    def addend(self, x: Tensor) -> Tensor | None:
        """Returns the term that adapters add for x (…, in), None outside of a step with adapters."""
        if (rows := self.step.rows) is None: return None
        made = lora_added(x.reshape(-1, x.shape[-1]), self.a, self.b, self.ranks, self.segments, rows.offsets,
                          rows.order)
        return made.reshape(*x.shape[:-1], made.shape[-1])

    def write(self, slot: int, matrices: Mapping[str, AdapterMatrices]) -> None:
        """Puts an adapter's matrices in a slot; projections that it has none of get nothing added."""
        found = {i: matrices[name] for i, name in enumerate(self.names) if name in matrices}
        if found or slot in self.filled: self._put(slot, found)
        if found: self.filled.add(slot)
        else: self.filled.discard(slot)

    def clear(self, slot: int) -> None:
        """Fills a slot with zeros."""
        self._put(slot, {})

    def _put(self, slot: int, found: Mapping[int, AdapterMatrices]) -> None:
        kind, first = BITS[self.dtype], 0
        a, b = (np.zeros([int(n) for n in each.shape[1:]], kind) for each in (self.a, self.b))
        ranks = np.zeros(len(self.names), np.int32)
        for i, width in enumerate(self.segments):
            if (one := found.get(i)) is not None:
                ranks[i] = rank = len(one.a)
                a[i * self.rank:i * self.rank + rank] = one.a
                b[:rank, first:first + width] = one.b
            first += width
        for tensor, array in ((self.a, a), (self.b, b), (self.ranks, ranks)):
            write(tensor, slot * array.nbytes, array.reshape(-1).data.cast("B"))


class ModelAdapters:
    """The adapters of a model. Latent attention and experts have none."""

    def __init__(self, model: Llama, slots: int, rank: int, dtype: DType) -> None:
        self.slots, self.rank, self.dtype = slots, rank, dtype
        self.step = CurrentStep()
        self.layers = list[LayerAdapters]()
        for _, found in groupby(adaptable(model), key=lambda each: id(each.linear)):
            parts = tuple(found)
            layer = parts[0].linear.adapters = LayerAdapters(parts, slots, rank, dtype, self.step)
            self.layers.append(layer)
        # one mapping: what is read in each step lies in huge pages
        allocate_arena([each for layer in self.layers for each in (layer.a, layer.b, layer.ranks)])
        for slot in range(slots):
            for layer in self.layers: layer.clear(slot)

    def write(self, slot: int, matrices: Mapping[str, AdapterMatrices]) -> None:
        """Puts an adapter in a slot. Steps launched before have the slot's matrices of before."""
        for layer in self.layers: layer.write(slot, matrices)

    @contextlib.contextmanager
    def of_rows(self, slot_of_row: Tensor) -> Iterator[None]:
        """Layers that are built inside add what adapters make of their rows."""
        order, offsets = group_rows(slot_of_row, self.slots + 1)
        self.step.rows = Rows(order.contiguous(), offsets.contiguous())
        try: yield
        finally: self.step.rows = None


def adaptable(model: Llama) -> list[Projection]:
    """The projections that an adapter may change, those of a `Linear` one after the other."""
    made = list[Projection]()
    for i, block in enumerate(model.blocks):
        own = {id(linear) for linear, _, _ in (block.attention.linears if block.attention else ())}
        made += [each for each in projections(model, i)
                 if isinstance(block.attention, Attention) or id(each.linear) not in own]
    return made


def slot_bytes(model: Llama, rank: int, dtype: DType) -> int:
    """Bytes of a slot for adapters of a rank."""
    return sum(sum(part.shape) for part in adaptable(model)) * rank * dtype.itemsize
