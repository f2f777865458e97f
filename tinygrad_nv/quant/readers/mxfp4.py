"""gpt-oss's MXFP4: matrices of experts, and no others.

    …experts.gate_up_proj_blocks    U8 [E, N, K / 32, 16]     two E2M1 codes, the first in the lower bits
    …experts.gate_up_proj_scales    U8 [E, N, K / 32]         E8M0
    …experts.gate_up_proj_bias      [E, N]

transformers transposes them to [E, K, N]; here a matrix has N outputs and K inputs, as all have. Source:
transformers 5.23.0, integrations/mxfp4.py.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.quant.readers.checks import checked, checked_type, unquantised
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix
from tinygrad_nv.quant.types import MXFP4


@dataclass(frozen=True)
class MXFP4Reader:
    """Reads experts; linear layers are not quantised."""

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`: a layer of its own, [N, K / 32, 16], if there is one."""
        if unquantised(stored, layer, "weight_blocks"): return None
        return _stored(f"{layer}.weight", (), shape, stored)

    def experts(self, matrices: str, count: int, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
        """`matrices` (model.layers.0.mlp.experts.gate_up_proj) of `count` experts, N outputs x K inputs each:
        one matrix, with rows [i N, (i + 1) N) of expert i. Raises `WeightError` for what is missing or does
        not fit."""
        return _stored(matrices, (count,), shape, stored)


def _stored(name: str, count: tuple[int, ...], shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    (n, k), groups, blocks, scales = shape, -(-shape[1] // 32), f"{name}_blocks", f"{name}_scales"
    checked_type(name, MXFP4, shape)
    checked(stored, blocks, ("U8",), (*count, n, groups, 16))
    checked(stored, scales, ("U8",), (*count, n, groups))

    def arrays(get: Get) -> dict[str, np.ndarray]:
        return {"codes": get(blocks).reshape(-1, groups * 16)[:, :k // 2],
                "scales": get(scales).reshape(-1, groups)}
    return StoredMatrix(MXFP4, (blocks, scales), arrays)


def reader(config: Mapping[str, Any], name: str) -> MXFP4Reader:
    """Of a `quantization_config`; it has no settings that a reader needs."""
    return MXFP4Reader()
