"""gpt-oss's MXFP4: matrices of experts, and no others.

    …experts.gate_up_proj_blocks    U8 [E, N, K / 32, 16]     two E2M1 codes, the first in the lower bits
    …experts.gate_up_proj_scales    U8 [E, N, K / 32]         E8M0

A checkpoint lists them as those of each expert, …experts.0.gate_up_proj_blocks [N, K / 32, 16], and so on. Of
gate_up_proj even rows are gate_proj, odd ones up_proj. transformers transposes them to [E, K, N]; here a
matrix has N outputs and K inputs, as all have. Source: transformers 5.23.0, integrations/mxfp4.py.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.quant.readers.checks import check_tensor, check_type, is_unquantised
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides
from tinygrad_nv.quant.types import MXFP4

GATE_UP = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}     # rows of gate_up_proj


@dataclass(frozen=True)
class MXFP4Reader:
    """Reads experts; linear layers are not quantised."""

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`: of an expert its own, or its rows of gate and up; of other layers weight_blocks, [N,
        K / 32, 16], if there are any."""
        if ".experts." not in layer:
            if is_unquantised(stored, layer, "weight_blocks"): return None
            return _matrix(f"{layer}.weight", shape, stored)
        if f"{layer}.weight" in stored: return None
        expert, _, name = layer.rpartition(".")
        if name not in GATE_UP: return _matrix(layer, shape, stored)
        return _matrix(f"{expert}.gate_up_proj", shape, stored, GATE_UP[name])


def _matrix(name: str, shape: tuple[int, int], stored: Stored, rows: slice | None = None) -> StoredMatrix:
    """Returns the matrix of all rows of blocks and scales, or of half of them."""
    (n, k), groups, blocks, scales = shape, -(-shape[1] // 32), f"{name}_blocks", f"{name}_scales"
    whole = n if rows is None else 2 * n
    check_type(name, MXFP4, shape)
    check_tensor(stored, blocks, ("U8",), (whole, groups, 16))
    check_tensor(stored, scales, ("U8",), (whole, groups))

    def arrays(get: Get) -> dict[str, np.ndarray]:
        own = slice(None) if rows is None else rows
        return {"codes": get(blocks)[own].reshape(n, groups * 16)[:, :k // 2], "scales": get(scales)[own]}
    lie = Strides(0, count=1 if rows is None else 2), Strides(1, 32)
    return StoredMatrix(MXFP4, (blocks, scales), arrays, cuts={blocks: lie, scales: lie})


def reader(config: Mapping[str, Any], name: str) -> MXFP4Reader:
    """Returns the reader of a `quantization_config`; it has no settings that a reader needs."""
    return MXFP4Reader()
