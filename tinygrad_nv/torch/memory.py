"""torch's memory as buffers of a captured graph, at addresses that change from call to call.

Protocol. `Slot.of(x)` is a Tensor over x's memory by DLPack, with x's strides. The address of its buffer is
set anew before a replay, so that another tensor of the same layout takes x's place without a copy.
`shareable(x)` is x, or a copy of it where its memory cannot be shared: an address that vector loads cannot
take, strides of overlapping elements. Whether an address is such a one may be otherwise in the next call, so
the copy has x's strides unless no tensor of them could be shared.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.dlpack import from_dlpack
from tinygrad_nv.dlpack.importing import VECTOR

DEVICE = "CPU"


@dataclass(frozen=True)
class Layout:
    """Shape, strides in elements and dtype of a tensor of torch's."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: torch.Tensor) -> Layout: return Layout(tuple(x.shape), x.stride(), x.dtype)

    @staticmethod
    def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Without gaps, the last dimension the innermost."""
        return Layout.in_order(shape, range(len(shape)), dtype)

    @staticmethod
    def in_order(shape: tuple[int, ...], order: Sequence[int], dtype: torch.dtype) -> Layout:
        """Without gaps, with the dimensions in an order, the last one the innermost."""
        strides, step = [0] * len(shape), 1
        for i in reversed(order):
            strides[i] = step
            step *= max(1, shape[i])
        return Layout(shape, tuple(strides), dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions from the longest stride to the shortest."""
        return tuple(sorted(range(len(self.shape)), key=lambda i: (-self.strides[i], i)))

    def fresh(self) -> torch.Tensor: return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


@dataclass(frozen=True)
class Slot:
    """A place of a graph that takes tensors of one layout: a Tensor, and the storage that it is a view of."""
    tensor: Tensor
    base: UOp

    @staticmethod
    def of(x: torch.Tensor) -> Slot:
        """The place for x, which must be `shareable`."""
        made = from_dlpack(x.detach(), copy=False)
        return Slot(made, made.uop.base)


def shareable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its memory cannot be shared."""
    if not _is_nested(x): return x.resolve_neg().clone(memory_format=torch.contiguous_format)
    if x.data_ptr() % (VECTOR * x.dtype.itemsize) == 0 and not x.is_neg(): return x
    # repeated dimensions are stored once, as in x
    once = tuple(slice(None) if step else slice(1) for step in x.stride())
    made = torch.empty_strided(x[once].shape, x.stride(), dtype=x.dtype)
    return made.copy_(x[once]).expand(x.shape)


def _is_nested(x: torch.Tensor) -> bool:
    """Whether each stride divides the one before it and spans less than that, as importing asks."""
    steps = sorted(((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and s), reverse=True)
    return all(a % b == 0 and a >= b * n for (a, _), (b, n) in itertools.pairwise(steps))
