"""An image as the patches that a vision tower multiplies, and their places, as transformers'
Qwen2VLImageProcessorPil has them.

Protocol: `patches(image, config)` resizes RGB bytes [height, width, 3] with pillow (the extra `image`) to
multiples of a row's pixels, normalises, and returns float32 [patches, channels · frames · patch²], with the
grid of rows. A still image stands for each of a patch's frames.

Patches come row by row of the language model, `merge` × `merge` of them one after the other. The tower
computes rows window by window: `window_order` is that order, and `window_starts` where each window's patches
begin. A token of a prompt has three positions, temporal, vertical and horizontal (M-RoPE, arXiv 2409.12191):
of text all are equal; of an image's rows the first is the image's, the others add the row and the column;
text behind an image goes on after the largest.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.errors import RequestError

from .config import VisionConfig

MAX_RATIO = 200     # of an image's edges, the image processor's own


def fit_size(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
    """Height and width in pixels, multiples of a row's, within the limits of pixels where the ratio allows
    it. Raises `RequestError`."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise RequestError(f"an image of {width} × {height} pixels",
                           f"edges of a ratio of at most {MAX_RATIO}", "crop the image")
    factor, least, most = config.patch * config.merge, config.images.min_pixels, config.images.max_pixels
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if h * w > most:
        scale = math.sqrt(height * width / most)
        h, w = (max(factor, math.floor(each / scale / factor) * factor) for each in (height, width))
    elif h * w < least:
        scale = math.sqrt(least / (height * width))
        h, w = (math.ceil(each * scale / factor) * factor for each in (height, width))
    return h, w


def grid_of(shape: Sequence[int], config: VisionConfig) -> Grid:
    """The rows that an image becomes, of shape [height, width, …] in pixels. Raises `RequestError`."""
    h, w = fit_size(shape[0], shape[1], config)
    row = config.patch * config.merge
    return Grid(h // row, w // row)


def patches(image: np.ndarray, config: VisionConfig) -> tuple[np.ndarray, Grid]:
    """See above. Raises `RequestError`."""
    from PIL import Image
    grid, row = grid_of(image.shape, config), config.patch * config.merge
    size = grid.width * row, grid.height * row
    pixels = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    # the 256 values of each channel: normalised as bytes, images are a fourth as large
    mean, std = (np.array(each, np.float32)[:, None] for each in (config.images.mean, config.images.std))
    values = (np.arange(256, dtype=np.float32) * np.float32(1 / 255) - mean) / std
    m, p = config.merge, config.patch
    blocks = pixels.reshape(grid.height, m, p, grid.width, m, p, config.channels)
    blocks = blocks.transpose(6, 0, 3, 1, 4, 2, 5)      # channels, rows, columns, merge², patch²
    out = np.empty((grid.rows * m * m, config.channels, config.frames, p * p), np.float32)
    for channel, (table, own) in enumerate(zip(values, blocks, strict=True)):
        out[:, channel] = table[own.reshape(-1, 1, p * p)]
    return out.reshape(-1, config.patch_width), grid


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
