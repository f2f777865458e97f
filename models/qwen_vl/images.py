"""An image as the patches that a vision tower multiplies, as transformers' Qwen2VLImageProcessorPil has them.

Protocol: `patches(image, config)` resizes RGB bytes [height, width, 3] with pillow (the extra `image`) to
multiples of a row's pixels, normalises, and returns float32 [patches, channels · frames · patch²], with the
grid of rows. A still image stands for each of a patch's frames.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tinygrad_nv.errors import RequestError

from .config import VisionConfig
from .layout import Grid

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
