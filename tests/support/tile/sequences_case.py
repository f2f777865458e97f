"""Tables of sequences whose states lie in pages, the recurrences over them in float64, and references held to
these.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.tile.reference_case import Given, answer, view
from tinygrad_nv.tile.templates import TABLE

Row = tuple[int, int, int, int, int, int]   # first, count, source, border, kept, target
# a long sequence that begins with zeros and keeps a border, one token in place, one that another page begins,
# two tokens with a border at their end, none at all
ROWS: tuple[Row, ...] = ((0, 37, -1, 32, 5, 0), (37, 1, 1, 0, -1, 1), (38, 20, 3, 16, 6, 4),
                         (58, 2, 2, 0, -1, 2), (0, 0, -1, 0, -1, -1))
TOKENS, PAGES = 64, 8       # of `ROWS`, with tokens of no sequence behind them
SINGLE: tuple[Row, ...] = ((0, 1, -1, 0, -1, 1), (1, 1, 2, 0, -1, 2), (2, 1, 3, 0, -1, 4),
                           (3, 0, -1, 0, -1, -1))


def read_inputs(spec: Any, given: Given) -> dict[str, np.ndarray]:
    """Returns tokens and pages in float64, by name."""
    return {each.name: view(given[each.name], each.places[0]).double().numpy()
            for each in TABLE.arguments(spec) if each.role != "out" and each.name != "sequences"}


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


def require_reference(spec: Any, given: Given, rows: Sequence[Row], out: np.ndarray, pages: np.ndarray,
                      error: float = 0.0) -> None:
    """Asserts that the exact reference has the results `out` of tokens, and `pages` up to an `error`."""
    (found, after), tokens = answer(spec, given, exact=True).values(), tokens_of(rows)
    np.testing.assert_allclose(found.numpy()[tokens], out[tokens], atol=1e-12)
    np.testing.assert_allclose(after.numpy(), pages, rtol=0, atol=error)
