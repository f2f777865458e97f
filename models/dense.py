"""A step over one batch of equally long sequences, with or without a contiguous KV cache."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tinygrad import Tensor, UOp
from tinygrad.dtype import DType

from .config import ModelConfig
from .paged import RopeTables

Position: TypeAlias = int | UOp


@dataclass(frozen=True)
class DenseKVCache:
    """Keys and values of every layer: two tensors of shape (B, H_kv, capacity, D) each, or one (latents).

    Uninitialised: attention reads [0, end) only, and everything before `end` has been written. A CPU
    therefore holds pages in memory as they are used.
    """
    layers: tuple[tuple[Tensor, ...], ...]

    @staticmethod
    def create(config: ModelConfig, capacity: int, dtype: DType, batch: int = 1,
               device: str | None = None) -> DenseKVCache:
        """A cache for `capacity` tokens in each of `batch` sequences."""
        shape = config.kv_shape
        def created() -> tuple[Tensor, ...]:
            return tuple(Tensor.empty(batch, shape.heads, capacity, width, dtype=dtype, device=device)
                         for width in (shape.keys, shape.values) if width)
        return DenseKVCache(tuple(created() for _ in range(config.num_layers)))

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [tensor for layer in self.layers for tensor in layer]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(int(tensor.nbytes()) for tensor in self.tensors)


@dataclass(frozen=True)
class DenseBatch:
    """The positions of the tokens (B, T) of a step: start, start + 1, … `ropes` are the tables of all
    positions; `lengths`, int32 (B,) in memory, is start + T for a step with a cache."""
    start: Position
    ropes: tuple[RopeTables, ...]
    lengths: Tensor | None = None

    def rope_rows(self, rope: int, T: int) -> RopeTables:
        """Rows [start, start + T) of the tables of a rope."""
        cos, sin = self.ropes[rope]
        return cos[self.start:self.start + T], sin[self.start:self.start + T]
