"""AutoAWQ's gemm version: 4-bit codes of a group of inputs, with zero points.

    qweight   I32 [K, N / 8]       eight outputs in a word, in the order of `ORDER`
    qzeros    I32 [K / g, N / 8]   in the same way
    scales    [K / g, N]           w = (q − z) · s

Source: AutoAWQ 0.2.9, awq/utils/packing_utils.py. Without qzeros (zero_point false) z is 8.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.quant.packing import planes_of
from tinygrad_nv.quant.readers.checks import (
    check_float,
    check_tensor,
    check_type,
    group_size,
    is_unquantised,
    setting,
)
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides
from tinygrad_nv.quant.types import UINT4, QType, Scale

# the outputs of a word's nibbles, the lowest first: two that a half2 needs lie 16 bits apart
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AWQReader:
    """Reads layers with groups of `group` inputs, 0 for all of them."""
    group: int

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        if is_unquantised(stored, layer, "qweight"): return None
        (n, k), (codes, zeros, scales) = shape, (f"{layer}.{x}" for x in ("qweight", "qzeros", "scales"))
        groups = -(-k // (self.group or k))
        check_tensor(stored, codes, ("I32",), (k, -(-n // 8)))
        dtype, asymmetric = check_float(stored, scales, (groups, n)), zeros in stored
        if asymmetric: check_tensor(stored, zeros, ("I32",), (groups, -(-n // 8)))
        scale = Scale(1, self.group, dtype)
        type = check_type(layer, QType(UINT4, scale, 0 if asymmetric else 8, zeros=asymmetric), shape)

        def arrays(get: Get) -> dict[str, np.ndarray]:
            words = get(codes)
            made = planes_of(lambda begin, end: _codes(words[:, begin // 8:-(-end // 8)])[:, :end - begin].T,
                             n, k, 4)
            made["scales"] = np.ascontiguousarray(get(scales).T)
            if asymmetric: made["zeros"] = np.ascontiguousarray(_codes(get(zeros))[:, :n].T)
            return made
        groups_of = Strides(0, self.group) if self.group else None
        cuts = {codes: (Strides(1, 8), Strides(0)), zeros: (Strides(1, 8), groups_of),
                scales: (Strides(1), groups_of)}
        return StoredMatrix(type, (codes, scales, *[zeros] * asymmetric), arrays, cuts=cuts)


def _codes(words: np.ndarray) -> np.ndarray:
    """uint8 [R, 8 C] of words [R, C]."""
    data = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    made = np.empty((len(words), words.shape[1] * 8), np.uint8)
    for i, column in enumerate(ORDER):
        made[:, column::8] = data[:, :, i // 2] >> np.uint8(4 * (i % 2)) & np.uint8(15)
    return made


def reader(config: Mapping[str, Any], name: str) -> AWQReader:
    """Returns the reader of a `quantization_config`, with AutoAWQ's names or transformers'. Raises
    `ModelError`."""
    named = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size", 128), **config}
    setting(named, "bits", 4, (4,), name)
    version = config.get("version") or config.get("format") or "gemm"
    setting({"version": str(version).lower()}, "version", "gemm", ("gemm",), name)
    return AWQReader(group_size(named, name))
