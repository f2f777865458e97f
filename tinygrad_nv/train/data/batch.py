"""`Row`: ids, labels and segments of a sequence; `Batch`: rows as arrays of a fixed shape.

Protocol: `collate(rows, width, pad)` makes the arrays. A row that is None is padding: a batch has the same
shapes whatever there is, as a captured step needs them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PADDING = 0     # the segment of padding
IGNORE = -100   # the label of a token without loss, as torch's `ignore_index`


@dataclass(frozen=True)
class Row:
    """Documents, one after the other: `ids` and `labels`, int32 [tokens], and the tokens of each segment.
    A label is the token itself, not the next one, as transformers' models take them; IGNORE: no loss. The
    first token of a segment has no loss, since nothing predicts it."""
    ids: np.ndarray
    labels: np.ndarray
    lengths: tuple[int, ...]


def row(ids: np.ndarray, loss: np.ndarray | None, lengths: tuple[int, ...]) -> Row:
    """The row of ids and a loss mask, bool [tokens] (None: loss on all)."""
    assert len(ids) == sum(lengths), (len(ids), lengths)
    assert min(lengths, default=0) > 0, lengths
    labels = ids.astype(np.int32)
    if loss is not None: labels[~loss] = IGNORE
    starts = np.cumsum((0, *lengths[:-1]))
    labels[starts] = IGNORE
    return Row(ids.astype(np.int32), labels, lengths)


@dataclass(frozen=True)
class Batch:
    """Rows of documents, int32 [rows, width] each:

      ids         tokens
      labels      the token itself where it has loss, else IGNORE, as transformers' models take them
      positions   of the token in its segment, from 0
      segments    1, 2, … by segment of the row, 0 for padding: tokens attend to earlier ones of theirs

    Of preferences the first half of the rows is chosen, the second rejected: row i and row n/2 + i are a
    pair."""
    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    segments: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        """The token that each token predicts, int32 [rows, width]; IGNORE without loss. No target is of
        another segment."""
        last = np.full((len(self.labels), 1), IGNORE, np.int32)
        return np.concatenate((self.labels[:, 1:], last), 1)

    @property
    def loss_tokens(self) -> int:
        """Tokens with loss: what a mean is over."""
        return int(np.count_nonzero(self.labels != IGNORE))

    @property
    def tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.segments != PADDING))

    def cu_seqlens(self, size: int | None = None) -> np.ndarray:
        """Begin of each segment in the rows one after the other, and the end, int32 [segments + 1], as
        FlashAttention's variable-length functions take it; padding at the end of a row is a segment. `size`:
        so many elements, those that are left with the end again."""
        flat, width = self.segments.ravel(), self.segments.shape[1]
        begins = np.ones(len(flat), bool)
        begins[1:] = flat[1:] != flat[:-1]
        begins[::width] = True
        out = np.append(np.flatnonzero(begins), len(flat)).astype(np.int32)
        if size is None: return out
        assert size >= len(out), (size, len(out))
        return np.pad(out, (0, size - len(out)), constant_values=len(flat))


def collate(rows: Sequence[Row | None], width: int, pad: int = 0) -> Batch:
    """A batch of rows of `width` tokens, None where there is none; `pad` is the id of padding."""
    count = len(rows)
    ids, labels = np.full((count, width), pad, np.int32), np.full((count, width), IGNORE, np.int32)
    positions, segments = np.zeros((count, width), np.int32), np.full((count, width), PADDING, np.int32)
    for number, row in enumerate(rows):
        if row is None: continue
        used = len(row.ids)
        assert used <= width, (used, width)
        ids[number, :used], labels[number, :used] = row.ids, row.labels
        counts = np.array(row.lengths, np.int64)
        segments[number, :used] = np.repeat(np.arange(1, len(counts) + 1), counts)
        positions[number, :used] = np.arange(used) - np.repeat(np.cumsum(counts) - counts, counts)
    return Batch(ids, labels, positions, segments)
