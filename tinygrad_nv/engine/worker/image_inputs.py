"""Inputs of steps of a model that reads images: rows that stand for tokens, and three positions a token.

Protocol: `write(words, layout, batch)` fills the fields `image_rows` and `rope_positions` of a step's inputs,
and copies the rows of its images to `table`, in the order of their tokens. `rows(inputs)` and `ropes(inputs,
tables)` are what the network reads of them. Steps of other models have none of these.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv import functional
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import InputLayout
from tinygrad_nv.models.layers import InsertedRows
from tinygrad_nv.runtime.memory import allocate, write

if TYPE_CHECKING:
    from tinygrad_nv.models.paged import RopeTables


class ImageInputs:
    """Inputs of steps of at most `tokens` tokens. `sections`: pairs of dimensions that rotate by each
    position."""

    def __init__(self, device: str, tokens: int, hidden: int, dtype: DType,
                 sections: tuple[int, ...]) -> None:
        self.sections = sections
        self.table = Tensor.empty(tokens, hidden, dtype=dtype, device=device)
        allocate(self.table)

    def write(self, words: np.ndarray, layout: InputLayout, batch: SchedulerOutput) -> None:
        """See above; tokens lie as `write_batch` lays them out."""
        into = {each.name: words[first:end].reshape(each.shape) for each, first, end in layout.spans}
        numbers, positions = into["image_rows"], into["rope_positions"]
        numbers[:], positions[:] = -1, 0
        decode, group, count, used = 0, layout.shape.decode, 0, list[np.ndarray]()
        for seq in batch.seqs:
            if (new := seq.num_tokens) == 1: at, decode = decode, decode + 1
            else: at, group = group, group + -(-new // GROUP) * GROUP
            if (images := seq.images) is None:
                positions[:, at:at + new] = np.arange(seq.start, seq.start + new)
                continue
            positions[:, at:at + new] = images.positions_of(seq.start, new)
            own = images.numbers_of(seq.start, new)
            chosen = own[own >= 0]
            numbers[at:at + new][own >= 0] = count + np.arange(len(chosen))
            used.append(images.rows[chosen])
            count += len(chosen)
        if count: write(self.table, 0, np.concatenate(used).reshape(-1).view(np.uint8).data)

    def rows(self, inputs: dict[str, Tensor]) -> InsertedRows:
        """Returns the rows that stand for tokens of a step."""
        return InsertedRows(self.table, inputs["image_rows"])

    def ropes(self, inputs: dict[str, Tensor], tables: tuple[RopeTables, ...]) -> tuple[RopeTables, ...]:
        """Cosines and sines of each token, (T, 1, dim/2), of each rope."""
        return tuple((self._select_rows(cos, inputs), self._select_rows(sin, inputs)) for cos, sin in tables)

    def _select_rows(self, table: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Selects, for each section of the pairs, the rows at its position."""
        made, first = list[Tensor](), 0
        for at, count in zip(inputs["rope_positions"].split(1), self.sections, strict=True):
            made.append(functional.embedding(table, at.reshape(-1))[:, first:first + count])
            first += count
        return made[0].cat(*made[1:], dim=1).unsqueeze(1).contiguous()
