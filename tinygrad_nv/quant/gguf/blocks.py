"""Blocks of GGUF tensors as the buffers of quant/types.py, with NumPy.

A row is a whole number of blocks, each of so many columns and bytes: its codes, and the scales of the block
in between. Codes of b bits lie in runs of bytes: the lowest b bits of all bytes of a run, then the next b
bits of all of them. K-quants have an outer scale for 256 columns, and scales of 16 or 32 that are integers
of 4 to 8 bits.

Dequantised values equal those of ggml bit for bit, except for one: ggml reads MXFP4's scale 255 as 2^128, the
format's standard says NaN. No file has it, and it is refused.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant import types
from tinygrad_nv.quant.packing import planes
from tinygrad_nv.quant.types import Element, QType, Scale, per_group_scale

CHUNK = 1 << 20     # codes that are unpacked at a time, a byte each; temporaries take about four times that
# values of ggml's non-linear 4-bit codes
IQ4 = Element("iq4", 4, values=(-127., -104., -83., -65., -49., -35., -22., -10.,
                                1., 13., 25., 38., 53., 69., 89., 113.))
IQ4_NL = QType(IQ4, per_group_scale(32, dtypes.float16))
IQ4_XS = QType(IQ4, Scale(1, 32, dtypes.int8), outer=Scale(1, 256, dtypes.float16))

# of blocks, uint8 [M, nbytes]: codes uint8 [M, columns], and what else the type has, [M, blocks of its scale]
Split = Callable[[np.ndarray], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Format:
    """How a kind of tensor is stored: blocks of `columns` in `nbytes`. A `type` of None is that of plain
    floats, whose dtype is the name."""
    name: str
    columns: int
    nbytes: int
    type: QType | None = None
    split: Split | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row."""
        return columns // self.columns * self.nbytes


def arrays(format: Format, raw: np.ndarray, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The buffers of a matrix, uint8 [N, bytes of a row]; with `rows`, of its rows in that order."""
    assert format.type is not None, "blocks"
    assert format.split is not None
    n, k = len(raw), raw.shape[1] // format.nbytes * format.columns
    made: dict[str, np.ndarray] = {}
    step = max(1, CHUNK // max(k, 1))
    for begin in range(0, n, step):
        taken = raw[begin:begin + step] if rows is None else raw[rows[begin:begin + step]]
        found = format.split(np.ascontiguousarray(taken).reshape(-1, format.nbytes))
        codes = found.pop("codes").reshape(len(taken), k)
        whole = {"codes": codes} if format.type.bits == 8 else planes(codes, format.type.bits)
        whole |= {name: each.reshape(len(taken), -1) for name, each in found.items()}
        for name, each in whole.items():
            if name not in made: made[name] = np.empty((n, each.shape[1]), each.dtype)
            made[name][begin:begin + len(taken)] = each
    return made


def floats(format: Format, raw: np.ndarray) -> np.ndarray:
    """The numbers of plain floats, uint8 [N, bytes of a row]; bfloat16 as unsigned integers of their bits."""
    return np.ascontiguousarray(raw).view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[format.name])


def values(format: Format, raw: np.ndarray) -> np.ndarray:
    """The matrix of rows, uint8 [N, bytes of a row]: float32 [N, K], as `QTensor.dequantize` has it. For
    tables that are read once."""
    if format.type is None:
        plain = floats(format, raw)
        return (plain.astype(np.uint32) << 16).view("<f4") if format.name == "BF16" else plain.astype("<f4")
    assert format.split is not None
    found = format.split(np.ascontiguousarray(raw).reshape(-1, format.nbytes))
    book, codes = format.type.element.values, found["codes"]
    made = np.array(book, np.float32)[codes] if book else codes.astype(np.float32) - format.type.shift
    made = made.reshape(len(codes), found["scales"].shape[1], -1)
    made *= _factors(format.type, found, "scales", "outer")
    if format.type.mins: made -= _factors(format.type, found, "mins", "outer_mins")
    return made.reshape(len(raw), -1)


def _factors(type: QType, found: dict[str, np.ndarray], name: str, outer: str) -> np.ndarray:
    if type.scale.e8m0: return np.ldexp(np.float32(1), found[name].astype(np.int32) - 127)[..., None]
    made = found[name].astype(np.float32)
    return (made if type.outer is None else found[outer].astype(np.float32) * made)[..., None]


# **** parts of blocks ****

def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, [M, 1]."""
    return np.ascontiguousarray(raw[:, at:at + 2]).view("<f2")


def _fields(raw: np.ndarray, bits: int, run: int) -> np.ndarray:
    """Fields of `bits`, in runs of `run` bytes: [M, 8 B / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = raw.reshape(len(raw), -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(raw), -1)


def _six_bits(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of Q4_K and Q5_K, [M, 8] each, of 12 bytes: the first four of both in the lower bits
    of bytes 0-3 and 4-7, the others in nibbles of bytes 8-11 and in the upper bits of the former."""
    first, second, nibbles = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = np.hstack([first & 63, nibbles & 15 | first >> 2 & 48])
    mins = np.hstack([second & 63, nibbles >> 4 | second >> 2 & 48])
    return scales, mins


# **** blocks of 32 ****

def _q4_0(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": _fields(raw[:, 2:], 4, 16), "scales": _half(raw, 0)}


def _q4_1(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": _fields(raw[:, 4:], 4, 16), "scales": _half(raw, 0), "mins": -_half(raw, 2)}


def _fifth(raw: np.ndarray) -> np.ndarray:
    # four bytes of fifth bits, in order, then nibbles
    return _fields(raw[:, 4:], 4, 16) | _fields(raw[:, :4], 1, 1) << 4


def _q5_0(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": _fifth(raw[:, 2:]), "scales": _half(raw, 0)}


def _q5_1(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": _fifth(raw[:, 4:]), "scales": _half(raw, 0), "mins": -_half(raw, 2)}


def _q8_0(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": np.ascontiguousarray(raw[:, 2:]).view(np.int8), "scales": _half(raw, 0)}


def _mxfp4(raw: np.ndarray) -> dict[str, np.ndarray]:
    if (raw[:, 0] == 255).any():
        raise WeightError("a block of MXFP4 has scale 255, which is NaN", "scales 2^(e - 127), e < 255",
                          "download the file again, or quantise the model anew")
    codes = _fields(raw[:, 1:], 4, 16)
    codes[codes == 8] = 0   # ggml's negative zero is zero
    return {"codes": codes, "scales": raw[:, :1]}


# **** blocks of 256 ****

def _q2_k(raw: np.ndarray) -> dict[str, np.ndarray]:
    return {"codes": _fields(raw[:, 16:80], 2, 32), "scales": raw[:, :16] & 15, "mins": raw[:, :16] >> 4,
            "outer": _half(raw, 80), "outer_mins": _half(raw, 82)}


def _q3_k(raw: np.ndarray) -> dict[str, np.ndarray]:
    codes = _fields(raw[:, 32:96], 2, 32) | _fields(raw[:, :32], 1, 32) << 2
    # 16 scales of 6 bits: nibbles of 8 bytes, then their upper bits in 4
    scales = _fields(raw[:, 96:104], 4, 8) | _fields(raw[:, 104:108], 2, 4) << 4
    return {"codes": codes, "scales": scales.astype(np.int8) - np.int8(32), "outer": _half(raw, 108)}


def _q4_k(raw: np.ndarray) -> dict[str, np.ndarray]:
    scales, mins = _six_bits(raw[:, 4:16])
    return {"codes": _fields(raw[:, 16:], 4, 32), "scales": scales, "mins": mins,
            "outer": _half(raw, 0), "outer_mins": _half(raw, 2)}


def _q5_k(raw: np.ndarray) -> dict[str, np.ndarray]:
    scales, mins = _six_bits(raw[:, 4:16])
    codes = _fields(raw[:, 48:], 4, 32) | _fields(raw[:, 16:48], 1, 32) << 4
    return {"codes": codes, "scales": scales, "mins": mins, "outer": _half(raw, 0),
            "outer_mins": _half(raw, 2)}


def _q6_k(raw: np.ndarray) -> dict[str, np.ndarray]:
    codes = _fields(raw[:, :128], 4, 64) | _fields(raw[:, 128:192], 2, 32) << 4
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8)
    return {"codes": codes, "scales": scales, "outer": _half(raw, 208)}


def _iq4_xs(raw: np.ndarray) -> dict[str, np.ndarray]:
    # 8 scales of 6 bits: upper bits in 2 bytes, nibbles in 4, in order
    scales = _fields(raw[:, 4:8], 4, 1) | _fields(raw[:, 2:4], 2, 1) << 4
    return {"codes": _fields(raw[:, 8:], 4, 16), "scales": scales.astype(np.int8) - np.int8(32),
            "outer": _half(raw, 0)}


# by ggml's numbers of types
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4), 1: Format("F16", 1, 2), 30: Format("BF16", 1, 2),
    2: Format("Q4_0", 32, 18, types.Q4_0, _q4_0), 3: Format("Q4_1", 32, 20, types.Q4_1, _q4_1),
    6: Format("Q5_0", 32, 22, types.Q5_0, _q5_0), 7: Format("Q5_1", 32, 24, types.Q5_1, _q5_1),
    8: Format("Q8_0", 32, 34, types.Q8_0, _q8_0),
    10: Format("Q2_K", 256, 84, types.Q2_K, _q2_k), 11: Format("Q3_K", 256, 110, types.Q3_K, _q3_k),
    12: Format("Q4_K", 256, 144, types.Q4_K, _q4_k), 13: Format("Q5_K", 256, 176, types.Q5_K, _q5_k),
    14: Format("Q6_K", 256, 210, types.Q6_K, _q6_k), 20: Format("IQ4_NL", 32, 18, IQ4_NL, _q4_0),
    23: Format("IQ4_XS", 256, 136, IQ4_XS, _iq4_xs), 39: Format("MXFP4", 32, 17, types.MXFP4, _mxfp4),
}
# of those that are not read, for messages
NAMES = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
         22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
         35: "TQ2_0", 40: "NVFP4", 41: "Q1_0"}
