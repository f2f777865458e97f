"""How a store rounds: what policies of an output's dtype say.

Protocol: `narrowed(value, tensor, offsets)` converts a tile to the dtype of a tensor. With `saturate` numbers
beyond the range become its largest finite one. With `stochastic`, a seed, a float32 becomes one of its two
neighbours in bfloat16 with the chance of its nearness: 16 random bits, Philox's for the element's offset in
the tensor, are added to the bits that are cut off (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"). The same element of the same value is always rounded the same way. Infinities and NaN stay.

`philox` makes random numbers of a counter: Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel
random numbers: as easy as 1, 2, 3"). They depend on key and counter alone, not on who makes them.
"""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention.dropout import MULTIPLIERS, ROUNDS, WEYL
from tinygrad_nv.tile.language.elements import bitcast, clamp, mul_high, where
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.trace import fail
from tinygrad_nv.tile.language.values import Operand, Tile, broadcast, cast, describe, scalar

LARGEST = {dtypes.float16: 65504.0, dtypes.bfloat16: 3.3895313892515355e38, dtypes.fp8e4m3: 448.0,
           dtypes.fp8e5m2: 57344.0, dtypes.int8: 127, dtypes.uint8: 255, dtypes.int16: 32767,
           dtypes.uint16: 65535}
EXPONENT, CUT = 0x7F800000, 0xFFFF0000


def smallest_number(dtype: DType) -> float:
    """The smallest finite number of a dtype."""
    if dtypes.is_unsigned(dtype): return 0
    return -LARGEST[dtype] - (not dtypes.is_float(dtype))


def narrow(value: Tile, tensor: TensorParameter, offsets: Tile) -> Tile:
    """A tile in a tensor's dtype, as its policies say. `offsets`: of the elements in the tensor, int32."""
    if tensor.saturate:
        wide = cast(value, dtypes.float32 if dtypes.is_float(value.dtype) else dtypes.int32)
        value = where(wide == wide, clamp(wide, smallest_number(tensor.dtype), LARGEST[tensor.dtype]), wide)
    if tensor.stochastic is not None: value = _stochastic(value, tensor.dtype, tensor.stochastic, offsets)
    return cast(value, tensor.dtype)


def _stochastic(value: Tile, dtype: DType, seed: int, offsets: Tile) -> Tile:
    if dtype != dtypes.bfloat16 or value.dtype not in (dtypes.float32, dtypes.bfloat16):
        fail(f"@stochastic_round on a store of {value.dtype.name} to {dtype.name}", "float32 to bfloat16",
             "leave the policy out, or store to bfloat16")
    wide, offsets = broadcast(cast(value, dtypes.float32), offsets)
    bits = bitcast(wide, dtypes.uint32)
    noise = philox((seed & 0xFFFFFFFF, seed >> 32), (offsets, 0, 0, 0))[0] & 0xFFFF
    finite = (bits & EXPONENT) != EXPONENT
    return where(finite, bitcast((bits + noise) & CUT, dtypes.float32), wide)


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
