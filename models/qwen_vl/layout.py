"""Places of patches: windows, and the numbers that rotate queries and keys.

Protocol: patches come row by row of the language model, `merge` × `merge` of them one after the other, as
images.py makes them. The tower computes rows window by window: `window_order` is that order, and
`window_starts` where each window's patches begin. A token of a prompt has three positions, temporal, vertical
and horizontal (M-RoPE, arXiv 2409.12191): of text all are equal; of an image's rows the first is the image's,
the others add the row and the column; text behind an image goes on after the largest.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .config import VisionConfig

THETA = 10_000.0    # of the tower's rope


@dataclass(frozen=True)
class Grid:
    """An image of `height` × `width` rows of the language model."""
    height: int
    width: int

    @property
    def rows(self) -> int: return self.height * self.width


def windows(grid: Grid, edge: int) -> list[np.ndarray]:
    """The rows of each window of `edge` × `edge`, smaller at the ends."""
    numbers = np.arange(grid.rows, dtype=np.int32).reshape(grid.height, grid.width)
    return [numbers[y:y + edge, x:x + edge].reshape(-1)
            for y in range(0, grid.height, edge) for x in range(0, grid.width, edge)]


def window_order(grid: Grid, config: VisionConfig) -> np.ndarray:
    """Rows in the tower's order, int32 [rows]."""
    return np.concatenate(windows(grid, config.window_rows))


def window_starts(grid: Grid, config: VisionConfig) -> np.ndarray:
    """The first patch of each window, and the end of the last, int32 [windows + 1]."""
    sizes = [len(each) * config.unit for each in windows(grid, config.window_rows)]
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def patch_rope(grid: Grid, config: VisionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the patches, float32 [patches, head / 2] each, in index order: one half of the
    pairs rotates by the patch's row, the other by its column."""
    m, head = config.merge, config.hidden // config.heads
    places = np.mgrid[:grid.height * m, :grid.width * m].reshape(2, grid.height, m, grid.width, m)
    y, x = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    steps = np.arange(0, head // 2, 2, dtype=np.float32) / np.float32(head // 2)
    frequencies = (1.0 / np.float32(THETA) ** steps).astype(np.float32)
    angles = np.concatenate([each[:, None].astype(np.float32) * frequencies for each in (y, x)], axis=1)
    return np.cos(angles), np.sin(angles)


def prompt_positions(is_image: np.ndarray, grids: Sequence[Grid]) -> np.ndarray:
    """The three positions of each token, int32 [3, tokens]; `is_image` [tokens] is true for the rows of
    images, which stand in the order of `grids`."""
    out, at, following = np.zeros((3, len(is_image)), np.int32), 0, 0
    for grid in grids:
        first = at + int(np.argmax(is_image[at:]))
        out[:, at:first] = following + np.arange(first - at)
        following += first - at
        y, x = np.divmod(np.arange(grid.rows), grid.width)
        out[:, first:first + grid.rows] = following + np.stack([np.zeros_like(y), y, x])
        at, following = first + grid.rows, following + max(grid.height, grid.width)
    out[:, at:] = following + np.arange(len(is_image) - at)
    return out
