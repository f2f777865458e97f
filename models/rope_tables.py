"""Rope tables on a device, of networks whose layers share some."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.quant.floats import narrow_bfloat16
from tinygrad_nv.runtime.memory import write

from .paged import RopeTables
from .rope import RopeConfig, tables


def rope_tables(ropes: tuple[RopeConfig, ...], rows: int, positions: int, dtype: DType,
                device: str | None) -> tuple[RopeTables, ...]:
    """Cosines and sines of each rope, (rows, dim/2), rounded to `dtype`, for sequences of up to `positions`
    tokens."""
    def table(values: np.ndarray) -> Tensor:
        made = Tensor.empty(*values.shape, dtype=dtype, device=device)
        write(made, 0, np.ascontiguousarray(round_to(values, dtype)).reshape(-1).view(np.uint8).data)
        return made
    return tuple((table(cos), table(sin)) for cos, sin in (tables(rope, rows, positions) for rope in ropes))


def round_to(values: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 rounded to nearest, as tinygrad casts; bfloat16 as its bits. (Casting on the device would
    schedule and compile kernels, a tenth of a second of each start.)"""
    if dtype is dtypes.bfloat16: return narrow_bfloat16(values)
    return values.astype({dtypes.float32: np.float32, dtypes.float16: np.float16}[dtype])
