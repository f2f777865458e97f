"""Tensor copies through tensor maps: loads, stores and reductions of tiles, im2col columns, multicast.

Data are integers, so results are exact.
"""
from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.ptx.tma_case import (
    EXPECT,
    INIT,
    OUT,
    PERIODS,
    SEEDS,
    WAIT,
    box_of,
    counting,
    kernel,
    kinds,
    load,
    load_text,
    store,
    swizzled,
)
from tinygrad_nv.ptx.emulator import Emulator, TensorMap

# **** loads ****

@pytest.mark.sampled(32)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_load_2d(seed: int, mode: str, dtype: type) -> None:
    emu = Emulator(seed=seed)
    size = np.dtype(dtype).itemsize
    wide = 128 // size if mode == "none" else int(mode[:-1]) // size
    array = counting((40, 3 * wide), dtype)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(16, wide), swizzle=mode)
    for at in ((0, 0), (8, wide), (-3, -16 // size), (32, 3 * wide - 16 // size), (100, 0)):
        report, image = load(emu, map_, at, 16 * wide * size)
        assert not report.findings
        assert (image == swizzled(box_of(array, at, (16, wide)).tobytes(), mode)).all()


@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("offset", [128, 384, 896])
def test_swizzle_is_by_absolute_address(mode: str, offset: int) -> None:
    emu = Emulator()
    wide = 64 if mode == "none" else int(mode[:-1]) // 2
    array = counting((16, wide), np.uint16)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(16, wide), swizzle=mode)
    report, image = load(emu, map_, (0, 0), 32 * wide, offset)
    assert not report.findings
    assert (image == swizzled(array.tobytes(), mode, offset)).all()


SHAPES = [((200,), (64,), (-8,)), ((7, 24), (4, 16), (5, -4)), ((3, 9, 16), (2, 5, 8), (2, -1, 4)),
          ((3, 4, 5, 16), (2, 2, 3, 8), (-1, 3, 3, 12)), ((2, 3, 4, 5, 8), (2, 2, 2, 2, 4), (0, -1, 3, 2, 4))]


@pytest.mark.parametrize(("shape", "box", "at"), SHAPES)
def test_load_ranks(shape, box, at) -> None:
    emu = Emulator()
    array = counting(shape, np.int32)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=box)
    for where in (at, (0,) * len(at)):
        report, image = load(emu, map_, where, 4 * int(np.prod(box)))
        assert not report.findings
        assert (image.view(np.int32).reshape(box) == box_of(array, where, box)).all()


@pytest.mark.parametrize("steps", [(2, 1), (3, 1), (8, 1)])
def test_element_strides(steps) -> None:
    emu = Emulator()
    array = counting((30, 16), np.int32)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(16, 8), element_strides=steps)
    want = box_of(array, (1, 4), (16, 8), steps)
    report, image = load(emu, map_, (1, 4), want.nbytes)
    assert not report.findings
    assert (image.view(np.int32).reshape(want.shape) == want).all()


def test_strided_tensor() -> None:
    """A view: every second row of a wider array."""
    emu = Emulator()
    array = counting((20, 64), np.uint16)
    view = emu.alloc(array).ptr + 32
    map_ = TensorMap.of_tiles(view, box=(8, 32), dims=(10, 40), strides=(256,), dtype="bf16")
    report, image = load(emu, map_, (2, 16), 512)
    assert not report.findings
    assert (image.view(np.uint16).reshape(8, 32) == box_of(array[::2, 16:56], (2, 16), (8, 32))).all()


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "f16"), (np.float32, "f32"), (np.uint16, "bf16")])
def test_nan_fill(dtype: type, name: str) -> None:
    emu = Emulator()
    array = counting((8, 32), dtype)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(8, 32), dtype=name, fill="nan")
    report, image = load(emu, map_, (4, 8), array.nbytes)
    got = image.view(dtype).reshape(8, 32)
    if name == "bf16": got = (got.astype(np.uint32) << 16).view(np.float32)
    assert not report.findings
    inside = np.zeros((8, 32), bool)
    inside[:4, :24] = True
    assert (np.isnan(got) == ~inside).all()
    # as on an H100: f7 7f in each 16 bits
    assert (image.view(np.uint16).reshape(8, 32, -1)[~inside] == 0x7ff7).all()


def test_subnormals_are_flushed_for_ftz() -> None:
    emu = Emulator()
    array = np.tile(np.array([1e-40, 1, -1e-40, 2], np.float32), (4, 4))
    report, image = load(emu, TensorMap.of_tiles(emu.alloc(array), box=(4, 16), dtype="f32ftz"), (0, 0), 256)
    assert not report.findings
    assert (image.view(np.float32).reshape(4, 16) == np.where(abs(array) < 1, 0, array)).all()


# **** stores and reductions ****

@pytest.mark.sampled(16)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("at", [(0, 0), (24, 16), (5, 4)])
def test_store_2d(seed: int, mode: str, at) -> None:
    emu = Emulator(seed=seed)
    wide = 32 if mode == "none" else int(mode[:-1]) // 4
    array, box = counting((32, 40), np.int32), counting((16, wide), np.int32) + 1000
    target = emu.alloc(array)
    map_ = TensorMap.of_tiles(target, box=(16, wide), swizzle=mode)
    report = store(emu, map_, at, swizzled(box.tobytes(), mode))
    want = array.copy()
    for i, j in itertools.product(range(16), range(wide)):
        y, x = at[0] + i, at[1] + j
        if 0 <= y < 32 and 0 <= x < 40: want[y, x] = box[i, j]
    assert not report.findings
    assert (target.numpy() == want).all()


@pytest.mark.parametrize(("shape", "box", "at"), SHAPES)
def test_store_ranks(shape, box, at) -> None:
    emu = Emulator()
    array, data = counting(shape, np.int32), counting(box, np.int32) + 1000
    target, at = emu.alloc(array), tuple(map(abs, at))
    report = store(emu, TensorMap.of_tiles(target, box=box), at, data)
    want = array.copy()
    for index in np.ndindex(*box):
        where = tuple(a + i for a, i in zip(at, index, strict=True))
        if all(0 <= x < n for x, n in zip(where, shape, strict=True)): want[where] = data[index]
    assert not report.findings
    assert (target.numpy() == want).all()


@pytest.mark.parametrize(("inner", "written"), [(1, 8), (131, 136), (136, 136)])
def test_store_writes_whole_chunks(inner: int, written: int) -> None:
    """As an H100 does: of a row of 1 bf16, 8 of shared memory go out, of 131, 136. Loads fill in by elements.
    Where the memory ends with the last row, the rest of its chunk is out of bounds."""
    emu = Emulator()
    pitch, rows = 144, 4
    array, data = np.full((rows, pitch), 77, np.uint16), counting((rows, 144), np.uint16) + 1000
    target = emu.alloc(array)
    for at in range(0, 144, 72):
        map_ = TensorMap.of_tiles(target, box=(rows, 72), dims=(rows, inner), strides=(2 * pitch,),
                                  dtype="bf16")
        assert not store(emu, map_, (0, at), data[:, at:at + 72].copy()).findings
    want = array.copy()
    want[:, :written] = data[:, :written]
    assert (target.numpy() == want).all()
    report, image = load(emu, TensorMap.of_tiles(target, box=(rows, 16), dims=(rows, inner), dtype="u16",
                                              strides=(2 * pitch,)), (0, 0), 128)
    assert not report.findings
    assert (image.view(np.uint16).reshape(rows, 16)[:, inner:] == 0).all()
    short = emu.alloc(np.zeros((rows - 1) * pitch + inner, np.uint16))
    ends = TensorMap.of_tiles(short.ptr, box=(rows, 144), dims=(rows, inner), strides=(2 * pitch,),
                              dtype="bf16")
    assert kinds(store(emu, ends, (0, 0), data)) == (set() if inner == written else {"out-of-bounds"})


@pytest.mark.parametrize(("dtype", "inner", "fine"), [
    ("s32", -3, False), ("s32", 6, False), ("s32", -8, True), ("s32", 4, True), ("s32", 12, True),
    ("s32", 16, True), ("u16", 2, False)])
def test_innermost_coordinates(dtype: str, inner: int, fine: bool) -> None:
    """An H100 takes those that are multiples of 16 bytes; others end the launch."""
    emu = Emulator()
    array = counting((8, 64), np.int32 if dtype == "s32" else np.uint16)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(8, 16), dtype=dtype)
    report, _ = load(emu, map_, (0, inner), 128 * array.itemsize)
    assert ("misaligned" in kinds(report)) == (not fine)
    assert fine == (kinds(report) == set())
    if inner >= 0:
        report = store(emu, map_, (0, inner), counting((8, 16), array.dtype))
        assert kinds(report) == (set() if fine else {"misaligned"})


@pytest.mark.parametrize("at", [(-8,), (4, -1, 2), (-3, 5), (12, 3, 3, -1), (6, 2, 3, -1, 0)])
def test_stores_below_zero(at) -> None:
    """These end the launch on an H100 (innermost first). Loads of outer coordinates below 0 fill in."""
    emu = Emulator()
    at = (at[0] // 4 * 4, *at[1:])
    box = (1,) * (len(at) - 1) + (8,)
    map_ = TensorMap.of_tiles(emu.alloc(counting((16,) * len(at), np.int32)), box=box)
    report = store(emu, map_, at[::-1], counting(box, np.int32))
    assert kinds(report) == {"out-of-bounds"}
    assert "coordinates below 0" in report.findings[0].message
    report, _ = load(emu, map_, at[::-1], 32)
    assert not report.findings


@pytest.mark.parametrize(("how", "dtype", "combine"), [
    ("add", np.float32, np.add), ("add", np.float16, np.add), ("add", np.int32, np.add),
    ("min", np.int32, np.minimum), ("max", np.float16, np.maximum), ("and", np.uint32, np.bitwise_and),
    ("xor", np.uint64, np.bitwise_xor),
    ("inc", np.uint32, lambda x, y: np.where(x >= y, 0, x + 1))])
def test_reductions(how: str, dtype: type, combine) -> None:
    emu = Emulator()
    wide = 64 // np.dtype(dtype).itemsize
    array, data = counting((16, wide), dtype), counting((8, wide), dtype)[::-1].copy()
    target = emu.alloc(array)
    report = store(emu, TensorMap.of_tiles(target, box=(8, wide)), (12, 0), data, "cp.reduce", "." + how)
    want = array.copy()
    want[12:] = combine(array[12:], data[:4])
    assert not report.findings
    assert (target.numpy() == want).all()


# **** clusters ****

@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["none", "128B"])
def test_multicast(seed: int, mode: str) -> None:
    """Each of two CTAs loads half of a tile for both."""
    emu = Emulator(seed=seed)
    array = counting((16, 32), np.uint32)
    out = emu.alloc(np.zeros((2, 2048), np.uint8))
    body = """
  mov.u32 %r20, %cluster_ctarank; shl.b32 %r21, %r20, 10; add.u32 %r22, %r2, %r21; shl.b32 %r23, %r20, 3;
  mov.b16 %h0, 3; mul.wide.u32 %d4, %r20, 2048; add.u64 %d1, %d1, %d4;
""" + INIT + EXPECT.format(bytes=2048) + """
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
       [%r22], [%d2, {0, %r23}], [%r4], %h0;
""" + WAIT + OUT.format(words=512) + "  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(8, 32), swizzle=mode)
    report = emu.launch(kernel(body), grid=2, block=32, cluster=(2, 1, 1), args=[map_, out, out])
    assert not report.findings
    assert (out.numpy() == swizzled(array.tobytes(), mode)).all()


# **** im2col ****

def columns(array: np.ndarray, at, lower, upper, pixels: int, channels: int, shift, steps) -> np.ndarray:
    """What an im2col load brings, from a list of all base pixels."""
    spatial = [range(low, n + up, step)
               for low, up, n, step in zip(lower, upper, array.shape[1:-1], steps, strict=True)]
    bases = [(n, *p) for n in range(-1, array.shape[0] + 4) for p in itertools.product(*spatial)]
    first = bases.index(tuple(at[:-1]))
    out = np.zeros((pixels, channels), array.dtype)
    for row, (n, *base) in enumerate(bases[first:first + pixels]):
        where = [b + s for b, s in zip(base, shift, strict=True)]
        if not all(0 <= x < size for x, size in zip((n, *where), array.shape[:-1], strict=True)): continue
        for c in range(channels):
            if 0 <= at[-1] + c < array.shape[-1]: out[row, c] = array[(n, *where, at[-1] + c)]
    return out


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("shape", "lower", "upper", "at", "shift"), [
    ((3, 9, 16), (-1,), (-1,), (0, -1, 0), (2,)),
    ((2, 6, 7, 16), (-1, -1), (-1, -1), (0, 3, -1, 0), (2, 0)),
    ((2, 6, 7, 16), (0, 0), (-2, -2), (1, 2, 2, 8), (1, 2)),
    ((2, 3, 4, 5, 8), (0, -1, -1), (0, -1, -1), (0, 2, 1, 1, 0), (0, 1, 2))])
def test_im2col(shape, lower, upper, at, shift, step: int) -> None:
    emu = Emulator()
    array = counting(shape, np.uint32)
    rank = len(shape)
    steps = (step,) * (rank - 2)
    map_ = TensorMap.im2col(emu.alloc(array), lower=lower, upper=upper, channels=8, pixels=20,
                            element_strides=(1, *steps, 1))
    out = emu.alloc(np.zeros(640, np.uint8))
    text = load_text(at, 640).replace(".tile", ".im2col").replace(
        ", [%r4];", f", [%r4], {{{', '.join(map(str, shift[::-1]))}}};")
    body = INIT + text + WAIT + OUT.format(words=160)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out])
    assert not report.findings
    want = columns(array, at, lower, upper, 20, 8, shift, steps)
    assert (out.numpy().view(np.uint32).reshape(20, 8) == want).all()
    tiled = TensorMap.of_tiles(emu.alloc(array), box=(1,) * (rank - 1) + (8,))
    report = emu.launch(kernel(INIT + text + WAIT), grid=1, block=32, args=[tiled, out, out])
    assert "out-of-bounds" in kinds(report)
