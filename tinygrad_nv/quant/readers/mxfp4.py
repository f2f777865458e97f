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

    def experts(self, matrices: str, count: int, shape: tuple[int, int],
                stored: Stored) -> list[StoredMatrix]:
        """`matrices` (model.layers.0.mlp.experts.gate_up_proj) of `count` experts, N outputs x K inputs each.
        Raises `WeightError` for what is missing or does not fit."""
        return [_stored(matrices, (i, count), shape, stored) for i in range(count)]


def _stored(name: str, expert: tuple[()] | tuple[int, int], shape: tuple[int, int],
            stored: Stored) -> StoredMatrix:
    (n, k), first, blocks, scales = shape, expert[1:], f"{name}_blocks", f"{name}_scales"
    checked_type(name, MXFP4, shape)
    groups = -(-k // 32)
    checked(stored, blocks, ("U8",), (*first, n, groups, 16))
    checked(stored, scales, ("U8",), (*first, n, groups))

    def arrays(get: Get) -> dict[str, np.ndarray]:
        codes, powers = (get(each)[expert[0]] if expert else get(each) for each in (blocks, scales))
        return {"codes": codes.reshape(n, groups * 16)[:, :k // 2], "scales": powers}
    return StoredMatrix(MXFP4, (blocks, scales), arrays)


def reader(config: Mapping[str, Any], name: str) -> MXFP4Reader:
    """Of a `quantization_config`; it has no settings that a reader needs."""
    return MXFP4Reader()
