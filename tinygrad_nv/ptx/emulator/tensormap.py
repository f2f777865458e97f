"""Tensor maps, the descriptors through which TMA reads and writes global memory.

Protocol: `TensorMap.tiled(buffer, box=(64, 64), swizzle="128B")` describes an array and the box one copy
moves. Shapes, strides and boxes are in the array's own order, outermost dimension first, as numpy writes
them; the coordinates of PTX instructions go the other way, innermost first. `encode()` gives the 128 bytes a
kernel takes as `.param .align 64 .b8 map[128]`, `decode` reads them back. What cuTensorMapEncodeTiled refuses
is a `TensorMapError` that names the limit.

The bytes, innermost dimension i = 0 (as ptxas writes them for `tensormap.replace`; words are little-endian):
  0x00        64 bits: global address
  0x08        bits 4-6 rank - 1, 7-10 element type, 11-12 interleave, 13-14 swizzle, 15 fill mode
  0x0c + 4i   stride_(i+1) >> 4, low 32 bits; the high 4 bits at 0x1c, bits 4i .. 4i+3
  0x20 + 4i   dim_i - 1
  0x34        bits 3i .. 3i+2 element stride_i - 1; bits 24-31 box_0 - 1
  0x38        bits 8(i-1) .. : box_i - 1 for i = 1 .. 4
Of an im2col map the place of its fields on hardware is not known; here they lie at
  0x40        1: im2col; 0x42 channels, 0x44 pixels of a column (16 bits each)
  0x48, 0x50  lower and upper corner of the bounding box: 16 signed bits for each spatial dimension, innermost
              first
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import TensorMapError

# codes of the map (cuTensorMapEncodeTiled numbers them otherwise), and bytes of an element
DTYPES = {"u8": (0, 1), "u16": (1, 2), "u32": (2, 4), "s32": (3, 4), "u64": (4, 8), "s64": (5, 8),
          "f16": (6, 2), "f32": (7, 4), "f32ftz": (8, 4), "f64": (9, 8), "bf16": (10, 2), "tf32": (11, 4),
          "tf32ftz": (12, 4)}
# TMA knows no signed bytes and halves, and no fp8: it only moves them
ALIASES = {"bool": "u8", "int8": "u8", "uint8": "u8", "s8": "u8", "b8": "u8", "e4m3": "u8", "e5m2": "u8",
           "float8_e4m3fn": "u8", "float8_e5m2": "u8", "int16": "u16", "uint16": "u16", "s16": "u16",
           "b16": "u16", "int32": "s32", "uint32": "u32", "b32": "u32", "int64": "s64", "uint64": "u64",
           "b64": "u64", "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16"}
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
INTERLEAVES = ("none", "16B", "32B")
FILLS = ("zero", "nan")
L2_PROMOTIONS = ("none", "64B", "128B", "256B")
MAP_BYTES = 128


def dtype_name(dtype: Any) -> str:
    """The map's name of an element type: one of `DTYPES`, given so, or as numpy's or ml_dtypes' dtype or
    name."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    name = ALIASES.get(name, name)
    if name not in DTYPES: raise TensorMapError(f"element type {name!r}", f"one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class TensorMap:
    """A tensor map. `dims`, `box`, `strides` (bytes, of every dimension), `element_strides`: outermost first.
    For im2col, `channels`, `pixels` and the corners are set and `box` is (pixels, channels)."""
    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: str = "none"
    fill: str = "zero"
    l2: str = "none"
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @staticmethod
    def of_tiles(buffer: Any, box: Sequence[int], swizzle: str = "none", dims: Sequence[int] | None = None,
              strides: Sequence[int] | None = None, dtype: Any = None,
              element_strides: Sequence[int] | None = None, interleave: str = "none", l2: str = "none",
              fill: str = "zero") -> TensorMap:
        """A map of tiles: `buffer` a buffer of the emulator or driver (with `.ptr`, and for what is not given
        `.shape` and `.dtype`), or an address. `strides` in bytes, of all dimensions or of all but the
        innermost; contiguous when None. `dtype` when it is not the buffer's own (numpy has no bf16). Raises
        `TensorMapError`."""
        address, dtype, dims, strides = describe(buffer, dims, strides, dtype)
        made = TensorMap(address, dtype, dims, strides, tuple(map(int, box)),
                         tuple(map(int, element_strides or (1,) * len(dims))), swizzle, interleave, fill, l2)
        check_map(made)
        check_box(made)
        return made

    @staticmethod
    def im2col(buffer: Any, lower: Sequence[int], upper: Sequence[int], channels: int, pixels: int,
               swizzle: str = "none", dims: Sequence[int] | None = None, strides: Sequence[int] | None = None,
               dtype: Any = None, element_strides: Sequence[int] | None = None, interleave: str = "none",
               l2: str = "none", fill: str = "zero") -> TensorMap:
        """A map of columns, for convolutions over arrays N[D[H]]WC: `lower` and `upper` are the corners of
        the bounding box in the spatial dimensions (offsets from the first and from the last element,
        outermost first); a copy moves `pixels` positions of `channels` channels. Otherwise as `of_tiles`.
        Raises `TensorMapError`."""
        address, dtype, dims, strides = describe(buffer, dims, strides, dtype)
        made = TensorMap(address, dtype, dims, strides, (int(pixels), int(channels)),
                         tuple(map(int, element_strides or (1,) * len(dims))), swizzle, interleave, fill, l2,
                         tuple(map(int, lower)), tuple(map(int, upper)))
        check_map(made)
        check_columns(made)
        return made

    @property
    def rank(self) -> int: return len(self.dims)

    @property
    def itemsize(self) -> int: return DTYPES[self.dtype][1]

    @property
    def box_bytes(self) -> int:
        """Bytes of shared memory one copy fills, and reports to its mbarrier."""
        count = self.itemsize
        steps = self.element_strides if not self.lower else (1,) * len(self.box)
        for extent, step in zip(self.box, steps, strict=True): count *= -(-extent // step)
        return count

    def encode(self) -> bytes:
        """The 128 bytes."""
        dims, strides, steps = self.dims[::-1], self.strides[-2::-1], self.element_strides[::-1]
        box = self.box[::-1] if not self.lower else ()
        word = (self.rank - 1) << 4 | DTYPES[self.dtype][0] << 7 | INTERLEAVES.index(self.interleave) << 11
        word |= list(SWIZZLES).index(self.swizzle) << 13 | FILLS.index(self.fill) << 15
        out = bytearray(MAP_BYTES)
        struct.pack_into("<QI", out, 0, self.address, word)
        high = 0
        for i, stride in enumerate(strides):
            struct.pack_into("<I", out, 0x0c + 4 * i, stride >> 4 & 0xffffffff)
            high |= (stride >> 36 & 15) << 4 * i
        struct.pack_into("<I", out, 0x1c, high)
        for i, dim in enumerate(dims): struct.pack_into("<I", out, 0x20 + 4 * i, dim - 1)
        packed = sum((step - 1) << 3 * i for i, step in enumerate(steps))
        packed |= (box[0] - 1) << 24 if box else 0
        struct.pack_into("<II", out, 0x34, packed, sum((x - 1) << 8 * i for i, x in enumerate(box[1:])))
        if self.lower:
            struct.pack_into("<HHH", out, 0x40, 1, self.box[1], self.box[0])
            struct.pack_into(f"<{len(self.lower)}h", out, 0x48, *self.lower[::-1])
            struct.pack_into(f"<{len(self.upper)}h", out, 0x50, *self.upper[::-1])
        return bytes(out)

    @staticmethod
    def decode(data: bytes) -> TensorMap:
        """A map from its bytes, such as a kernel made with `tensormap.replace`. L2 promotion is not kept in
        them. Raises `TensorMapError` when a field has no meaning."""
        if len(data) != MAP_BYTES:
            raise TensorMapError(f"a tensor map of {len(data)} bytes", f"{MAP_BYTES} bytes")
        address, word = struct.unpack_from("<QI", data)
        rank, code, interleave = (word >> 4 & 7) + 1, word >> 7 & 15, word >> 11 & 3
        if rank > 5: raise TensorMapError(f"rank {rank} in a tensor map", "1 to 5")
        names = {number: name for name, (number, _) in DTYPES.items()}
        if code not in names: raise TensorMapError(f"element type {code} in a tensor map", "0 to 12")
        if interleave > 2: raise TensorMapError(f"interleave {interleave} in a tensor map", "0 to 2")
        dims = [x + 1 for x in struct.unpack_from(f"<{rank}I", data, 0x20)]
        low, (high,) = struct.unpack_from("<4I", data, 0x0c), struct.unpack_from("<I", data, 0x1c)
        strides = [DTYPES[names[code]][1],
                   *((low[i] | (high >> 4 * i & 15) << 32) << 4 for i in range(rank - 1))]
        packed, boxes = struct.unpack_from("<II", data, 0x34)
        steps = [(packed >> 3 * i & 7) + 1 for i in range(rank)]
        box = [(packed >> 24) + 1, *((boxes >> 8 * i & 255) + 1 for i in range(rank - 1))]
        lower: tuple[int, ...] = ()
        upper: tuple[int, ...] = ()
        columns, channels, pixels = struct.unpack_from("<HHH", data, 0x40)
        if columns == 1 and rank >= 3:
            box = [channels, pixels]
            lower = struct.unpack_from(f"<{rank - 2}h", data, 0x48)
            upper = struct.unpack_from(f"<{rank - 2}h", data, 0x50)
        return TensorMap(address, names[code], tuple(dims[::-1]), tuple(strides[::-1]), tuple(box[::-1]),
                         tuple(steps[::-1]), list(SWIZZLES)[word >> 13 & 3], INTERLEAVES[interleave],
                         FILLS[word >> 15 & 1], "none", lower[::-1], upper[::-1])


# **** what is given, made whole ****

def describe(buffer: Any, dims: Sequence[int] | None, strides: Sequence[int] | None,
              dtype: Any) -> tuple[int, str, tuple[int, ...], tuple[int, ...]]:
    """Address, element type, dimensions and strides of all of them."""
    address = getattr(buffer, "ptr", buffer)
    if not isinstance(address, int | np.integer):
        raise TensorMapError(f"a tensor map of a {type(buffer).__name__}", "a buffer, or an address",
                             "copy arrays with emu.alloc")
    own = getattr(buffer, "dtype", None)
    if dtype is None and own is None: raise TensorMapError("a tensor map without element type", "dtype=…")
    name = dtype_name(own if dtype is None else dtype)
    itemsize = DTYPES[name][1]
    if dims is None:
        if getattr(buffer, "shape", None) is None:
            raise TensorMapError("a tensor map of an address", "dims=…")
        if own is not None and np.dtype(own).itemsize != itemsize:
            raise TensorMapError(f"elements of {np.dtype(own).itemsize} bytes taken as {name}",
                                 f"an array of {itemsize}-byte elements, or dims=…")
        dims = buffer.shape
    dims = tuple(map(int, dims))
    if not 1 <= len(dims) <= 5:
        raise TensorMapError(f"a tensor map of rank {len(dims)}", "1 to 5", "reshape, or give dims=…")
    if strides is None:
        made = [itemsize]
        for extent in dims[:0:-1]: made.insert(0, made[0] * extent)
        return int(address), name, dims, tuple(made)
    strides = tuple(map(int, strides))
    if len(strides) == len(dims) - 1: strides = (*strides, itemsize)
    if len(strides) != len(dims):
        raise TensorMapError(f"{len(strides)} strides for rank {len(dims)}", f"{len(dims)}, or one less")
    if strides[-1] != itemsize:
        raise TensorMapError(f"an innermost stride of {strides[-1]} bytes",
                             f"{itemsize}: elements side by side",
                             "permute the dimensions, or copy the array")
    return int(address), name, dims, strides


# **** limits ****

def check_map(t: TensorMap) -> None:
    """Checks what holds for tiles and columns alike."""
    for what, value, allowed in (("swizzle", t.swizzle, tuple(SWIZZLES)),
                                 ("interleave", t.interleave, INTERLEAVES),
                                 ("fill", t.fill, FILLS), ("l2", t.l2, L2_PROMOTIONS)):
        if value not in allowed: raise TensorMapError(f"{what}={value!r}", f"one of {', '.join(allowed)}")
    align = 32 if t.interleave == "32B" else 16
    if t.address % align or not 0 <= t.address < 1 << 64:
        raise TensorMapError(f"a tensor at address {t.address:#x}",
                             f"an address that is a multiple of {align}")
    for dim in t.dims:
        if not 1 <= dim <= 1 << 32: raise TensorMapError(f"a dimension of {dim} in {t.dims}", "1 to 2^32")
    for stride in t.strides[:-1]:
        if stride % align or not 0 <= stride < 1 << 40:
            raise TensorMapError(f"a stride of {stride} bytes in {t.strides}",
                                 f"a multiple of {align} below 2^40",
                                 f"pad rows to {align} bytes")
    if len(t.element_strides) != t.rank:
        raise TensorMapError(f"{len(t.element_strides)} element strides for rank {t.rank}", f"{t.rank}")
    for step in t.element_strides:
        if not 1 <= step <= 8: raise TensorMapError(f"an element stride of {step}", "1 to 8")
    if t.interleave != "none" and t.rank < 3:
        raise TensorMapError(f"interleave={t.interleave!r} for rank {t.rank}", "rank 3 to 5")
    if t.interleave == "32B" and t.swizzle != "32B":
        raise TensorMapError(f"swizzle={t.swizzle!r} with interleave='32B'", "swizzle='32B'")
    if t.fill == "nan" and not t.dtype.startswith(("f", "bf", "tf")):
        raise TensorMapError(f"NaN for elements out of bounds of type {t.dtype}",
                             "a floating-point type, or fill='zero'")


def check_box(t: TensorMap) -> None:
    """The box of a tiled map."""
    if len(t.box) != t.rank:
        raise TensorMapError(f"box={t.box} of rank {len(t.box)}", f"rank {t.rank}, as dims={t.dims}")
    for extent in t.box:
        if not 1 <= extent <= 256: raise TensorMapError(f"box={t.box}: an extent of {extent}", "1 to 256")
    check_row(t, t.box[-1], "box")


def check_row(t: TensorMap, elements: int, what: str) -> None:
    """The innermost row of a copy."""
    row = elements * t.itemsize
    if t.interleave == "none" and row % 16:
        raise TensorMapError(f"an innermost {what} of {elements} × {t.itemsize} = {row} bytes",
                             "a multiple of 16 bytes")
    if t.interleave == "none" and t.swizzle != "none" and row > SWIZZLES[t.swizzle]:
        raise TensorMapError(f"an innermost {what} of {elements} × {t.itemsize} = {row} bytes with "
                             f"swizzle={t.swizzle!r}", f"at most {SWIZZLES[t.swizzle]} bytes",
                             "a narrower box and more copies, or a wider swizzle")


def check_columns(t: TensorMap) -> None:
    """Corners and counts of an im2col map (cuTensorMapEncodeIm2col)."""
    if t.rank < 3: raise TensorMapError(f"im2col for rank {t.rank}", "3 to 5: N[D[H]]WC")
    spatial = t.rank - 2
    limit = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}[spatial]
    for what, corner in (("lower", t.lower), ("upper", t.upper)):
        if len(corner) != spatial or not all(-limit <= x < limit for x in corner):
            raise TensorMapError(f"{what}={corner}", f"{spatial} offsets from {-limit} to {limit - 1}")
    pixels, channels = t.box
    if not 1 <= channels <= 256: raise TensorMapError(f"channels={channels}", "1 to 256")
    if not 1 <= pixels <= 1024: raise TensorMapError(f"pixels={pixels}", "1 to 1024")
    check_row(t, channels, "row")
