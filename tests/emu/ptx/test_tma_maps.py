"""Tensor copies that go wrong, a pipeline of them, and maps edited by a kernel."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.tma_case import (
    DONE,
    FENCE,
    IN,
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
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap

# **** mistakes ****

def usual(emu: Emulator, **more):
    """An array, its map and the text that loads 16 rows of 64."""
    array = counting((16, 64), np.uint16)
    out = emu.alloc(np.zeros(2048, np.uint8))
    return array, TensorMap.of_tiles(emu.alloc(array), box=(16, 64), **more), out, (
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
    map_ = TensorMap.of_tiles(emu.alloc(array).ptr, box=(16, 64), dims=(17, 64), dtype="u16")
    report, _ = load(emu, map_, (0, 0), 2048)
    assert not report.findings
    report, _ = load(emu, map_, (1, 0), 2048)
    assert "out-of-bounds" in kinds(report)


@pytest.mark.parametrize(("old", "kind"), [("fence.proxy.async.shared::cta;", "proxy-fence"),
                                           (DONE, None), (FENCE, None)])
def test_store_mistakes(old: str, kind: str | None) -> None:
    emu = Emulator()
    data = counting((16, 64), np.uint16)
    body = IN.format(words=512) + FENCE + (
        "@%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {0, 0}], [%r2];\n") + DONE
    clean, dirty = (store(emu, TensorMap.of_tiles(emu.alloc(data), box=(16, 64)), (0, 0), data, body=text)
                    for text in (body, body.replace(old, "")))
    assert not clean.findings
    if old == DONE: assert ["wait_group.read" in note.message for note in dirty.notes] == [True]
    else: assert kind in kinds(dirty) if kind else kinds(dirty)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("mistake", ["", "slot", "parity"])
def test_pipeline(seed: int, stages: int, mistake: str) -> None:
    """A ring of stages over eight tiles: the consumer adds up each tile's words; `slot`: the producer does
    not wait until a slot is free, `parity`: the consumer forgets to flip."""
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
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(8, 32))
    report = emu.launch(kernel(body), grid=1, block=64, args=[map_, out, out])
    if mistake: assert kinds(report)
    else:
        assert not report.findings
        assert (out.numpy().reshape(8, 32) == array.reshape(8, 32, 8).sum(2)).all()


# **** maps made by the kernel ****

def replacing(map_: TensorMap) -> str:
    """Zeros, then every field of a map, as compilers write them. The address is the first word of the map
    that is given: a launch of the same text elsewhere finds its own."""
    word = int.from_bytes(map_.encode()[8:12], "little")
    lines = ["mov.u32 %r11, 0;", "mad.lo.u32 %r10, %r0, 4, %r5;", "st.shared.b32 [%r10], %r11;",
             "bar.warp.sync 0xffffffff;"]

    def field(name: str, value: object, form: str = "b32", ordinal: str = "") -> None:
        lines.append(f"@%p0 tensormap.replace.tile.{name}.shared::cta.b1024.{form} [%r5], {ordinal}{value};")

    lines.append("ld.param.b64 %d5, [map];")
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
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(8, wide), swizzle=mode, dtype="f16", fill="nan")
    made, out = emu.alloc(np.zeros(128, np.uint8)), emu.alloc(np.zeros(16 * wide, np.uint8))
    body = INIT + replacing(map_) + load_text((4, 8), 16 * wide, map_="%d0") + WAIT
    body += OUT.format(words=4 * wide)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, made, out])
    assert not report.findings
    assert made.numpy().tobytes() == map_.encode()
    inside = box_of(array, (4, 8), (8, wide), fill=0x7ff7)
    assert (out.numpy() == swizzled(inside.tobytes(), mode)).all()


def test_large_strides() -> None:
    """The upper bits of a stride have a place of their own."""
    emu = Emulator()
    strides = (11 << 36) + 16, 13 << 36
    map_ = TensorMap.of_tiles(0x700000000, box=(1, 2, 4), dims=(3, 5, 1 << 31), strides=strides, dtype="u32")
    made = emu.alloc(np.zeros(128, np.uint8))
    report = emu.launch(kernel(replacing(map_)), grid=1, block=32, args=[map_, made, made])
    assert not report.findings
    assert made.numpy().tobytes() == map_.encode()


@pytest.mark.parametrize("fence", [True, False])
def test_made_map_needs_its_fence(fence: bool) -> None:
    emu = Emulator()
    array = counting((16, 32), np.uint16)
    map_ = TensorMap.of_tiles(emu.alloc(array), box=(16, 32))
    made = emu.alloc(np.zeros(128, np.uint8))
    body = INIT + replacing(map_) + load_text((0, 0), 1024, map_="%d0") + WAIT
    if not fence: body = body.replace("fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;", "")
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, made, made])
    assert kinds(report) == (set() if fence else {"proxy-fence"})


# **** hints, and what is not PTX ****

def test_prefetches() -> None:
    emu = Emulator()
    _, map_, out, _ = usual(emu)
    body = ("  @%p0 prefetch.tensormap [%d2];\n"
            "  @%p0 cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d2, {0, 8}];\n")
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
