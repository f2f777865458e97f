"""The dtypes and shapes that tiles can have."""
from __future__ import annotations

from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.trace import fail

COMPUTED = (dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.int32,
            dtypes.uint32, dtypes.int16, dtypes.uint16, dtypes.int8, dtypes.uint8, dtypes.bool)


def check_dtype(dtype: Any) -> DType:
    """The dtype of a tile, from a DType or from one with policies. Raises for those that tiles cannot
    have."""
    plain = getattr(dtype, "dtype", dtype)
    if plain not in COMPUTED:
        fail(f"a tile of {getattr(plain, 'name', repr(plain))}", "one of " + ", ".join(map(short, COMPUTED)))
    return plain


def check_shape(shape: Any) -> tuple[int, ...]:
    """Sizes of a tile, as ints. Blocks count as their sizes."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    made = []
    for one in sizes:
        try: size = one.__index__()
        except AttributeError: fail(f"{one!r} as an extent of a tile", "an integer or a block")
        if size < 1: fail(f"a tile with extent {size}", "extents of 1 and more")
        made.append(size)
    return tuple(made)
