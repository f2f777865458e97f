"""Matrices of fp8: quant_method fp8 (DeepSeek, Qwen, transformers, AutoFP8), fbgemm_fp8 and modelopt.

    fp8           weight F8_E4M3; weight_scale_inv, which is multiplied in spite of its name: floats, or
                  F8_E8M0 with scale_fmt ue8m0, one for each block of weight_block_size or one of all. AutoFP8
                  calls it weight_scale. Of static activations activation_scale or input_scale
    fbgemm_fp8    weight F8_E4M3, weight_scale F32 [N, 1]; inputs have a scale for each token
    modelopt      FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO: weight F8_E4M3, weight_scale F32 of the matrix,
                  of rows, of blocks. MXFP8: weight_scale U8 of E8M0 for each 32. NVFP4: weight U8 of two E2M1
                  codes, the first in the lower bits, weight_scale F8_E4M3 for each 16, weight_scale_2 of all

Source: transformers 5.23.0, integrations/finegrained_fp8.py and fbgemm_fp8.py; ModelOpt 0.47.0,
torch/export/quant_utils.py and convert_hf_config.py.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ModelError, brief, shorten
from tinygrad_nv.quant.readers.checks import AGAIN, FLOATS, check_tensor, check_type, is_unquantised, setting
from tinygrad_nv.quant.readers.reader import (
    Activations,
    Get,
    Stored,
    StoredMatrix,
    Strides,
    along_blocks,
)
from tinygrad_nv.quant.types import E4M3, MXFP4, NVFP4, QType, Scale

TENSOR, ROWS = Scale(0, 0), Scale(1, 0)
SCALES: dict[str, DType] = {**FLOATS, "F8_E8M0": dtypes.uint8, "U8": dtypes.uint8, "F8_E4M3": dtypes.fp8e4m3}
# with weight_scale, those there are
INPUTS = ("activation_scale", "input_scale", "input_scale_ub")


@dataclass(frozen=True)
class Kind:
    """How layers are stored: the type, with the extents of its scales, names of their tensor (the first there
    is counts), whether blocks may be others than the type's, and inputs."""
    type: QType
    activations: Activations | None = None
    names: tuple[str, ...] = ("weight_scale",)
    any_blocks: bool = False


@dataclass(frozen=True)
class FP8Reader:
    """Reads layers of a kind, those in `layers` of other kinds; None of layers without one."""
    kind: Kind | None
    layers: Mapping[str, Kind] = field(default_factory=dict)

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        kind = self.layers.get(layer, self.kind)
        names = [f"{layer}.{name}" for name in (kind.names if kind else ())]
        if kind is None or is_unquantised(stored, layer, kind.names[0]): return None
        return _matrix(kind, layer, next((name for name in names if name in stored), names[0]), shape, stored)


def _matrix(kind: Kind, layer: str, scales: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    (n, k), codes, outer = shape, f"{layer}.weight", f"{layer}.weight_scale_2"
    type = kind.type
    check_type(layer, type, shape)
    check_tensor(stored, codes, ("U8",) if type.bits == 4 else ("F8_E4M3",), (n, k * type.bits // 8))
    if kind.any_blocks and scales in stored:
        type = replace(type, scale=_blocks(type.scale, shape, stored[scales][1]))
    rows, columns = blocks = type.scale.blocks(n, k)
    flat = [(rows,)] * (columns == 1) + [()] * (blocks == (1, 1))
    kinds = ("F8_E4M3",) if type.outer else ("U8", "F8_E8M0") if type.scale.e8m0 else \
        (*FLOATS, "F8_E8M0", "U8") if kind.any_blocks else tuple(FLOATS)
    found = check_tensor(stored, scales, kinds, blocks, (rows, 1, columns, 1), *flat)
    type = replace(type, scale=replace(type.scale, dtype=SCALES[found], e8m0=found in ("F8_E8M0", "U8")))
    if type.outer: check_tensor(stored, outer, ("F32",), (), (1,))

    def arrays(get: Get) -> dict[str, np.ndarray]:
        made = {"codes": get(codes), "scales": get(scales).reshape(blocks)}
        return made | ({"outer": get(outer).reshape(1, 1)} if type.outer else {})
    others = [f"{layer}.{name}" for name in INPUTS if f"{layer}.{name}" in stored]
    lie = along_blocks(type.scale, shape, stored[scales][1])
    cuts = {codes: (Strides(0), Strides(1, 8 // type.bits)), scales: lie}
    return StoredMatrix(type, (codes, scales, *[outer] * bool(type.outer), *others), arrays, kind.activations,
                        cuts)


def _blocks(scale: Scale, shape: tuple[int, int], found: tuple[int, ...]) -> Scale:
    """The blocks of scales that are stored: the config's, or others that divide the matrix evenly."""
    if found in ((), (1,)): return replace(scale, rows=0, columns=0)
    if len(found) != 2 or found == scale.blocks(*shape) or min(found) < 1: return scale
    if any(extent % count for extent, count in zip(shape, found, strict=True)): return scale
    return replace(scale, rows=shape[0] // found[0], columns=shape[1] // found[1])


# **** configs ****

def reader(config: Mapping[str, Any], name: str) -> FP8Reader:
    """Returns the reader of a `quantization_config`. Raises `ModelError`."""
    method = config.get("quant_method")
    if method == "modelopt": return _modelopt(config, name)
    if method == "fbgemm_fp8": return FP8Reader(Kind(E4M3 @ ROWS, Activations("e4m3", ROWS)))
    scheme = str(config.get("activation_scheme") or "dynamic").lower()
    setting({"activation_scheme": scheme}, "activation_scheme", None, ("dynamic", "static"), name)
    size = config.get("weight_block_size", (128, 128))
    if size is not None and not (isinstance(size, Sequence) and len(size) == 2 and
                                 all(isinstance(extent, int) and extent > 0 for extent in size)):
        raise ModelError(f"{name}: weight_block_size of quantization_config is {brief(size)}",
                         "rows and columns of a block, or null", AGAIN)
    inputs = TENSOR if scheme == "static" else ROWS if size is None else Scale(1, size[1])
    kind = Kind(E4M3 @ (TENSOR if size is None else Scale(*size)),
                Activations("e4m3", inputs, static=scheme == "static"), ("weight_scale_inv", "weight_scale"),
                any_blocks=True)
    return FP8Reader(kind)


STATIC = Activations("e4m3", TENSOR, static=True)
MODELOPT = {"FP8": Kind(E4M3 @ TENSOR, STATIC),
            "FP8_PER_CHANNEL_PER_TOKEN": Kind(E4M3 @ ROWS, Activations("e4m3", ROWS)),
            "FP8_PB_WO": Kind(E4M3 @ Scale(128, 128)), "MXFP8": Kind(E4M3 @ MXFP4.scale),
            "NVFP4": Kind(NVFP4), "W4A16_NVFP4": Kind(NVFP4)}


def _modelopt(config: Mapping[str, Any], name: str) -> FP8Reader:
    inside = config.get("quantization")     # so it is in hf_quant_config.json
    if isinstance(inside, Mapping): config = {**config, **inside}
    # where keys and values alone are quantised there is none
    none = (None,) if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme") else ()
    algorithm = setting(config, "quant_algo", None, (*MODELOPT, "MIXED_PRECISION", *none), name)
    layers = dict[str, Kind]()
    mixed = (config.get("quantized_layers") if algorithm == "MIXED_PRECISION" else None) or {}
    if not isinstance(mixed, Mapping) or not all(isinstance(each, Mapping) for each in mixed.values()):
        raise ModelError(f"{name}: quantized_layers of quantization_config is {brief(mixed)}",
                         "an object with a quant_algo for each layer", AGAIN)
    for layer, its in mixed.items():
        where = f"{name}: {shorten(layer)}"
        layers[layer] = MODELOPT[setting(its, "quant_algo", None, tuple(MODELOPT), where)]
    return FP8Reader(MODELOPT.get(algorithm), layers)
