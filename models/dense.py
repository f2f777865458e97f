"""A step over one batch of equally long sequences, with or without a contiguous KV cache."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F

from .config import ModelConfig
from .paged import RopeTables

Position: TypeAlias = int | UOp


@dataclass(frozen=True)
class DenseKVCache:
    """Keys and values of every layer: two tensors of shape (B, H_kv, capacity, D) each, or one (latents); the
    states of layers that have such, (B, …) each.

    Uninitialised: attention reads [0, end) only, and everything before `end` has been written. A CPU
    therefore holds pages in memory as they are used.
    """
    layers: tuple[tuple[Tensor, ...], ...]

    @staticmethod
    def create(config: ModelConfig, capacity: int, dtype: DType, batch: int = 1,
               device: str | None = None) -> DenseKVCache:
        """A cache for `capacity` tokens in each of `batch` sequences."""
        shape = config.kv_shape
        def create_layer(layer: int) -> tuple[Tensor, ...]:
            mixer = config.mixer(layer)
            states = tuple(Tensor.empty(batch, *each.shape, dtype=each.dtype or dtype, device=device)
                           for each in (() if mixer is None else mixer.states))
            widths = (shape.keys, shape.values) if config.has_attention(layer) else ()
            return tuple(Tensor.empty(batch, shape.heads, capacity, width, dtype=dtype, device=device)
                         for width in widths if width) + states
        return DenseKVCache(tuple(create_layer(i) for i in range(config.num_layers)))

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [tensor for layer in self.layers for tensor in layer]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(int(tensor.nbytes()) for tensor in self.tensors)


@dataclass(frozen=True)
class Documents:
    """Several documents in each row of tokens (B, T), one after the other, int32 (B, T) in memory both: of
    each token the position in its document, and the number of its document in the row, from 1 on; 0 of
    padding. No token attends to one of another document."""
    positions: Tensor
    segments: Tensor

    def bounds(self, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns where each token's document begins and ends in the row, int32 (B, T) both; with `chunk` the
        chunk of so many tokens of it. Those of padding begin and end where they stand: they see nothing."""
        B, T = (int(n) for n in self.positions.shape)
        place = Tensor.arange(T, dtype=dtypes.int32).reshape(1, T)
        there = self.segments != 0
        begin = there.where(place - self.positions, place).contiguous()
        length = (begin.reshape(B, T, 1) == begin.reshape(B, 1, T)).sum(-1, dtype=dtypes.int32)
        end = there.where(begin + length, place).contiguous()
        if chunk is None: return begin, end
        first = begin + self.positions // chunk * chunk
        return there.where(first, place).contiguous(), end.minimum(first + chunk).contiguous()

    def mask(self, window: int | None, chunked: bool) -> Tensor:
        """True where a token attends to another, bool (B, 1, T, T): of its document, up to its own place, and
        within the window."""
        B, T = (int(n) for n in self.positions.shape)
        row, document = (each.reshape(B, 1, T, 1) for each in (self.positions, self.segments))
        column, other = (each.reshape(B, 1, 1, T) for each in (self.positions, self.segments))
        seen = (document == other) & (column <= row)
        if window is not None:
            first = row - row % window if chunked else row - window + 1
            seen = seen & (column >= first)
        return seen.contiguous()


class SequencePart(Protocol):
    """The tokens of each row that this process has, where others have the rest: their `places` in the row,
    int32 (T,) in memory, and the attention of their q (B, H, T, D) over the keys and values of all tokens up
    to each."""
    places: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None,
               softcap: float | None) -> Tensor: ...


@dataclass(frozen=True)
class DenseBatch:
    """The positions of the tokens (B, T) of a step: start, start + 1, … or those of `documents`, or of a
    `part` of each row. `ropes` are the tables of all positions; `lengths`, int32 (B,) in memory, is start + T
    for a step with a cache. `written` is as in `PagedBatch`."""
    start: Position
    ropes: tuple[RopeTables, ...]
    lengths: Tensor | None = None
    documents: Documents | None = None
    part: SequencePart | None = None
    written: list[Tensor] = field(default_factory=list, compare=False)

    def rope_rows(self, rope: int, T: int) -> RopeTables:
        """Rows of the tables of a rope for the tokens: (T, dim/2), or with documents (B, 1, T, dim/2)."""
        cos, sin = self.ropes[rope]
        if (found := self.documents) is not None:
            cos, sin = (F.embedding(each, found.positions).unsqueeze(1) for each in (cos, sin))
        elif self.part is not None:
            cos, sin = (F.embedding(each, self.part.places) for each in (cos, sin))
        else: cos, sin = (each[self.start:self.start + T] for each in (cos, sin))
        return cos, sin

    def positions(self, T: int) -> Tensor:
        """Returns the positions of the tokens, int32 (T,) or (B, 1, T)."""
        if self.documents is not None: return self.documents.positions.unsqueeze(1)
        if self.part is not None: return self.part.places
        return Tensor.arange(T) + self.start
