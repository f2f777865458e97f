"""Rows of a quantised embedding, dequantised as they are read, and rows that stand in their place.

A table in tiles or fragments is the one that the head multiplies with (quant/types.py); a row of it is in
many places. Others have their rows in one piece.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.quant.layouts import rows_of
from tinygrad_nv.quant.tensor import QTensor, dequantize


@dataclass(frozen=True)
class InsertedRows:
    """Rows of `table` [N, hidden] in place of tokens' embeddings: `numbers`, int32 [T], has that of each
    token, −1 for a token whose own embedding stays."""
    table: Tensor
    numbers: Tensor

    def over(self, x: Tensor) -> Tensor:
        """x (1, T, hidden) with the rows in their places."""
        rows = F.embedding(self.table, self.numbers.maximum(0)).unsqueeze(0)
        return (self.numbers >= 0).reshape(1, -1, 1).where(rows, x).contiguous()


def lookup_quantised(table: QTensor, tokens: Tensor, dtype: DType) -> Tensor:
    """Rows of a table [N, K], whose scales are of single rows, for tokens 0 … N − 1 of any shape: (…, K)."""
    flat, count, k = tokens.flatten(), int(tokens.numel()), table.shape[1]

    def read(lines: Tensor, at: Tensor) -> Tensor: return F.embedding(lines, at.contiguous())
    given = {name: rows_of(table.type, name, data, flat, k, read) for name, data in table.buffers.items()}
    made = dequantize(replace(table.type, layout="rows"), (count, k), given, dtype)
    return made.reshape(*tokens.shape, k)
