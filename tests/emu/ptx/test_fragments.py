"""Fragment, descriptor and swizzle formulas against a second derivation, for every element.

Registers: CuTe's thread-value layouts (strides of nested shapes over m + M * k), written down as the library
publishes
them, and the composition of 8 x 8 matrices that ldmatrix loads. Shared memory: the canonical layouts of
wgmma in CuTe's
notation, swizzled by Swizzle<B, 4, 3>.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from tinygrad_nv.ptx.emulator.fragments import (
    Major,
    a_fragment,
    b_fragment,
    c_fragment,
    descriptor,
    matrix_fragment,
    matrix_offset,
    metadata_place,
    swizzle,
)

Modes = list[tuple[int, int]]  # (extent, stride), fastest first


def strided(modes: Modes) -> np.ndarray:
    """Every index of a layout, in order."""
    out = np.zeros(1, int)
    for extent, stride in modes: out = (out[None] + stride * np.arange(extent)[:, None]).reshape(-1)
    return out


def layout(threads: Modes, values: Modes) -> np.ndarray:
    """Linear positions [value, thread]."""
    return strided(values)[:, None] + strided(threads)[None]


# bits, m, k, threads and values over m + 16 * k
A_LAYOUTS = [
    (16, 16, 16, [(4, 32), (8, 1)], [(2, 16), (2, 8), (2, 128)]),
    (16, 16, 8, [(4, 32), (8, 1)], [(2, 16), (2, 8)]),
    (32, 16, 8, [(4, 16), (8, 1)], [(2, 8), (2, 64)]),
    (32, 16, 4, [(4, 16), (8, 1)], [(2, 8)]),
    (8, 16, 32, [(4, 64), (8, 1)], [(4, 16), (2, 8), (2, 256)]),
    (8, 16, 16, [(4, 64), (8, 1)], [(4, 16), (2, 8)]),
    (4, 16, 64, [(4, 128), (8, 1)], [(8, 16), (2, 8), (2, 512)]),
    (1, 16, 256, [(4, 512), (8, 1)], [(32, 16), (2, 8), (2, 2048)]),
    (8, 8, 16, [(4, 32), (8, 1)], [(4, 8)]),
    (4, 8, 32, [(4, 64), (8, 1)], [(8, 8)]),
    (64, 8, 4, [(4, 8), (8, 1)], [(1, 0)]),
    (64, 16, 8, [(4, 16), (8, 1)], [(2, 8), (2, 64)]),
]
# bits, k, over n + 8 * k
B_LAYOUTS = [
    (16, 16, [(4, 16), (8, 1)], [(2, 8), (2, 64)]),
    (16, 8, [(4, 16), (8, 1)], [(2, 8)]),
    (32, 8, [(4, 8), (8, 1)], [(2, 32)]),
    (8, 32, [(4, 32), (8, 1)], [(4, 8), (2, 128)]),
    (4, 64, [(4, 64), (8, 1)], [(8, 8), (2, 256)]),
    (1, 256, [(4, 256), (8, 1)], [(32, 8), (2, 1024)]),
    (64, 4, [(4, 8), (8, 1)], [(1, 0)]),
]


def by_value(array: np.ndarray) -> np.ndarray:
    """[register, lane, element] as [value, lane]."""
    return array.transpose(0, 2, 1).reshape(-1, 32)


@pytest.mark.parametrize(("bits", "m", "k", "threads", "values"), A_LAYOUTS)
def test_a(bits: int, m: int, k: int, threads: Modes, values: Modes) -> None:
    row, depth = np.broadcast_arrays(*a_fragment(bits, m, k))
    np.testing.assert_array_equal(by_value(row) + m * by_value(depth), layout(threads, values))
    assert len({*zip(row.flat, depth.flat, strict=True)}) == m * k


@pytest.mark.parametrize(("bits", "k", "threads", "values"), B_LAYOUTS)
def test_b(bits: int, k: int, threads: Modes, values: Modes) -> None:
    depth, column = np.broadcast_arrays(*b_fragment(bits, k))
    np.testing.assert_array_equal(by_value(column) + 8 * by_value(depth), layout(threads, values))
    assert len({*zip(depth.flat, column.flat, strict=True)}) == 8 * k


@pytest.mark.parametrize("n", [8, 64, 256])
def test_accumulators(n: int) -> None:
    """m + 64 * n of a wgmma, of which a warp has 16 rows."""
    row, column = np.broadcast_arrays(*c_fragment(16, n))
    for warp in range(4):
        want = layout([(4, 128), (8, 1), (4, 16)], [(2, 64), (2, 8), (n // 8, 512)])[:, 32 * warp:32 * warp
                                                                                     + 32]
        np.testing.assert_array_equal(16 * warp + row + 64 * column, want)


def test_accumulators_of_8_rows() -> None:
    row, column = c_fragment(8, 8)
    np.testing.assert_array_equal(row + 8 * column, layout([(4, 16), (8, 1)], [(2, 8)]))


def test_accumulators_are_the_next_product_s_a() -> None:
    """Registers 8c .. 8c + 7 of an accumulator, in pairs, are A's registers of the k16 chunk c."""
    row, column = np.broadcast_arrays(*c_fragment(16, 64))
    a_row, a_depth = np.broadcast_arrays(*a_fragment(16, 16, 16))
    for chunk in range(4):
        part = slice(8 * chunk, 8 * chunk + 8)
        np.testing.assert_array_equal(row[part], by_value(a_row))
        np.testing.assert_array_equal(column[part] - 16 * chunk, by_value(a_depth))


def test_ldmatrix_makes_fragments() -> None:
    """x4 loads A of 16-bit elements from quarters of the tile; B comes from its transpose."""
    row, column = matrix_fragment(False)
    a_row, a_depth = np.broadcast_arrays(*a_fragment(16, 16, 16))
    for register in range(4):
        np.testing.assert_array_equal(a_row[register], row + 8 * (register % 2))
        np.testing.assert_array_equal(a_depth[register], column + 8 * (register // 2))
    depth, n = np.broadcast_arrays(*b_fragment(16, 16))
    for register in range(2):
        np.testing.assert_array_equal((n[register], depth[register] - 8 * register), (row, column))
    transposed = matrix_fragment(True)
    np.testing.assert_array_equal(transposed, (column, row))


# **** shared memory ****

def cute_swizzle(address: int, bits: int) -> int:
    """Swizzle<bits, 4, 3> of a byte address."""
    return address ^ (address & ((1 << bits) - 1) << 7) >> 3


@pytest.mark.parametrize(("span", "bits"), [(0, 0), (32, 1), (64, 2), (128, 3)])
def test_swizzle(span: int, bits: int) -> None:
    addresses = np.arange(4096)
    got = swizzle(addresses, span)
    assert [*got] == [cute_swizzle(address, bits) for address in range(4096)]
    assert len({*np.asarray(got)}) == 4096
    np.testing.assert_array_equal(swizzle(got, span), addresses)


def canonical(major: Major, span: int, per: int, size: int, leading: int, stride: int, mn: int,
              k: int) -> Iterator[tuple[int, int, int]]:
    """(mn, k, byte) of a tile by wgmma's canonical layouts: `per` elements of `size` bytes in 16; leading
    and stride in
    bytes, the others in elements."""
    width = max(span // 16, 1)  # units of 16 bytes in a row of the pattern
    lead, step = leading // size, stride // size
    if major == "k":  # ((8, m), (T, 2k)) : ((width * T, SBO), (1, T or LBO))
        rows: Modes = [(8, width * per), (mn // 8, step)]
        depths: Modes = [(per, 1), (k // per, per if span else lead)]
    elif span:        # ((T, width, m), (8, k)) : ((1, T, LBO), (width * T, SBO))
        rows, depths = [(per, 1), (width, per), (mn // (per * width), lead)], [(8, width * per),
                                                                               (k // 8, step)]
    else:             # ((T, 1, m), (8, k)) : ((1, T, SBO), (T, LBO))
        rows, depths = [(per, 1), (mn // per, step)], [(8, per), (k // 8, lead)]
    for (i, x), (j, y) in itertools.product(enumerate(strided(rows)), enumerate(strided(depths))):
        yield i, j, int(x + y) * size


@pytest.mark.sampled(12)
@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_canonical_layouts(major: Major, span: int, size: int) -> None:
    k = 32 // size if major == "k" else 16
    for mn, leading, stride in ((128, 2048, 1024), (256, 4096, 512 * 8), (128, 16384, 8 * max(span, 16))):
        want = np.zeros((mn, k), int)
        for i, j, at in canonical(major, span, 16 // size, size, leading, stride, mn, k): want[i, j] = at
        rows, depths = np.ogrid[:mn, :k]
        np.testing.assert_array_equal(matrix_offset(rows, depths, major, span, size, leading, stride), want)


def test_descriptors() -> None:
    """Values that Triton and CUTLASS emit."""
    assert descriptor(0x2400, 16, 1024, 128) == 0x4000004000010240
    assert descriptor(0, 8192, 1024, 128) == 0x4000004002000000
    assert descriptor(1 << 24 | 0x400, 0, 256, 32) == 0xc000001000000040
    assert descriptor(0x400, 0, 512, 64, 3) == 0x8006002000000040


# **** sparsity ****

@pytest.mark.parametrize(("bits", "k"), [(16, 16), (16, 32), (32, 8), (32, 16), (8, 32), (8, 64), (4, 64),
                                         (4, 128)])
def test_metadata(bits: int, k: int) -> None:
    """What each lane holds, told from the lane's side."""
    width = {32: 2, 4: 8}.get(bits, 4)
    places = {}
    selectors = 4 // (k // width // 4)
    for selector in range(selectors):
        for row, group in itertools.product(range(16), range(k // width)):
            places[selector, *metadata_place(bits, k, row, group, selector)] = row, group * width
    assert len(places) == selectors * 16 * k // width == 256
    for (selector, lane, bit), (row, first) in places.items():
        g, q = lane // 4, lane % 4
        if bits >= 16:
            assert row == g + (8 if bit >= 16 else 0)
            part = q if selectors == 2 else 0
            assert q // (4 // selectors) == selector
            assert first == width * (4 * (part & 1) + bit % 16 // 4)
        else:
            assert row == g + 8 * (lane & 1)
            if selectors == 2: assert q // 2 == selector
            assert first == width * ((8 * (q // 2) if selectors == 1 else 0) + bit // 4)
