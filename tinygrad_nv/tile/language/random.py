"""Random numbers of a counter: Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers:
as
easy as 1, 2, 3"). What is made depends on key and counter alone, not on who makes it."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.dropout import MULTIPLIERS, ROUNDS, WEYL
from tinygrad_nv.tile.language.elements import mul_high
from tinygrad_nv.tile.language.trace import fail
from tinygrad_nv.tile.language.values import Operand, Tile, cast, describe, scalar


def philox(key: tuple[Operand, Operand], counter: tuple[Operand, Operand, Operand, Operand]) -> list[Tile]:
    """Four tiles of uint32, of a key of two words and a counter of four."""
    for words, count in ((key, 2), (counter, 4)):
        if not isinstance(words, (tuple, list)) or len(words) != count:
            fail(f"{describe(words)} in tile.philox", "a key of two words and a counter of four",
                 "write tile.philox((seed, 0), (offset, 0, 0, 0))")
    k0, k1 = (_word(each) for each in key)
    c0, c1, c2, c3 = (_word(each) for each in counter)
    for _ in range(ROUNDS):
        high0, low0 = mul_high(c0, MULTIPLIERS[0]), c0 * MULTIPLIERS[0]
        high1, low1 = mul_high(c2, MULTIPLIERS[1]), c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + WEYL[0], k1 + WEYL[1]
    return [c0, c1, c2, c3]


def _word(x: Operand) -> Tile: return cast(scalar(x, dtypes.uint32), dtypes.uint32)


def random(seed: Operand | tuple[Operand, Operand], offset: Tile) -> Tile:
    """Numbers from 0 to below 1 in float32, of a seed and of each element's offset: the same wherever they
    are made."""
    key = seed if isinstance(seed, tuple) else (seed, 0)
    word = philox(key, (offset, 0, 0, 0))[0]
    return cast(cast(word >> 8, dtypes.int32), dtypes.float32) * 2.0 ** -24
