"""A matrix as the tensors of a format.

    compressed-tensors  weight_packed I32 [N, K / p] (values + 2^(b−1), the first lowest), weight_shape,
                        weight_scale [N, K / g], weight_zero_point I32 [N / p, K / g]; or weight,
                        weight_scale; of MXFP4 weight_packed U8 [N, K / 2], weight_scale U8 (E8M0)
    awq                 qweight I32 [K, N / 8], qzeros, scales (quant/readers/awq.py)
    gptq                version 2: qweight I32 [K / p, N], qzeros, scales, g_idx (quant/readers/gptq.py)
    fp8                 weight, weight_scale_inv: float32 of 128 x 128
    sparse-24-bitmask   compressed [N, K / 2], bitmask, shape instead of weight (models/bitmask.py)

p = 32 / b fields in a word. Sources: compressed-tensors 0.20, AutoAWQ 0.2.9, GPTQModel 7.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tinygrad_nv.quant.floats import as_float32, narrow_bfloat16
from tinygrad_nv.quant.readers.awq import ORDER
from tinygrad_nv.quant.sparse import two_of_four
from tinygrad_nv.quantize.rounding import Rounded, e8m0
from tinygrad_nv.quantize.schemes import Scheme

# a tensor as safetensors has it: its dtype's name, and its elements, of bfloat16 and e4m3 as their bits
Stored = dict[str, tuple[str, np.ndarray]]
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
MOST_TENSORS = 6    # of one quantised matrix, with its inputs' scale


def keeping(scheme: Scheme, dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the rounding of scales in a file of a model of `dtype`, as float32."""
    return _rounding(scale_dtype(scheme, dtype))


def rounding_to(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the rounding of numbers to a tensor of `dtype`, as float32."""
    return _rounding(FLOATS[dtype])


def _rounding(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: as_float32(store_as(kind, values)[1])


def scale_dtype(scheme: Scheme, dtype: str) -> str:
    """safetensors' name of a scale's dtype: the model's; float16 of AWQ and GPTQ, float32 of FP8."""
    return {"awq": "F16", "gptq": "F16", "fp8": "F32"}.get(scheme.format, FLOATS[dtype])


def compress(scheme: Scheme, made: Rounded, dtype: str) -> Stored:
    """The tensors, by the last part of their names."""
    found = _dense(scheme, made, dtype)
    if not scheme.bitmask: return found
    kind, weight = found.pop("weight")
    size = (weight & 0x7F).astype(np.float32) if kind == "F8_E4M3" else np.abs(as_float32(weight))
    kept = two_of_four(size)
    return {"compressed": (kind, weight[kept].reshape(len(weight), -1)),
            "bitmask": ("U8", np.packbits(kept, axis=1, bitorder="little")),
            "shape": ("I64", np.array([[extent] for extent in weight.shape], np.int64)), **found}


def _dense(scheme: Scheme, made: Rounded, dtype: str) -> Stored:
    """The same, of sparse matrices with their zeros."""
    if scheme.format == "dense": return {"weight": store_as(FLOATS[dtype], made.codes)}
    scales = store_as(scale_dtype(scheme, dtype), made.scales)
    if scheme.format in ("int-quantized", "float-quantized"):
        kind = "I8" if scheme.type == "int" else "F8_E4M3"
        return {"weight": (kind, made.codes), "weight_scale": scales}
    if scheme.format == "fp8": return {"weight": ("F8_E4M3", made.codes), "weight_scale_inv": scales}
    if scheme.format == "mxfp4-pack-quantized":
        return {"weight_packed": ("U8", made.codes[:, ::2] | made.codes[:, 1::2] << 4),
                "weight_scale": ("U8", e8m0(made.scales))}
    most = 1 << scheme.bits - 1
    codes = (made.codes.astype(np.int16) + most).astype(np.uint8)
    zeros = np.full(made.scales.shape, most, np.uint8) if made.zeros is None else \
        (made.zeros + most).astype(np.uint8)
    if scheme.format == "pack-quantized":
        shape = np.array(made.codes.shape, np.int64)
        found: Stored = {"weight_packed": ("I32", words(codes, scheme.bits)), "weight_scale": scales,
                         "weight_shape": ("I64", shape)}
        if made.zeros is not None: found["weight_zero_point"] = "I32", words(zeros.T, scheme.bits).T
        return found
    kind, turned = scales[0], np.ascontiguousarray(scales[1].T)
    if scheme.format == "awq":
        return {"qweight": ("I32", words(codes.T, 4, ORDER)), "qzeros": ("I32", words(zeros.T, 4, ORDER)),
                "scales": (kind, turned)}
    groups = made.groups
    if groups is None:
        groups = np.arange(made.codes.shape[1]) // (made.codes.shape[1] // made.scales.shape[1])
    return {"qweight": ("I32", words(codes, scheme.bits).T), "qzeros": ("I32", words(zeros.T, scheme.bits)),
            "scales": (kind, turned), "g_idx": ("I32", groups.astype(np.int32))}


def words(fields: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """int32 [R, C / p] of uint8 [R, C], the first field lowest, or of each p those in `order`; zeros fill the
    last word."""
    each = 32 // bits
    if rest := -fields.shape[1] % each: fields = np.pad(fields, ((0, 0), (0, rest)))
    parts = fields.reshape(len(fields), -1, each)
    made = np.zeros(parts.shape[:2], np.uint32)
    for i, field in enumerate(order or range(each)): made |= parts[..., field].astype(np.uint32) << (bits * i)
    return made.view(np.int32)


def store_as(kind: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """float32 as a tensor of F32, F16 or BF16."""
    if kind == "BF16": return kind, narrow_bfloat16(values)
    return kind, values.astype(np.float16 if kind == "F16" else np.float32)
