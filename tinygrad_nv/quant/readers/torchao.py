"""torchao: its tensors of weights, as transformers stores them in safetensors, by the parts they consist of.

    _weight_qdata       I8 or F8_E4M3 [N, K]: Int8Tensor, IntxUnpackedToInt8Tensor (fewer bits, a byte each),
                        Float8Tensor. I8 [N, K / 2], two signed codes of 4 bits, the first in the lower ones:
                        Int4Tensor
    _weight_scale       a scale for each block, [N / rows, K / columns]; of Int4Tensor [K / g, N]
    _weight_zero_point  I8, one for each scale, w = (q − z) · s; of Int4Tensor floats, w = q · s + z

How a layer is stored is seen from its tensors. Inputs stay as they are. Source: torchao 0.18.0,
prototype/safetensors and quantization/quantize_/workflows; Int4Tensor's zero points are FBGEMM's.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.readers.checks import AGAIN, check_float, check_tensor, check_type, is_unquantised
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides, along_blocks
from tinygrad_nv.quant.types import E4M3, INT8, UINT4, UINT8, QType, Scale

# of weights; act_mapping_type is of inputs
MAPPINGS = ("mapping_type", "weight_mapping_type")


@dataclass(frozen=True)
class TorchAOReader:
    """Reads layers; zero points of integers may be other than 0 if `asymmetric`."""
    asymmetric: bool

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        if is_unquantised(stored, layer, "_weight_qdata"): return None
        n, k = shape
        codes = f"{layer}._weight_qdata"
        kind = check_tensor(stored, codes, ("I8", "F8_E4M3"), shape, (n, k // 2))
        if stored[codes][1] != shape: return _int4(layer, shape, stored)
        return _bytes(layer, shape, stored, kind == "F8_E4M3", self.asymmetric and kind == "I8")


def _bytes(layer: str, shape: tuple[int, int], stored: Stored, floats: bool,
           asymmetric: bool) -> StoredMatrix:
    codes, scales, zeros = (f"{layer}._weight_{name}" for name in ("qdata", "scale", "zero_point"))
    scale = _scale(scales, shape, stored)
    blocks = scale.blocks(*shape)
    if asymmetric or zeros in stored: check_tensor(stored, zeros, ("I8",), stored[scales][1])
    type = QType(E4M3 if floats else UINT8 if asymmetric else INT8, scale, zeros=asymmetric)
    sign = np.uint8(128 if asymmetric else 0)       # int8 with zero points are uint8 with 128 more of both

    def arrays(get: Get) -> dict[str, np.ndarray]:
        made = {"codes": get(codes).view(np.uint8) ^ sign, "scales": get(scales).reshape(blocks)}
        if asymmetric: made["zeros"] = get(zeros).reshape(blocks).view(np.uint8) ^ sign
        elif zeros in stored and get(zeros).any():
            raise WeightError(f"{zeros} is not 0", "0, as no mapping_type is ASYMMETRIC", AGAIN)
        return made
    lie = along_blocks(scale, shape, stored[scales][1])
    return StoredMatrix(type, (codes, scales, *[zeros] * (zeros in stored)), arrays,
                        cuts={codes: (Strides(0), Strides(1)), scales: lie, zeros: lie})


def _int4(layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    codes, scales, zeros = (f"{layer}._weight_{name}" for name in ("qdata", "scale", "zero_point"))
    (n, k), wanted = shape, "[K / group_size, N]"
    dtype, found = check_float(stored, scales), stored[scales][1]
    if len(found) != 2 or found[1] != n or not found[0] or k % found[0]:
        raise WeightError(f"{scales} is {list(found)}", f"{wanted} of {list(shape)}", AGAIN)
    check_tensor(stored, zeros, (stored[scales][0],), found)
    type = check_type(layer, QType(UINT4, Scale(1, k // found[0], dtype), 8, mins=True), shape)

    def arrays(get: Get) -> dict[str, np.ndarray]:
        points = get(zeros).T       # bfloat16 are bits
        return {"codes": get(codes).view(np.uint8) ^ np.uint8(0x88),
                "scales": np.ascontiguousarray(get(scales).T),
                "mins": points ^ np.uint16(0x8000) if points.dtype == np.uint16 else -points}
    lie = Strides(1), Strides(0, k // found[0])
    return StoredMatrix(type, (codes, scales, zeros), arrays,
                        cuts={codes: (Strides(0), Strides(1, 2)), scales: lie, zeros: lie})


def _scale(name: str, shape: tuple[int, int], stored: Stored) -> Scale:
    """The scales of a matrix: of blocks that divide it."""
    dtype, found = check_float(stored, name), stored[name][1]
    counts = {0: (1, 1), 1: (*found, 1)}.get(len(found), found)
    if len(counts) != 2 or not all(count and extent % count == 0
                                   for extent, count in zip(shape, counts, strict=False)):
        raise WeightError(f"{name} is {list(found)}", f"a scale for each block of {list(shape)}", AGAIN)
    (n, k), (rows, columns) = shape, counts
    return Scale(0 if rows == 1 else n // rows, 0 if columns == 1 else k // columns, dtype)


def reader(config: Mapping[str, Any], name: str) -> TorchAOReader:
    """Returns the reader of a `quantization_config`."""
    return TorchAOReader(_asymmetric(config.get("quant_type")))


def _asymmetric(config: Any) -> bool:
    """Whether an object of torchao's own, or one inside, says so of weights."""
    if not isinstance(config, Mapping): return False
    return any('"ASYMMETRIC"' in json.dumps(value) if key in MAPPINGS else _asymmetric(value)
               for key, value in config.items())
