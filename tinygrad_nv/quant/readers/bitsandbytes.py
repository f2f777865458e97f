"""bitsandbytes: codebooks of 4 bits, and int8 with a scale for each row.

    weight                                  U8 [N · K / 2, 1]: two codes, the first in the upper bits
    weight.absmax                           F32: a scale for each `blocksize` elements, which go on into the
                                            next row; with double quantisation U8, codes of
    weight.nested_quant_map, .nested_absmax     256 numbers, and a scale for each `nested_blocksize` of them;
                                            `nested_offset` is added then
    weight.quant_map                        the 16 numbers of nf4 or fp4
    weight.quant_state.bitsandbytes__nf4    JSON: blocksize, shape, dtype, nested_blocksize, nested_offset

    weight, SCB                             I8 [N, K], F32 [N]: w = (q · SCB) · (1 / 127)

Codes may be stored as floats of the same bytes (bnb_4bit_quant_storage). Source: bitsandbytes 0.50.2,
functional.py and nn/modules.py.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from tinygrad_nv.errors import WeightError, brief
from tinygrad_nv.files import MAX_JSON_BYTES, parse_json
from tinygrad_nv.quant.readers.checks import AGAIN, check_tensor, check_type, is_unquantised, setting
from tinygrad_nv.quant.readers.reader import Get, Stored, StoredMatrix, Strides
from tinygrad_nv.quant.types import (
    FP4,
    INT8,
    NF4,
    QType,
    per_channel_scale,
    per_group_scale,
    per_tensor_scale,
)

BOOKS = {"nf4": NF4, "fp4": FP4}
SIZES = (64, 128, 32, 256, 512, 1024, 2048, 4096)
PER_127 = np.float32(7.874015718698502e-3)
STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}


@dataclass(frozen=True)
class BitsAndBytesReader:
    """Reads layers of 4 bits or of 8."""
    bits: int

    def matrix(self, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix | None:
        """See `Reader`."""
        if is_unquantised(stored, layer, "SCB" if self.bits == 8 else "weight.absmax"): return None
        return (_int8 if self.bits == 8 else _codebook)(f"{layer}.weight", layer, shape, stored)


def _int8(weight: str, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    scales, format, (n, _) = f"{layer}.SCB", f"{layer}.weight_format", shape
    check_tensor(stored, weight, ("I8",), shape)
    check_tensor(stored, scales, ("F32",), (n,), (1, n), (n, 1))

    def arrays(get: Get) -> dict[str, np.ndarray]:
        if format in stored and get(format).any():
            raise WeightError(f"{format} is {get(format).tolist()}", "0, rows one after the other",
                              "save the model again with bitsandbytes 0.45 or later")
        return {"codes": get(weight), "scales": get(scales).reshape(n, 1),
                "outer": np.full((1, 1), PER_127, np.float32)}
    type = QType(INT8, per_channel_scale(), outer=per_tensor_scale(), outer_last=True)
    cuts = {weight: (Strides(0), Strides(1)), scales: (Strides(stored[scales][1].index(n)), None)}
    return StoredMatrix(type, (weight, scales, *[format] * (format in stored)), arrays, cuts=cuts)


def _codebook(weight: str, layer: str, shape: tuple[int, int], stored: Stored) -> StoredMatrix:
    (n, k), absmax, book_name = shape, f"{weight}.absmax", f"{weight}.quant_map"
    kind = next((kind for kind in BOOKS if _state(weight, kind) in stored), "nf4")
    element, state = BOOKS[kind], _state(weight, kind)
    nested = [f"{weight}.nested_{name}" for name in ("quant_map", "absmax")]
    check_tensor(stored, state, ("U8",))
    found = check_tensor(stored, weight, tuple(STORAGE))
    bytes_found = prod(stored[weight][1]) * STORAGE[found]
    if bytes_found * 2 != n * k:
        raise WeightError(f"{weight} is {found} {list(stored[weight][1])}",
                          f"{n * k // 2} bytes, codes of {[n, k]}", AGAIN)
    check_tensor(stored, book_name, ("F32",), (16,))
    double = check_tensor(stored, absmax, ("F32", "U8")) == "U8"
    count = prod(stored[absmax][1])
    size = next((size for size in SIZES if -(-n * k // size) == count), 0)
    if not size:
        raise WeightError(f"{absmax} has {count} scales of {n * k} elements",
                          f"one for each {', '.join(map(str, sorted(SIZES)))} of them", AGAIN)
    if double:
        check_tensor(stored, nested[0], ("F32",), (256,))
        check_tensor(stored, nested[1], ("F32",))
    # a block that goes on into the next row is some smaller ones with the same scale
    group = gcd(size, k)
    type = check_type(layer, element @ per_group_scale(group), shape)

    def arrays(get: Get) -> dict[str, np.ndarray]:
        settings = _settings(get(state), state)
        for key, wanted in (("blocksize", size), ("shape", [n, k]), ("quant_type", kind)):
            if settings.get(key) != wanted:
                raise WeightError(f"{state} says that {key} is {settings.get(key)}", str(wanted), AGAIN)
        if (get(book_name) != np.array(element.values, np.float32)).any():
            raise WeightError(f"{book_name} has other numbers than {kind}", str(element.values), AGAIN)
        codes = np.ascontiguousarray(get(weight)).reshape(-1).view(np.uint8).reshape(n, k // 2)
        scales = _dequantize_scales(get(absmax).reshape(-1), get(nested[0]), get(nested[1]), settings,
                                    nested[1]) \
            if double else get(absmax).reshape(-1)
        return {"codes": codes << np.uint8(4) | codes >> np.uint8(4),
                "scales": scales[np.arange(n * k // group) * group // size].reshape(n, k // group)}
    return StoredMatrix(type, (weight, absmax, book_name, state, *nested * double), arrays)


def _state(weight: str, kind: str) -> str: return f"{weight}.quant_state.bitsandbytes__{kind}"


def _settings(data: np.ndarray, name: str) -> dict[str, Any]:
    try: found = parse_json(data.reshape(-1)[:MAX_JSON_BYTES].tobytes().decode())
    except ValueError as error:
        raise WeightError(f"{name} is no JSON: {error}", "what bitsandbytes writes", AGAIN) from error
    if not isinstance(found, dict): raise WeightError(f"{name} is {found!r:.200}", "an object", AGAIN)
    return found


def _dequantize_scales(codes: np.ndarray, book: np.ndarray, absmax: np.ndarray, settings: Mapping[str, Any],
                       name: str) -> np.ndarray:
    """Scales, float32, of their codes."""
    size, offset = settings.get("nested_blocksize"), settings.get("nested_offset")
    if not isinstance(size, int) or size < 1 or absmax.size != -(-codes.size // size):
        raise WeightError(f"{name} has {absmax.size} scales of {codes.size} numbers, blocks of {size}",
                          "one for each block", AGAIN)
    if not isinstance(offset, int | float):
        raise WeightError(f"nested_offset of {name} is {brief(offset)}", "a number", AGAIN)
    made = book[codes] * absmax.reshape(-1)[np.arange(codes.size) // size]
    return (made + np.float32(offset)).astype(np.float32)


def reader(config: Mapping[str, Any], name: str) -> BitsAndBytesReader:
    """Returns the reader of a `quantization_config`. Raises `ModelError`."""
    eight = bool(config.get("load_in_8bit") or config.get("_load_in_8bit"))
    if eight: return BitsAndBytesReader(8)
    setting({"load_in_4bit": bool(config.get("load_in_4bit") or config.get("_load_in_4bit"))}, "load_in_4bit",
            None, (True,), name)
    return BitsAndBytesReader(4)
