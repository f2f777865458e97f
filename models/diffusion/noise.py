"""Initial latents of a seed, without torch: the numbers of torch.Generator("cpu").manual_seed(seed).

Protocol: `normal(seed, shape)` is torch.randn(shape, generator=…) of float32 on a CPU, to the last bits of
the logarithm and the sine. Uniform numbers are the lowest 24 bits of MT19937's 32 (doi
10.1145/272991.272995), seeded by 1812433253; 16 of them make 16 normal ones, the first eight radii, the
others angles (Box and Muller, doi 10.1214/aoms/1177706645). Fewer than 16 are made two by two, of uniform
numbers of 53 bits.
"""
from __future__ import annotations

import math

import numpy as np

from tinygrad_nv.errors import RequestError

BLOCK = 16          # numbers that are made at once
MANTISSA = np.uint64((1 << 53) - 1)
MOST = 1 << 32      # torch takes larger seeds, and uses their lowest 32 bits


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers, float32, of `shape`. Raises `RequestError` for a seed below 0 or beyond 64 bits."""
    return Generator(seed).normal(shape)


class Generator:
    """Normal numbers of a seed, one array after the other."""

    def __init__(self, seed: int) -> None:
        if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 64:
            raise RequestError(f"the seed is {seed!r}", "0 to 2^64 − 1")
        self.state = np.random.RandomState(seed % MOST)

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next numbers, float32, of `shape`; of fewer than 16 elements those of a new generator."""
        if (count := math.prod(shape)) < BLOCK: return self._pairs(count).reshape(shape)
        made = self._uniform(count)
        whole = count // BLOCK * BLOCK
        made[:whole] = _boxes(made[:whole])
        # the last 16 are drawn again where blocks do not come out even
        if whole < count: made[-BLOCK:] = _boxes(self._uniform(BLOCK))
        return made.reshape(shape)

    def _pairs(self, count: int) -> np.ndarray:
        """Normal numbers, the second of each pair by the sine."""
        halves = self._draw(4 * -(-count // 2)).astype(np.uint64).reshape(-1, 2, 2)
        uniform = ((halves[..., 0] << np.uint64(32) | halves[..., 1]) & MANTISSA).astype(float) * 2.0 ** -53
        angle, radius = 2 * math.pi * uniform[:, 0], np.sqrt(-2 * np.log1p(-uniform[:, 1]))
        made = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
        return made[:count].astype(np.float32)

    def _draw(self, count: int) -> np.ndarray:
        """32 bits each."""
        return self.state.randint(0, 1 << 32, count, np.uint64).astype(np.uint32)

    def _uniform(self, count: int) -> np.ndarray:
        """In 0 … 1, float32."""
        return (self._draw(count) & 0xFFFFFF).astype(np.float32) * np.float32(2.0 ** -24)


def _boxes(uniform: np.ndarray) -> np.ndarray:
    """Normal numbers of uniform ones, 16 by 16."""
    u, v = np.split(uniform.reshape(-1, BLOCK), 2, axis=1)
    radius, angle = np.sqrt(-2 * np.log1p(-u)), np.float32(2 * math.pi) * v
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
