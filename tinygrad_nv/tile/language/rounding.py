"""How a store rounds: what policies of an output's dtype say.

Protocol: `narrowed(value, tensor, offsets)` converts a tile to the dtype of a tensor. With `saturate` numbers
beyond the range become its largest finite one. With `stochastic`, a seed, a float32 becomes one of its two
neighbours in bfloat16 with the chance of its nearness: 16 random bits, Philox's for the element's offset in
the tensor, are added to the bits that are cut off (Gupta et al. 2015, "Deep Learning with Limited Numerical
Precision"). The same element of the same value is always rounded the same way. Infinities and NaN stay.
"""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.language.elements import bitcast, clamp, where
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.random import philox
from tinygrad_nv.tile.language.trace import fail
from tinygrad_nv.tile.language.values import Tile, broadcast, cast

LARGEST = {dtypes.float16: 65504.0, dtypes.bfloat16: 3.3895313892515355e38, dtypes.fp8e4m3: 448.0,
           dtypes.fp8e5m2: 57344.0, dtypes.int8: 127, dtypes.uint8: 255, dtypes.int16: 32767,
           dtypes.uint16: 65535}
EXPONENT, CUT = 0x7F800000, 0xFFFF0000


def least(dtype: DType) -> float:
    """The smallest finite number of a dtype."""
    if dtypes.is_unsigned(dtype): return 0
    return -LARGEST[dtype] - (not dtypes.is_float(dtype))


def narrow(value: Tile, tensor: TensorParameter, offsets: Tile) -> Tile:
    """A tile in a tensor's dtype, as its policies say. `offsets`: of the elements in the tensor, int32."""
    if tensor.saturate:
        wide = cast(value, dtypes.float32 if dtypes.is_float(value.dtype) else dtypes.int32)
        value = where(wide == wide, clamp(wide, least(tensor.dtype), LARGEST[tensor.dtype]), wide)
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
