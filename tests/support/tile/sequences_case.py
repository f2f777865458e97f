"""Tables of sequences whose states lie in pages, and the recurrences over them in float64."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Row = tuple[int, int, int, int, int, int]   # first, count, source, border, kept, target
# a long sequence that begins with zeros and keeps a border, one token in place, one that another page begins,
# two tokens with a border at their end, none at all
ROWS: tuple[Row, ...] = ((0, 37, -1, 32, 5, 0), (37, 1, 1, 0, -1, 1), (38, 20, 3, 16, 6, 4),
                         (58, 2, 2, 0, -1, 2), (0, 0, -1, 0, -1, -1))
TOKENS, PAGES = 64, 8       # of `ROWS`, with tokens of no sequence behind them
SINGLE: tuple[Row, ...] = ((0, 1, -1, 0, -1, 1), (1, 1, 2, 0, -1, 2), (2, 1, 3, 0, -1, 4),
                           (3, 0, -1, 0, -1, -1))


def follow(rows: Sequence[Row], pages: np.ndarray,
           step: Callable[[np.ndarray, int], np.ndarray]) -> np.ndarray:
    """Pages of states after `state = step(state, token)` of every token of every sequence."""
    after = pages.astype(np.float64).copy()
    for first, count, source, border, kept, target in rows:
        state = pages[source].astype(np.float64) if source >= 0 else np.zeros(pages.shape[1:])
        for i in range(count):
            state = step(state, first + i)
            if i + 1 == border and kept >= 0: after[kept] = state
        if count and target >= 0: after[target] = state
    return after


def tokens_of(rows: Sequence[Row]) -> list[int]:
    """The tokens of sequences."""
    return [first + i for first, count, *_ in rows for i in range(count)]
