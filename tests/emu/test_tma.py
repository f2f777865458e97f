"""Tensor copies through tensor maps: loads, stores and reductions of tiles, im2col, maps edited by a kernel.

What must lie in shared memory is derived a second time here, from indices: element (…, i1, i0) of a box is
at its place in a dense array, whose 16-byte pieces are then exchanged within each 128-byte line of shared
memory by the line's number. Data are integers, so results are exact.
"""
from __future__ import annotations

import itertools

import numpy as np
import pytest
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap

SEEDS = (0, 1, 2, 3)
PERIODS = {"none": 1, "32B": 2, "64B": 4, "128B": 8}  # lines after which the exchange repeats
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 p0, .param .u64 p1{params}) {{
  .reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b64 %d<20>;
  .shared .align 1024 .b8 tile[16384];
  .shared .align 128 .b8 edited[128];
  .shared .align 8 .b64 bar[2];
  mov.b64 %d2, map;
  cvta.param.u64 %d2, %d2;
  ld.param.u64 %d0, [p0];
  ld.param.u64 %d1, [p1];
  mov.u32 %r0, %tid.x;
  mov.u32 %r2, tile;
  mov.u32 %r4, bar;
  mov.u32 %r5, edited;
  setp.eq.u32 %p0, %r0, 0;
{body}
  ret;
}}
"""
INIT = """
  @%p0 mbarrier.init.shared::cta.b64 [%r4], 1;
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
EXPECT = "  @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {bytes};\n"
WAIT = """
W0: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0;
  @!%p1 bra W0;
"""
# all of `tile`'s first {bytes} bytes to p1, or from it
OUT = """
  mov.u32 %r10, %r0;
L1: setp.ge.u32 %p2, %r10, {words};
  @%p2 bra L2;
  mad.lo.u32 %r11, %r10, 4, %r2;
  mad.wide.u32 %d3, %r10, 4, %d1;
  ld.shared.b32 %r12, [%r11];
  st.global.b32 [%d3], %r12;
  add.u32 %r10, %r10, 32;
  bra L1;
L2:
"""
IN = OUT.replace("ld.shared.b32 %r12, [%r11]", "ld.global.b32 %r12, [%d3]").replace(
    "st.global.b32 [%d3], %r12", "st.shared.b32 [%r11], %r12").replace("L1", "L3").replace("L2", "L4")
FENCE = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


def kernel(body: str, params: str = "") -> str: return HEAD.format(body=body, params=params)


def kinds(report) -> set[str]: return {finding.kind for finding in report.findings}


def place(at, map_: str = "%d2") -> str: return f"[{map_}, {{{', '.join(map(str, at[::-1]))}}}]"


def load_text(at, bytes_: int, more: str = "", map_: str = "%d2", offset: int = 0) -> str:
    """Load of the box at `at` (outermost first)."""
    return (EXPECT.format(bytes=bytes_) + f"  @%p0 cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile"
            f".mbarrier::complete_tx::bytes{more} [%r2+{offset}], {place(at, map_)}, [%r4];\n")


def load(emu: Emulator, map_: TensorMap, at, bytes_: int, offset: int = 0):
    """The bytes of shared memory after a load."""
    out = emu.alloc(np.zeros(bytes_ + offset, np.uint8))
    body = INIT + load_text(at, bytes_, offset=offset) + WAIT
    body += OUT.replace("%r10, %r0;", f"%r10, %r0;\n  add.u32 %r10, %r10, {offset // 4};", 1).format(
        words=(bytes_ + offset) // 4)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out])
    return report, out.numpy()[offset:]


def box_of(array: np.ndarray, at, box, steps=None, fill=0) -> np.ndarray:
    """The elements a box covers, `fill` outside the array, one by one."""
    steps = steps or (1,) * len(box)
    steps = (*steps[:-1], 1)
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    out = np.full(counts, fill, array.dtype)
    for index in itertools.product(*map(range, counts)):
        where = tuple(a + i * s for a, i, s in zip(at, index, steps, strict=True))
        if all(0 <= x < n for x, n in zip(where, array.shape, strict=True)): out[index] = array[where]
    return out


def swizzled(data: bytes, mode: str, offset: int = 0) -> np.ndarray:
    """Dense bytes as they lie in shared memory, from `offset` bytes after a multiple of 1024."""
    period = PERIODS[mode]
    pieces = np.frombuffer(data, np.uint8).reshape(-1, 16)
    out = np.zeros_like(pieces)
    for number, piece in enumerate(pieces):
        line, column = divmod(number + offset // 16, 8)
        out[line * 8 + (column ^ line % period) - offset // 16] = piece
    return out.reshape(-1)


def counting(shape, dtype) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.arange(1, size + 1) % 251).astype(dtype).reshape(shape)


# **** loads ****

@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_load_2d(seed: int, mode: str, dtype: type) -> None:
    emu = Emulator(seed=seed)
    size = np.dtype(dtype).itemsize
    wide = 128 // size if mode == "none" else int(mode[:-1]) // size
    array = counting((40, 3 * wide), dtype)
    map_ = TensorMap.tiled(emu.alloc(array), box=(16, wide), swizzle=mode)
    for at in ((0, 0), (8, wide), (-3, -wide // 2), (32, 5 * wide // 2), (100, 0)):
        report, image = load(emu, map_, at, 16 * wide * size)
        assert not report.findings
        assert (image == swizzled(box_of(array, at, (16, wide)).tobytes(), mode)).all()


@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("offset", [128, 384, 896])
def test_swizzle_is_by_absolute_address(mode: str, offset: int) -> None:
    emu = Emulator()
    wide = 64 if mode == "none" else int(mode[:-1]) // 2
    array = counting((16, wide), np.uint16)
    map_ = TensorMap.tiled(emu.alloc(array), box=(16, wide), swizzle=mode)
    report, image = load(emu, map_, (0, 0), 32 * wide, offset)
    assert not report.findings
    assert (image == swizzled(array.tobytes(), mode, offset)).all()


SHAPES = [((200,), (64,), (-8,)), ((7, 24), (4, 16), (5, -3)), ((3, 9, 16), (2, 5, 8), (2, -1, 4)),
          ((3, 4, 5, 16), (2, 2, 3, 8), (-1, 3, 3, 12)), ((2, 3, 4, 5, 8), (2, 2, 2, 2, 4), (0, -1, 3, 2, 6))]


@pytest.mark.parametrize(("shape", "box", "at"), SHAPES)
def test_load_ranks(shape, box, at) -> None:
    emu = Emulator()
    array = counting(shape, np.int32)
    map_ = TensorMap.tiled(emu.alloc(array), box=box)
    for where in (at, (0,) * len(at)):
        report, image = load(emu, map_, where, 4 * int(np.prod(box)))
        assert not report.findings
        assert (image.view(np.int32).reshape(box) == box_of(array, where, box)).all()


@pytest.mark.parametrize("steps", [(2, 1), (3, 1), (8, 1)])
def test_element_strides(steps) -> None:
    emu = Emulator()
    array = counting((30, 16), np.int32)
    map_ = TensorMap.tiled(emu.alloc(array), box=(16, 8), element_strides=steps)
    want = box_of(array, (1, 4), (16, 8), steps)
    report, image = load(emu, map_, (1, 4), want.nbytes)
    assert not report.findings
    assert (image.view(np.int32).reshape(want.shape) == want).all()


def test_strided_tensor() -> None:
    """A view: every second row of a wider array."""
    emu = Emulator()
    array = counting((20, 64), np.uint16)
    map_ = TensorMap.tiled(emu.alloc(array).ptr + 32, box=(8, 32), dims=(10, 40), strides=(256,), dtype="bf16")
    report, image = load(emu, map_, (2, 16), 512)
    assert not report.findings
    assert (image.view(np.uint16).reshape(8, 32) == box_of(array[::2, 16:56], (2, 16), (8, 32))).all()


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "f16"), (np.float32, "f32"), (np.uint16, "bf16")])
def test_nan_fill(dtype: type, name: str) -> None:
    emu = Emulator()
    array = counting((8, 32), dtype)
    map_ = TensorMap.tiled(emu.alloc(array), box=(8, 32), dtype=name, fill="nan")
    report, image = load(emu, map_, (4, 8), array.nbytes)
    got = image.view(dtype).reshape(8, 32)
    if name == "bf16": got = (got.astype(np.uint32) << 16).view(np.float32)
    assert not report.findings
    inside = np.zeros((8, 32), bool)
    inside[:4, :24] = True
    assert (np.isnan(got) == ~inside).all()


def test_subnormals_are_flushed_for_ftz() -> None:
    emu = Emulator()
    array = np.tile(np.array([1e-40, 1, -1e-40, 2], np.float32), (4, 4))
    report, image = load(emu, TensorMap.tiled(emu.alloc(array), box=(4, 16), dtype="f32ftz"), (0, 0), 256)
    assert not report.findings
    assert (image.view(np.float32).reshape(4, 16) == np.where(abs(array) < 1, 0, array)).all()


# **** stores and reductions ****

def store(emu: Emulator, map_: TensorMap, at, data: np.ndarray, what: str = "cp", how: str = "",
          body: str | None = None):
    """A box in shared memory, stored or reduced."""
    text = IN.format(words=data.nbytes // 4) + FENCE + (
        f"  @%p0 {what}.async.bulk.tensor.{len(at)}d.global.shared::cta{how}.tile.bulk_group {place(at)}, [%r2];"
        "\n") + DONE
    return emu.launch(kernel(body or text), grid=1, block=32, args=[map_, emu.alloc(data), emu.alloc(data)])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", PERIODS)
@pytest.mark.parametrize("at", [(0, 0), (24, 16), (-5, -4)])
def test_store_2d(seed: int, mode: str, at) -> None:
    emu = Emulator(seed=seed)
    wide = 32 if mode == "none" else int(mode[:-1]) // 4
    array, box = counting((32, 40), np.int32), counting((16, wide), np.int32) + 1000
    target = emu.alloc(array)
    map_ = TensorMap.tiled(target, box=(16, wide), swizzle=mode)
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
    target = emu.alloc(array)
    report = store(emu, TensorMap.tiled(target, box=box), at, data)
    want = array.copy()
    for index in np.ndindex(*box):
        where = tuple(a + i for a, i in zip(at, index, strict=True))
        if all(0 <= x < n for x, n in zip(where, shape, strict=True)): want[where] = data[index]
    assert not report.findings
    assert (target.numpy() == want).all()


@pytest.mark.parametrize(("how", "dtype", "combine"), [
    ("add", np.float32, np.add), ("add", np.float16, np.add), ("add", np.int32, np.add),
    ("min", np.int32, np.minimum), ("max", np.float16, np.maximum), ("and", np.uint32, np.bitwise_and), ("xor", np.uint64, np.bitwise_xor),
    ("inc", np.uint32, lambda x, y: np.where(x >= y, 0, x + 1))])
def test_reductions(how: str, dtype: type, combine) -> None:
    emu = Emulator()
    wide = 64 // np.dtype(dtype).itemsize
    array, data = counting((16, wide), dtype), counting((8, wide), dtype)[::-1].copy()
    target = emu.alloc(array)
    report = store(emu, TensorMap.tiled(target, box=(8, wide)), (12, 0), data, "cp.reduce", "." + how)
    want = array.copy()
    want[12:] = combine(array[12:], data[:4])
    assert not report.findings
    assert (target.numpy() == want).all()


# **** mistakes ****

def usual(emu: Emulator, **more):
    """An array, its map and the text that loads 16 rows of 64."""
    array = counting((16, 64), np.uint16)
    out = emu.alloc(np.zeros(2048, np.uint8))
    return array, TensorMap.tiled(emu.alloc(array), box=(16, 64), **more), out, (
        INIT + load_text((0, 0), 2048) + WAIT + OUT.format(words=512))


@pytest.mark.parametrize(("old", "new", "kind"), [
    (WAIT, "", "async-hazard"),
    ("_, [%r4], 2048", "_, [%r4], 2050", "deadlock"),
    ("_, [%r4], 2048", "_, [%r4], 2046", "deadlock"),
    ("[%r2+0]", "[%r2+64]", "misaligned"),
    ("[%r2+0]", "[%r2+15360]", "out-of-bounds"),
    ("2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2+0], [%d2, {0, 0}]",
     "3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2+0], [%d2, {0, 0, 0}]",
     "out-of-bounds"),
    ("[%d2, {0", "[%d1, {0", "out-of-bounds"),                        # no map there
    (", [%r4];", ", [%r4+8];", "barrier"),
    ("try_wait.parity.shared::cta.b64 %p1, [%r4], 0", "try_wait.parity.shared::cta.b64 %p1, [%r4], 1",
     "async-hazard"),                                                  # the wrong parity
])
def test_load_mistakes(old: str, new: str, kind: str) -> None:
    emu = Emulator()
    array, map_, out, body = usual(emu)
    assert old in body
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out])
    assert not report.findings
    assert (out.numpy() == array.view(np.uint8).reshape(-1)).all()
    assert kind in kinds(emu.launch(kernel(body.replace(old, new)), grid=1, block=32, args=[map_, out, out]))


@pytest.mark.parametrize(("offset", "value", "field"), [
    (8, b"\x70", "rank"), (9, b"\x0f", "element type"), (0, b"\x08", "global address"),
    (9, b"\x0d", "interleaved"), (0x37, b"\x06", "inner box"), (8, b"\x10\x81", "NaN")])
def test_malformed_maps(offset: int, value: bytes, field: str) -> None:
    emu = Emulator()
    _, map_, out, body = usual(emu)
    data = bytearray(map_.encode())
    data[offset:offset + len(value)] = value
    report = emu.launch(kernel(body), grid=1, block=32, args=[bytes(data), out, out])
    found = [f.message for f in report.findings if f.kind == "out-of-bounds"]
    assert found
    assert field in found[0]


def test_a_map_larger_than_its_tensor() -> None:
    emu = Emulator()
    array = counting((16, 64), np.uint16)
    map_ = TensorMap.tiled(emu.alloc(array).ptr, box=(16, 64), dims=(17, 64), dtype="u16")
    report, _ = load(emu, map_, (0, 0), 2048)
    assert not report.findings
    report, _ = load(emu, map_, (1, 0), 2048)
    assert "out-of-bounds" in kinds(report)


@pytest.mark.parametrize(("old", "kind"), [("fence.proxy.async.shared::cta;", "proxy-fence"),
                                           (DONE, "async-hazard"), (FENCE, None)])
def test_store_mistakes(old: str, kind: str | None) -> None:
    emu = Emulator()
    data = counting((16, 64), np.uint16)
    body = IN.format(words=512) + FENCE + (
        "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {0, 0}], [%r2];\n") + DONE
    clean, dirty = (store(emu, TensorMap.tiled(emu.alloc(data), box=(16, 64)), (0, 0), data, body=text)
                    for text in (body, body.replace(old, "")))
    assert not clean.findings
    assert kind in kinds(dirty) if kind else kinds(dirty)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("mistake", ["", "slot", "parity"])
def test_pipeline(seed: int, stages: int, mistake: str) -> None:
    """A ring of stages over eight tiles: the consumer adds up each tile's words; `slot`: the producer does not
    wait until a slot is free, `parity`: the consumer forgets to flip."""
    emu = Emulator(seed=seed)
    array = counting((8 * 8, 32), np.uint32)
    out = emu.alloc(np.zeros(32 * 8, np.uint32))
    free = "" if mistake == "slot" else """
E: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r26], %r25;
  @!%p1 bra E;"""
    flip = "" if mistake == "parity" else "xor.b32 %r24, %r24, 1;"
    body = f"""
  mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r24, 0; mov.u32 %r25, 1;
  add.u32 %r22, %r2, 8192; add.u32 %r23, %r22, 256;
  @!%p0 bra INITIALISED;
I: mad.lo.u32 %r10, %r20, 8, %r22;
  mbarrier.init.shared::cta.b64 [%r10], 1;
  mbarrier.init.shared::cta.b64 [%r10+256], 32;
  add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, {stages}; @%p1 bra I;
  fence.mbarrier_init.release.cluster;
INITIALISED:
  bar.sync 0;
  mov.u32 %r20, 0;
  setp.lt.u32 %p3, %r0, 32; @%p3 bra CONSUMER;
  setp.ne.u32 %p3, %r0, 32; @%p3 bra END;
P: mad.lo.u32 %r10, %r21, 8, %r22; add.u32 %r26, %r10, 256;{free}
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 1024;
  mad.lo.u32 %r11, %r21, 1024, %r2; shl.b32 %r12, %r20, 3;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
       [%r11], [%d2, {{0, %r12}}], [%r10];
  add.u32 %r21, %r21, 1; setp.eq.u32 %p4, %r21, {stages};
  @%p4 mov.u32 %r21, 0; @%p4 xor.b32 %r25, %r25, 1;
  add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, 8; @%p1 bra P;
  bra END;
CONSUMER: mad.lo.u32 %r10, %r21, 8, %r22; add.u32 %r26, %r10, 256;
F: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r10], %r24;
  @!%p1 bra F;
  mad.lo.u32 %r11, %r21, 1024, %r2; mad.lo.u32 %r11, %r0, 32, %r11;
  mov.u32 %r13, 0; mov.u32 %r14, 0;
S: ld.shared.b32 %r12, [%r11]; add.u32 %r13, %r13, %r12; add.u32 %r11, %r11, 4;
  add.u32 %r14, %r14, 1; setp.lt.u32 %p1, %r14, 8; @%p1 bra S;
  mbarrier.arrive.shared::cta.b64 _, [%r26];
  mad.lo.u32 %r15, %r20, 32, %r0; mad.wide.u32 %d3, %r15, 4, %d1;
  st.global.b32 [%d3], %r13;
  add.u32 %r21, %r21, 1; setp.eq.u32 %p4, %r21, {stages};
  @!%p4 bra N;
  mov.u32 %r21, 0; {flip}
N: add.u32 %r20, %r20, 1; setp.lt.u32 %p1, %r20, 8; @%p1 bra CONSUMER;
END:
"""
    map_ = TensorMap.tiled(emu.alloc(array), box=(8, 32))
    report = emu.launch(kernel(body), grid=1, block=64, args=[map_, out, out])
    if mistake: assert kinds(report)
    else:
        assert not report.findings
        assert (out.numpy().reshape(8, 32) == array.reshape(8, 32, 8).sum(2)).all()


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
    map_ = TensorMap.tiled(emu.alloc(array), box=(8, 32), swizzle=mode)
    report = emu.launch(kernel(body), grid=2, block=32, cluster=(2, 1, 1), args=[map_, out, out])
    assert not report.findings
    assert (out.numpy() == swizzled(array.tobytes(), mode)).all()


# **** im2col ****

def columns(array: np.ndarray, at, lower, upper, pixels: int, channels: int, shift) -> np.ndarray:
    """What an im2col load brings, from a list of all base pixels."""
    spatial = [range(low, n + up) for low, up, n in zip(lower, upper, array.shape[1:-1], strict=True)]
    bases = [(n, *p) for n in range(-1, array.shape[0] + 4) for p in itertools.product(*spatial)]
    first = bases.index(tuple(at[:-1]))
    out = np.zeros((pixels, channels), array.dtype)
    for row, (n, *base) in enumerate(bases[first:first + pixels]):
        where = [b + s for b, s in zip(base, shift, strict=True)]
        if not all(0 <= x < size for x, size in zip((n, *where), array.shape[:-1], strict=True)): continue
        for c in range(channels):
            if 0 <= at[-1] + c < array.shape[-1]: out[row, c] = array[(n, *where, at[-1] + c)]
    return out


@pytest.mark.parametrize(("shape", "lower", "upper", "at", "shift"), [
    ((3, 9, 16), (-1,), (-1,), (0, -1, 0), (2,)),
    ((2, 6, 7, 16), (-1, -1), (-1, -1), (0, 3, -1, 0), (2, 0)),
    ((2, 6, 7, 16), (0, 0), (-2, -2), (1, 1, 2, 8), (1, 2)),
    ((2, 3, 4, 5, 8), (0, -1, -1), (0, -1, -1), (0, 1, 0, 2, 0), (0, 1, 2))])
def test_im2col(shape, lower, upper, at, shift) -> None:
    emu = Emulator()
    array = counting(shape, np.uint32)
    rank = len(shape)
    map_ = TensorMap.im2col(emu.alloc(array), lower=lower, upper=upper, channels=8, pixels=20)
    out = emu.alloc(np.zeros(640, np.uint8))
    text = load_text(at, 640).replace(".tile", ".im2col").replace(
        ", [%r4];", f", [%r4], {{{', '.join(map(str, shift[::-1]))}}};")
    body = INIT + text + WAIT + OUT.format(words=160)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out])
    assert not report.findings
    assert (out.numpy().view(np.uint32).reshape(20, 8) == columns(array, at, lower, upper, 20, 8, shift)).all()
    tiled = TensorMap.tiled(emu.alloc(array), box=(1,) * (rank - 1) + (8,))
    report = emu.launch(kernel(INIT + text + WAIT), grid=1, block=32, args=[tiled, out, out])
    assert "out-of-bounds" in kinds(report)


# **** maps made by the kernel ****

def replacing(map_: TensorMap) -> str:
    """Zeros, then every field of a map, as compilers write them."""
    word = int.from_bytes(map_.encode()[8:12], "little")
    lines = ["mov.u32 %r11, 0;", "mad.lo.u32 %r10, %r0, 4, %r5;", "st.shared.b32 [%r10], %r11;",
             "bar.warp.sync 0xffffffff;"]

    def field(name: str, value: object, form: str = "b32", ordinal: str = "") -> None:
        lines.append(f"@%p0 tensormap.replace.tile.{name}.shared::cta.b1024.{form} [%r5], {ordinal}{value};")

    lines.append(f"mov.b64 %d5, {map_.address};")
    field("global_address", "%d5", "b64")
    field("rank", map_.rank - 1)
    for i in range(map_.rank):
        lines.append(f"mov.b32 %r12, {map_.box[::-1][i]};")
        field("box_dim", "%r12", ordinal=f"{i}, ")
        field("global_dim", map_.dims[::-1][i], ordinal=f"{i}, ")
        field("element_stride", map_.element_strides[::-1][i], ordinal=f"{i}, ")
    for i, stride in enumerate(map_.strides[-2::-1]):
        lines.append(f"mov.b64 %d5, {stride};")
        field("global_stride", "%d5", "b64", f"{i}, ")
    for name, shift, mask in (("elemtype", 7, 15), ("interleave_layout", 11, 3), ("swizzle_mode", 13, 3),
                              ("fill_mode", 15, 1)):
        field(name, word >> shift & mask)
    return "\n".join(lines) + """
  bar.warp.sync 0xffffffff;
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d0], [%r5], 128;
  fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;
  bar.sync 0;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", PERIODS)
def test_map_made_by_the_kernel(seed: int, mode: str) -> None:
    emu = Emulator(seed=seed)
    array = counting((24, 48), np.uint16)
    wide = 16 if mode == "none" else int(mode[:-1]) // 2
    map_ = TensorMap.tiled(emu.alloc(array), box=(8, wide), swizzle=mode, dtype="f16", fill="nan")
    made, out = emu.alloc(np.zeros(128, np.uint8)), emu.alloc(np.zeros(16 * wide, np.uint8))
    body = INIT + replacing(map_) + load_text((4, 8), 16 * wide, map_="%d0") + WAIT + OUT.format(words=4 * wide)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, made, out])
    assert not report.findings
    assert made.numpy().tobytes() == map_.encode()
    inside = box_of(array, (4, 8), (8, wide), fill=0x7fff)
    assert (out.numpy() == swizzled(inside.tobytes(), mode)).all()


def test_large_strides() -> None:
    """The upper bits of a stride have a place of their own."""
    emu = Emulator()
    map_ = TensorMap.tiled(0x700000000, box=(1, 2, 4), dims=(3, 5, 1 << 31), strides=((5 << 36) + 16, 3 << 36),
                           dtype="u32")
    made = emu.alloc(np.zeros(128, np.uint8))
    report = emu.launch(kernel(replacing(map_)), grid=1, block=32, args=[map_, made, made])
    assert not report.findings
    assert made.numpy().tobytes() == map_.encode()


@pytest.mark.parametrize("fence", [True, False])
def test_made_map_needs_its_fence(fence: bool) -> None:
    emu = Emulator()
    array = counting((16, 32), np.uint16)
    map_ = TensorMap.tiled(emu.alloc(array), box=(16, 32))
    made = emu.alloc(np.zeros(128, np.uint8))
    body = INIT + replacing(map_) + load_text((0, 0), 1024, map_="%d0") + WAIT
    if not fence: body = body.replace("fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;", "")
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, made, made])
    assert kinds(report) == (set() if fence else {"proxy-fence"})


# **** hints, and what is not PTX ****

def test_prefetches() -> None:
    emu = Emulator()
    _, map_, out, _ = usual(emu)
    body = "  @%p0 prefetch.tensormap [%d2];\n  @%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d2, {0, 8}];\n"
    assert not emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out]).findings
    bad = body.replace("2d", "1d").replace("{0, 8}", "{0}")
    assert kinds(emu.launch(kernel(bad), grid=1, block=32, args=[map_, out, out])) == {"out-of-bounds"}


@pytest.mark.parametrize("text", [
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d2, {0}], [%r4];",
    "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r2], "
    "[%d2, {0, 0, 0}], [%r4];",
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r2], "
    "[%d2, {0, 0, 0, 0, 0}], [%r4];",
    "tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r5], 0, 1;",
    "tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r5], 5, 1;",
    "tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r5], 13;"])
def test_not_ptx(text: str) -> None:
    emu = Emulator()
    _, map_, out, _ = usual(emu)
    with pytest.raises(PTXError): emu.launch(kernel(text), grid=1, block=32, args=[map_, out, out])
