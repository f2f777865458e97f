"""What CUTLASS's kernels do with tiles: copies by a whole warp, tiles that are not aligned, no fence.

The PTX is ours; each test says what it is like.
"""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.ptx.emulator import Emulator, Finding, TensorMap

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"

# **** copies issued by a whole warp ****

STORE = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out) {
    .reg .pred %p; .reg .b32 %t, %a<5>; .reg .b64 %d<5>;
    mov.u32 %t, %tid.x; mov.u32 %a1, smem; mad.lo.u32 %a2, %t, 4, %a1;
    st.shared.u32 [%a2], %t;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ge.u32 %p, %t, 32; @%p bra END;
    mov.b64 %d1, map; cvta.param.u64 %d1, %d1; ld.param.u64 %d2, [out];
    COPY
    cp.async.bulk.commit_group;
    WAIT
END: ret;
}
"""
TENSOR = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, 0}], [%a1];"
PLAIN = "cp.async.bulk.global.shared::cta.bulk_group [%d2], [%a1], 256;"

def store(copy: str, wait: str, seed: int) -> tuple[np.ndarray, list[Finding], int]:
    """Runs `STORE`; what reached the target, findings, and bytes moved."""
    emu = Emulator(arch="sm_90a", seed=seed)
    out = emu.alloc(np.zeros((4, 16), np.uint32))
    text = HEAD + STORE.replace("COPY", copy).replace("WAIT", wait)
    report = emu.launch(text, 1, 64, [TensorMap.of_tiles(out, box=(4, 16)), out], dynamic_smem=256)
    return out.numpy().reshape(-1), list(report.findings), report.stats.asynchronous_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("copy", [TENSOR, PLAIN])
def test_a_store_by_all_lanes_is_one_store(copy: str, seed: int) -> None:
    """CUTLASS's epilogues store tiles from whole warps: 32 equal copies are no race, and one is moved."""
    for wait in ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"):
        out, findings, moved = store(copy, wait, seed)
        assert not findings
        assert moved == 256
        assert out.tolist() == list(range(64))


@pytest.mark.parametrize("copy", [TENSOR, PLAIN])
def test_a_warp_that_parted_is_whole_after_a_barrier(copy: str) -> None:
    """Thread 0 waits long for another block, as CUTLASS's stream-K does; the others have gone ahead to the
    barrier, but the store after it is one."""
    lone = """
    .reg .b32 %cta, %spin; mov.u32 %cta, %ctaid.x; setp.ne.u32 %p, %cta, 0; @%p bra OTHER;
    setp.ne.u32 %p, %t, 0; @%p bra TOGETHER;
SPIN: ld.acquire.gpu.u32 %spin, [%d2+512]; setp.eq.u32 %p, %spin, 0; @%p bra SPIN;
TOGETHER: bar.sync 1, 32;
    """ + copy + """
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; bra END;
OTHER: mov.u32 %spin, 0;
DELAY: add.u32 %spin, %spin, 1; setp.lt.u32 %p, %spin, 200000; @%p bra DELAY;
    setp.eq.u32 %p, %t, 0; @%p st.release.gpu.u32 [%d2+512], 1; bra END;
    """
    for seed in range(4):
        emu = Emulator(arch="sm_90a", seed=seed)
        out = emu.alloc(np.zeros(256, np.uint32))
        text = HEAD + STORE.replace("COPY", lone).replace("WAIT", "")
        tile = TensorMap.of_tiles(out, box=(4, 16), dims=(4, 16), strides=(64, 4))
        report = emu.launch(text, 2, 64, [tile, out], dynamic_smem=256)
        assert not report.findings
        assert report.stats.asynchronous_bytes == 256
        assert out.numpy()[:64].tolist() == list(range(64))


def test_stores_of_different_lanes_still_race() -> None:
    """Lanes that store different sources to one place."""
    copy = "and.b32 %a3, %t, 1; mad.lo.u32 %a1, %a3, 16, %a1;\n" + PLAIN.replace("256", "128")
    assert {f.kind for f in store(copy, "cp.async.bulk.wait_group 0;", 0)[1]} == {"async-hazard"}


def test_reductions_count_for_each_lane() -> None:
    """32 lanes add 32 times."""
    copy = ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d2], [%a1], 256;")
    out, findings, moved = store(copy, "cp.async.bulk.wait_group 0;", 0)
    assert not findings
    assert moved == 32 * 256
    assert out.tolist() == [32 * x for x in range(64)]


# **** tiles ****

# a product of 64 x 8 x 16 in bf16, B of ones; A from TILE, where FILL put it
PRODUCT = """
.extern .shared .align ALIGN .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 a, .param .u64 out) {
    .reg .pred %p; .reg .b16 %h; .reg .b32 %t, %w, %a<9>; .reg .b64 %d<9>; .reg .f32 %f<4>;
    mov.u32 %t, %tid.x; mov.u32 %w, smem; add.u32 %a1, %w, 8192;
    add.u32 %a2, %w, TILE;
    mov.b32 %a3, 0x3f803f80; mad.lo.u32 %a4, %t, 4, %a1;
    setp.lt.u32 %p, %t, 64; @%p st.shared.b32 [%a4], %a3;
    setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [%w], COUNT;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    FILL
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [%w], 0; @!%p bra WAIT;
    and.b32 %a5, %a2, 0x3ffff; shr.u32 %a5, %a5, 4; mov.b64 %d1, {%a5, HIGH};
    and.b32 %a6, %a1, 0x3ffff; shr.u32 %a6, %a6, 4; or.b32 %a6, %a6, 0x80000; mov.b64 %d2, {%a6, 16};
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d1, %d2, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %d3, [out]; mad.wide.u32 %d3, %t, 4, %d3;
    and.b32 %a7, %t, 3; setp.eq.u32 %p, %a7, 0;
    @%p st.global.f32 [%d3], %f0; @%p st.global.f32 [%d3+4], %f2;
    ret;
}
"""
# TMA, rows of 128 bytes of which 16 elements are multiplied
TENSOR_TILE = """
    setp.eq.u32 %p, %t, 0;
    mov.b64 %d1, map; cvta.param.u64 %d1, %d1;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%w], 8192;
    @%p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%a2], [%d1, {0, 0}], [%w];
"""
# cp.async, 16 bytes by each thread, in core matrices of 8 rows of 16 bytes
COPIED_TILE = """
    ld.param.u64 %d2, [a]; shr.u32 %a5, %t, 1; and.b32 %a6, %t, 1; mul.lo.u32 %a7, %a5, 128;
    mad.lo.u32 %a7, %a6, 16, %a7; cvt.u64.u32 %d3, %a7; add.u64 %d2, %d2, %d3;
    shr.u32 %a7, %a5, 3; shl.b32 %a7, %a7, 8; mad.lo.u32 %a7, %a6, 128, %a7;
    and.b32 %a5, %a5, 7; mad.lo.u32 %a7, %a5, 16, %a7; add.u32 %a7, %a7, %a2;
    cp.async.cg.shared.global [%a7], [%d2], 16;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w];
"""
STORED_TILE = COPIED_TILE.replace("cp.async.cg.shared.global [%a7], [%d2], 16;", """
    .reg .b32 %v<4>; ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%d2];
    st.shared.v4.b32 [%a7], {%v0, %v1, %v2, %v3};""").replace(
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w];", "mbarrier.arrive.shared::cta.b64 _, [%w];")


def rows_summed(fill: str, tile: int, align: int, seed: int) -> list[Finding]:
    """Runs `PRODUCT`, and compares the rows' sums with numpy's."""
    swizzled = fill == TENSOR_TILE
    emu = Emulator(arch="sm_90a", seed=seed)
    values = np.random.default_rng(seed).integers(-3, 4, (64, 64)).astype(np.float32)
    a = emu.alloc((values.view(np.uint32) >> 16).astype(np.uint16))  # bf16
    out = emu.alloc(np.zeros(129, np.float32))
    high = "0x40000040" if swizzled else "16"  # 128B swizzle, 8 rows after 1024 bytes; none, after 256
    text = PRODUCT.replace("ALIGN", str(align)).replace("TILE", str(tile)).replace("FILL", fill)
    text = text.replace("COUNT", "1" if swizzled else "128").replace("HIGH", high)
    leading = "" if swizzled else "or.b32 %a5, %a5, 0x80000;"
    text = text.replace("shr.u32 %a5, %a5, 4;", f"shr.u32 %a5, %a5, 4; {leading}")
    arguments = [TensorMap.of_tiles(a, box=(64, 64), swizzle="128B", dtype="bf16"), a, out]
    report = emu.launch(HEAD + text, 1, 128, arguments, dynamic_smem=20480)
    got = out.numpy()
    at = 32 * (np.arange(64) // 16) + 4 * (np.arange(64) % 8) + np.arange(64) // 8 % 2
    assert got[at].tolist() == values[:, :16].sum(1).tolist()
    return list(report.findings)


@pytest.mark.parametrize("seed", range(4))
def test_a_tile_in_the_midst_of_a_pattern(seed: int) -> None:
    """CUTLASS does not align dynamic shared memory; TMA and wgmma number rows by address, so they agree.
    Where the program asked for alignment it meant to have it."""
    assert not rows_summed(TENSOR_TILE, 9216 + 384, 16, seed)
    assert not rows_summed(TENSOR_TILE, 9216, 1024, seed)
    assert [f.kind for f in rows_summed(TENSOR_TILE, 9216 + 384, 1024, seed)] == ["misaligned"]


@pytest.mark.parametrize("seed", range(4))
def test_copies_that_arrive_at_an_mbarrier_need_no_fence(seed: int) -> None:
    """CUTLASS's cp.async mainloop goes from their arrival to wgmma; ordinary stores do need one."""
    assert not rows_summed(COPIED_TILE, 9216, 1024, seed)
    assert {f.kind for f in rows_summed(STORED_TILE, 9216, 1024, seed)} == {"proxy-fence"}


def test_a_fence_for_no_map() -> None:
    """CUTLASS's grouped kernels acquire a null map in warps that have none."""
    text = """
    .visible .entry k(.param .u64 out) {
        .reg .b64 %d; mov.u64 %d, 0;
        fence.proxy.tensormap::generic.acquire.gpu [%d], 128;
        ld.param.u64 %d, [out]; st.global.u32 [%d], 7; ret; }
    """
    emu = Emulator(arch="sm_90a")
    out = emu.alloc(np.zeros(1, np.uint32))
    assert not emu.launch(HEAD + text, 1, 1, [out]).findings
    assert out.numpy()[0] == 7
