"""The async proxy and ordinary accesses: buffers that change hands, tensor maps that change."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

from .block import bytes_of, integers, setup
from .template import BULK, kernel, wait

ROW = integers(128)

# a buffer of zeros, to which thread 0 loads the first half of a row
REFILL = kernel("refill", "d_in d_out", "line:512:128 barrier:8:8", f"""
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_out, %d_out, %d_at;
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_line; mov.u32 %r_zero, 0;
st.shared.b32 [%r_at], %r_zero;                        //: at=unfenced,fenced-before,fenced-apart,no-barrier
setp.ne.u32 %p_other, %r_thread, 0;
fence.proxy.async.shared::cta;                         //: cure=unfenced,fenced-before,fenced-apart
fence.proxy.async.global;                              //: bug=fenced-apart
@!%p_other mbarrier.init.shared::cta.b64 [barrier], 1;
bar.sync 0;                                            //: cure=no-barrier
@%p_other bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 256;
//: at=unfenced,fenced-before,fenced-apart,no-barrier
{BULK} [%r_line], [%d_in], 256, [barrier];
fence.proxy.async.shared::cta;                         //: bug=fenced-before
LOADED:
bar.sync 0;                                            //: bug=no-barrier
{wait("barrier", "0")}
ld.shared.b32 %r_x, [%r_at];
st.global.b32 [%d_out], %r_x;
""", {"unfenced": "proxy-fence", "fenced-before": "proxy-fence", "fenced-apart": "proxy-fence",
      "no-barrier": "async-hazard"}, setup(ROW, np.append(ROW[:64], np.zeros(64, np.int32))))


def tiles(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """A map of a row of 32 numbers, the same in memory, room for a changed one, and two rows to write."""
    source, out = emu.alloc(ROW[:64]), emu.alloc(256)
    of_out = TensorMap.of_tiles(out.ptr, box=(1, 32), dims=(1, 32), dtype="s32", swizzle="none")
    return [emu.alloc(np.frombuffer(of_out.encode(), np.uint8)), out, source], [(out, bytes_of(ROW[:64]))]


STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
REPLACE = "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [map]"
PUBLISH = ("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
           "[%d_map], [map], 128;")
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d_map], 128;"

# a warp loads two rows, and stores two, through one map whose address it changes
REPLACED = kernel("replaced", "d_map d_out d_in", "line:256:128 map:128:128 barrier:8:8", f"""
setp.ne.u32 %p_other, %r_thread, 0; mov.u32 %r_zero, 0; add.u32 %r_next, %r_line, 128;
shl.b32 %r_at, %r_thread, 2; cvt.u64.u32 %d_at, %r_at; add.s64 %d_x, %d_map, %d_at;
ld.global.b32 %r_x, [%d_x]; add.u32 %r_at, %r_at, %r_map; st.shared.b32 [%r_at], %r_x;
@!%p_other mbarrier.init.shared::cta.b64 [barrier], 1;
@!%p_other fence.mbarrier_init.release.cluster;
bar.warp.sync 0xffffffff;
{REPLACE}, %d_in; bar.warp.sync 0xffffffff; {PUBLISH} {ACQUIRE}
@!%p_other mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 128;
@!%p_other {LOAD} [%r_line], [%d_map, {{%r_zero, %r_zero}}], [barrier]; //: at=load-under-way
add.s64 %d_in, %d_in, 128;
{wait("barrier", "0")}                                 //: cure=load-under-way
{REPLACE}, %d_in; bar.warp.sync 0xffffffff;
{PUBLISH}                                              //: at=load-under-way
{ACQUIRE}
{wait("barrier", "0")}                                 //: bug=load-under-way
@!%p_other mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 128;
@!%p_other {LOAD} [%r_next], [%d_map, {{%r_zero, %r_zero}}], [barrier];
{wait("barrier", "1")}
{REPLACE}, %d_out; bar.warp.sync 0xffffffff; {PUBLISH} {ACQUIRE}
@!%p_other {STORE} [%d_map, {{%r_zero, %r_zero}}], [%r_line]; //: at=under-way,waits-later,overwritten
@!%p_other cp.async.bulk.commit_group;
add.s64 %d_out, %d_out, 128;
@!%p_other cp.async.bulk.wait_group.read 0;            //: cure=under-way,waits-later,overwritten
@!%p_other cp.async.bulk.wait_group.read 1;            //: bug=under-way
@!%p_other st.global.b64 [%d_map], %d_out;             //: bug=overwritten at=overwritten
bar.warp.sync 0xffffffff;
{REPLACE}, %d_out; bar.warp.sync 0xffffffff;
{PUBLISH}                                              //: at=under-way,waits-later
@!%p_other cp.async.bulk.wait_group.read 0;            //: bug=waits-later
{ACQUIRE}
@!%p_other {STORE} [%d_map, {{%r_zero, %r_zero}}], [%r_next];
@!%p_other cp.async.bulk.commit_group;
@!%p_other cp.async.bulk.wait_group 0;
""", {"load-under-way": "async-hazard", "under-way": "async-hazard", "waits-later": "async-hazard",
      "overwritten": "async-hazard"}, tiles, block=32)

KERNELS = [REFILL, REPLACED]
