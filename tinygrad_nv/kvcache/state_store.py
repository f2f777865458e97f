"""The memory of states, for layers that keep a state of fixed size for each sequence (state_table.py).

Protocol: `StateStore` owns tensors [pages, …] of each such layer. `join` puts them among the pages of keys
and values of the other layers, in the order of layers.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tinygrad import Device, Tensor
from tinygrad.dtype import DType

from tinygrad_nv.kvcache.store import CACHE, HybridCache, LayerBoth, LayerPages, LayerStates, PagedCache
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Fill
from tinygrad_nv.runtime.memory import allocate, discard
from tinygrad_nv.runtime.memory_pool import label_allocations


class StateStore:
    """`pages` pages of states on a device, of layers with states of these shapes and dtypes."""

    def __init__(self, shapes: Mapping[int, Sequence[tuple[tuple[int, ...], DType]]], device: str,
                 pages: int) -> None:
        self.device, self.pages = device, pages
        self.layers = {layer: LayerStates(tuple(Tensor.empty(pages, *shape, dtype=dtype, device=device)
                                                for shape, dtype in each))
                       for layer, each in shapes.items()}
        self.page_bytes = sum(math.prod(shape) * dtype.itemsize
                              for each in shapes.values() for shape, dtype in each)
        opened = Device[device]
        with label_allocations(CACHE):
            for tensor in self.tensors: allocate(tensor)
        if not isinstance(opened, NVDevice): return
        for tensor in self.tensors:     # tinygrad's own kernels multiply what they leave out by 0
            opened.driver.submit(Fill(tensor.uop.buffer._buf, 0, int(tensor.nbytes())))

    @property
    def tensors(self) -> list[Tensor]:
        """The states of all layers."""
        return [tensor for each in self.layers.values() for tensor in each.tensors]

    def join(self, pages: PagedCache, attention: Sequence[int], layers: int) -> HybridCache:
        """The cache of so many layers, of which `pages` has those with `attention`, in their order."""
        made: list[LayerPages | LayerStates | LayerBoth] = []
        groups = [0] * layers
        for i in range(layers):
            states = self.layers.get(i)
            if i not in attention:
                made.append(states or LayerStates(()))
                continue
            at = attention.index(i)
            own, groups[i] = pages.layers[at], pages.group(at)
            made.append(own if states is None else LayerBoth(own, states))
        return HybridCache(tuple(made), tuple(groups))

    def discard(self) -> None:
        """Gives the memory of all states back, on a CPU. What they held is lost."""
        discard(self.tensors)
