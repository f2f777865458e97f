"""A call of a kernel in NumPy (tile/language/interpret.py)."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.language.interpret import run
from tinygrad_nv.tile.language.ir import Program


def interpret(program: Program, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the outputs, as arrays: one, or a tuple. Floats of 16 bits and fewer are float32."""
    arrays = {name: _array(x) for name, x in tensors.items()}
    made = list(run(program, arrays).values())
    return made[0] if len(made) == 1 else tuple(made)


def _array(x: Tensor) -> np.ndarray[Any, Any]:
    return (x.cast(dtypes.float32) if dtypes.is_float(x.dtype) else x).numpy()
