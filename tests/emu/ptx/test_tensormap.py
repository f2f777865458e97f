"""Tensor maps: the 128 bytes against fields written down one by one, and every limit of
cuTensorMapEncodeTiled."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.errors import TensorMapError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.emulator.tensormap import DTYPES, SWIZZLES

BASE = 0x7_0000_0000
# of the word at 0x08: rank - 1, type, interleave, swizzle, fill
WORD = ((4, 3), (7, 4), (11, 2), (13, 2), (15, 1))


def field(data: bytes, offset: int, low: int, bits: int) -> int:
    """Bits low … low + bits - 1 of the map, counted from byte `offset`."""
    return int.from_bytes(data, "little") >> (8 * offset + low) & ((1 << bits) - 1)


def test_an_array_as_the_documentation_shows_it() -> None:
    """numpy has no bf16: uint16 with dtype="bf16"."""
    a = Emulator().alloc(np.zeros((128, 96), np.uint16))
    t = TensorMap.of_tiles(a, box=(64, 32), swizzle="64B", dtype="bf16")
    assert (t.address, t.dtype, t.dims, t.strides, t.box, t.rank, t.itemsize) == \
        (a.ptr, "bf16", (128, 96), (192, 2), (64, 32), 2, 2)
    assert t.box_bytes == 64 * 32 * 2
    data = t.encode()
    assert len(data) == 128
    assert field(data, 0, 0, 64) == a.ptr
    assert [field(data, 8, low, bits) for low, bits in WORD] == [1, 10, 0, 2, 0]
    assert field(data, 0x0c, 0, 32) == 192 >> 4
    assert [field(data, 0x20 + 4 * i, 0, 32) for i in range(2)] == [95, 127]  # innermost first
    assert (field(data, 0x34, 24, 8), field(data, 0x38, 0, 8)) == (31, 63)


def test_five_dimensions_and_long_strides() -> None:
    """Each field at its place; strides of more than 32 bits have their high bits at 0x1c."""
    strides = (1 << 39, 1 << 38, (1 << 36) + 16, 1 << 20)
    t = TensorMap.of_tiles(BASE, box=(1, 2, 3, 4, 16), dims=(9, 8, 7, 6, 1 << 32), strides=strides,
                           dtype="f32",
                        element_strides=(1, 2, 3, 4, 5), fill="nan")
    data = t.encode()
    assert [field(data, 8, low, bits) for low, bits in WORD] == [4, 7, 0, 0, 1]
    got = [(field(data, 0x0c + 4 * i, 0, 32) | field(data, 0x1c, 4 * i, 4) << 32) << 4 for i in range(4)]
    assert got == list(strides[::-1])
    assert [field(data, 0x20 + 4 * i, 0, 32) for i in range(5)] == [(1 << 32) - 1, 5, 6, 7, 8]
    assert [field(data, 0x34, 3 * i, 3) for i in range(5)] == [4, 3, 2, 1, 0]
    assert [field(data, 0x34, 24, 8), *(field(data, 0x38, 8 * i, 8) for i in range(4))] == [15, 3, 2, 1, 0]
    assert t.box_bytes == 4 * 1 * 1 * 1 * 1 * 4  # ceil(box / element stride) of each: 1 1 1 1 4
    assert field(data, 8, 16, 16) == 0
    assert data[0x3c:] == bytes(68)


def test_every_type_swizzle_and_interleave() -> None:
    codes = "u8 u16 u32 s32 u64 s64 f16 f32 f32ftz f64 bf16 tf32 tf32ftz"
    for code, name in enumerate(codes.split()):
        t = TensorMap.of_tiles(BASE, box=(1, 16), dims=(4, 64), dtype=name)
        assert field(t.encode(), 8, 7, 4) == code
        assert t.itemsize == {"8": 1, "16": 2, "32": 4, "64": 8}[name.removesuffix("ftz").lstrip("usbtf")]
    for code, name in enumerate(("none", "32B", "64B", "128B")):
        t = TensorMap.of_tiles(BASE, box=(1, 16), dims=(4, 64), dtype="f16", swizzle=name)
        assert field(t.encode(), 8, 13, 2) == code
    for code, (name, swizzle) in enumerate((("none", "none"), ("16B", "none"), ("32B", "32B"))):
        t = TensorMap.of_tiles(BASE, box=(1, 1, 16), dims=(4, 4, 64), dtype="f16", interleave=name,
                            swizzle=swizzle)
        assert field(t.encode(), 8, 11, 2) == code


@pytest.mark.parametrize(("dtype", "expected"), [
    (np.float16, "f16"), (np.float32, "f32"), (np.int32, "s32"), (np.uint64, "u64"), (np.int8, "u8"),
    (np.int16, "u16"), (np.bool_, "u8"), (np.float64, "f64"), ("bfloat16", "bf16"), ("e4m3", "u8"),
    ("tf32", "tf32")])
def test_types_by_their_names(dtype: Any, expected: str) -> None:
    assert TensorMap.of_tiles(BASE, box=(16,), dims=(64,), dtype=dtype).dtype == expected
    if not isinstance(dtype, str):
        assert TensorMap.of_tiles(Emulator().alloc(np.zeros(64, dtype)), box=(16,)).dtype == expected


def test_strides_of_all_dimensions_or_all_but_one() -> None:
    a = TensorMap.of_tiles(BASE, box=(8, 8), dims=(32, 24), strides=(64, 2), dtype="f16")
    assert a == TensorMap.of_tiles(BASE, box=(8, 8), dims=(32, 24), strides=(64,), dtype="f16")
    assert a.strides == (64, 2)


@st.composite
def maps(draw: st.DrawFn) -> TensorMap:
    """Maps of every kind."""
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    size = DTYPES[dtype][1]
    swizzle = draw(st.sampled_from(sorted(SWIZZLES)))
    widest = min(256, (SWIZZLES[swizzle] or 256 * size) // size)
    inner = draw(st.integers(1, widest * size // 16)) * 16 // size
    box = [*(draw(st.integers(1, 256)) for _ in range(rank - 1)), inner]
    dims = [draw(st.integers(1, 1 << 32)) for _ in range(rank)]
    strides = [draw(st.integers(0, (1 << 36) - 1)) * 16 for _ in range(rank - 1)]
    steps = [draw(st.integers(1, 8)) for _ in range(rank)]
    return TensorMap.of_tiles(draw(st.integers(0, 1 << 50)) * 16, box, swizzle, dims, strides, dtype, steps,
                           fill=draw(st.sampled_from(["zero", "nan"])) if dtype[0] in "ft" else "zero")


@settings(max_examples=200, deadline=None)
@given(maps())
def test_decoding_gives_back_what_was_encoded(t: TensorMap) -> None:
    assert TensorMap.decode(t.encode()) == t


def test_im2col_is_kept() -> None:
    t = TensorMap.im2col(BASE, lower=(-1, -2), upper=(1, 0), channels=64, pixels=128, swizzle="128B",
                         dims=(4, 32, 30, 128), dtype="f16")
    assert TensorMap.decode(t.encode()) == t
    assert (t.box, t.box_bytes) == ((128, 64), 128 * 64 * 2)


GOOD = {"buffer": BASE, "box": (8, 64), "dims": (64, 64), "dtype": "f16"}
LIMITS = {  # what is changed, and the words of the error
    "address": ({"buffer": BASE + 8}, "multiple of 16"),
    "address for interleave": ({"buffer": BASE + 16, "dims": (4, 64, 64), "box": (1, 8, 64),
                                "interleave": "32B", "swizzle": "32B"}, "multiple of 32"),
    "no buffer": ({"buffer": np.zeros((4, 4), np.float16)}, "emu.alloc"),
    "no type": ({"dtype": None}, "without element type"),
    "no shape": ({"dims": None}, "dims="),
    "unknown type": ({"dtype": "f8"}, "element type 'f8'"),
    "rank 0": ({"dims": (), "box": ()}, "rank 0"),
    "rank 6": ({"dims": (1,) * 6, "box": (1,) * 6}, "rank 6"),
    "dimension 0": ({"dims": (0, 64)}, "a dimension of 0"),
    "dimension too large": ({"dims": ((1 << 32) + 1, 64)}, "1 to 2^32"),
    "stride not of 16": ({"dims": (64, 63)}, "a stride of 126 bytes"),
    "stride too large": ({"strides": (1 << 40, 2)}, "below 2^40"),
    "negative stride": ({"strides": (-128, 2)}, "a stride of -128"),
    "innermost stride": ({"strides": (256, 4)}, "an innermost stride of 4"),
    "count of strides": ({"strides": (256, 128, 2)}, "3 strides for rank 2"),
    "box rank": ({"box": (64,)}, "box=(64,) of rank 1"),
    "box 0": ({"box": (0, 64)}, "an extent of 0"),
    "box 257": ({"box": (257, 64)}, "an extent of 257"),
    "row not of 16 bytes": ({"box": (8, 4)}, "4 × 2 = 8 bytes"),
    "row wider than the swizzle": ({"swizzle": "64B"}, "at most 64 bytes"),
    "element stride 9": ({"element_strides": (1, 9)}, "an element stride of 9"),
    "element strides": ({"element_strides": (1,)}, "1 element strides"),
    "swizzle": ({"swizzle": "256B"}, "swizzle='256B'"),
    "l2": ({"l2": "1KB"}, "l2='1KB'"),
    "interleave of rank 2": ({"interleave": "16B"}, "rank 3 to 5"),
    "interleave without its swizzle": ({"dims": (4, 64, 64), "box": (1, 8, 64), "interleave": "32B"},
                                       "swizzle='32B'"),
    "NaN of integers": ({"dtype": "u16", "fill": "nan"}, "a floating-point type")}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str) -> None:
    changed, message = LIMITS[name]
    assert TensorMap.of_tiles(**GOOD).box == (8, 64)  # type: ignore[arg-type]
    with pytest.raises(TensorMapError) as error: TensorMap.of_tiles(**{**GOOD, **changed})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_an_array_of_other_elements_needs_its_shape() -> None:
    a = Emulator().alloc(np.zeros((64, 64), np.float32))
    with pytest.raises(TensorMapError, match="elements of 4 bytes taken as f16"):
        TensorMap.of_tiles(a, box=(8, 64), dtype="f16")
    assert TensorMap.of_tiles(a, box=(8, 64), dtype="f16", dims=(64, 128)).strides == (256, 2)


@pytest.mark.parametrize(("changed", "message"), [
    ({"dims": (64, 64)}, "im2col for rank 2"), ({"lower": (0,)}, "lower=(0,)"),
    ({"upper": (0, 128)}, "upper=(0, 128)"), ({"channels": 257}, "channels=257"),
    ({"pixels": 1025}, "pixels=1025"), ({"channels": 4}, "a multiple of 16 bytes")])
def test_limits_of_im2col(changed: dict[str, Any], message: str) -> None:
    good = {"buffer": BASE, "lower": (0, 0), "upper": (0, 0), "channels": 64, "pixels": 64,
            "dims": (1, 8, 8, 64), "dtype": "f16"}
    assert TensorMap.im2col(**good).rank == 4  # type: ignore[arg-type]
    with pytest.raises(TensorMapError) as error: TensorMap.im2col(**{**good, **changed})  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(("offset", "value", "message"), [
    (8, 5 << 4, "rank 6"), (8, 13 << 7, "element type 13"), (8, 3 << 11, "interleave 3")])
def test_bytes_that_are_no_map(offset: int, value: int, message: str) -> None:
    data = bytearray(128)
    data[offset:offset + 2] = value.to_bytes(2, "little")
    with pytest.raises(TensorMapError, match=message): TensorMap.decode(bytes(data))
    with pytest.raises(TensorMapError, match="64 bytes"): TensorMap.decode(bytes(64))
