"""Pieces that a row of a batch is made from."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
