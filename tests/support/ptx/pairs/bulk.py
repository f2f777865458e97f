"""Bulk and tensor copies by one thread: out of shared memory, into it, and through global memory."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

from .block import bytes_of, integers, setup
from .template import BULK, kernel, wait

TILES = 5
VALUES = integers(TILES, 32, 32)


def tiles(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """Tiles of 32 x 32, one below the other, and a map to write them thrice as large."""
    out = emu.alloc(VALUES.nbytes)
    out_map = TensorMap.of_tiles(out.ptr, box=(32, 32), dims=(32 * TILES, 32), dtype="s32", swizzle="none")
    return [emu.alloc(VALUES), out_map], [(out, bytes_of(3 * VALUES))]


# an epilogue: each tile goes through one of two buffers; thread t has 8 values of row t / 4
EPILOGUE = kernel("epilogue", "d_in map_out", "buffers:8192:128", f"""
shl.b32 %r_at, %r_thread, 5; cvt.u64.u32 %d_at, %r_at; add.s64 %d_from, %d_in, %d_at;
setp.ne.u32 %p_other, %r_thread, 0;
mov.u32 %r_turn, 0; mov.u32 %r_zero, 0;
TILE:
@!%p_other cp.async.bulk.wait_group.read 1;            //: cure=source-overwritten,read-two
@!%p_other cp.async.bulk.wait_group.read 2;            //: bug=read-two
bar.sync 0;                                            //: cure=no-barrier-before
and.b32 %r_x, %r_turn, 1; shl.b32 %r_x, %r_x, 12; add.u32 %r_buffer, %r_x, %r_buffers;
add.u32 %r_buffer, %r_buffer, 64;                      //: bug=misaligned
add.u32 %r_to, %r_buffer, %r_at;
ld.global.v4.b32 {{%r_a, %r_b, %r_c, %r_d}}, [%d_from];
ld.global.v4.b32 {{%r_e, %r_f, %r_g, %r_h}}, [%d_from+16];
{" ".join(f"mul.lo.s32 %r_{x}, %r_{x}, 3;" for x in "abcdefgh")}
//: at=source-overwritten,read-two,no-barrier-before,no-proxy-fence,no-barrier-after,uncommitted
st.shared.v4.b32 [%r_to], {{%r_a, %r_b, %r_c, %r_d}};
st.shared.v4.b32 [%r_to+16], {{%r_e, %r_f, %r_g, %r_h}}; //: cure=half-written
fence.proxy.async.shared::cta;                         //: cure=no-proxy-fence
bar.sync 0;                                            //: cure=no-barrier-after
shl.b32 %r_y, %r_turn, 5;
//: at=source-overwritten,read-two,no-barrier-before,no-proxy-fence,no-barrier-after,uncommitted
//: at=misaligned,half-written
@!%p_other cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d_map_out, {{%r_zero, %r_y}}], [%r_buffer];
@!%p_other cp.async.bulk.commit_group;                 //: cure=uncommitted
add.s64 %d_from, %d_from, 4096;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TILES};
@%p_more bra TILE;
@!%p_other cp.async.bulk.wait_group.read 0;
""", {"source-overwritten": "async-hazard", "read-two": "async-hazard", "no-barrier-before": "async-hazard",
      "no-proxy-fence": "proxy-fence", "no-barrier-after": "async-hazard",
      "uncommitted": "async-hazard", "misaligned": "misaligned", "half-written": "uninitialized"}, tiles)

ROW = integers(256)


def with_scratch(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """A row, an output, and memory for it to go through."""
    arguments, outputs = setup(ROW, 2 * ROW + 2)(emu)
    return [*arguments, emu.alloc(1024), emu.alloc(1024)], outputs


# through global memory and back: thread writes, bulk copy in, bulk copy out, thread reads
ROUND = kernel("round", "d_in d_out d_there d_back", "line:1024:128 other:1024:128 barrier:8:8", f"""
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_in, %d_in, %d_at;
ld.global.b32 %r_x, [%d_in];
add.s64 %d_to, %d_there, %d_at;
st.global.b32 [%d_to], %r_x;                           //: at=global-unfenced,global-no-barrier
fence.proxy.async.global;                              //: cure=global-unfenced
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mbarrier.init.shared::cta.b64 [barrier], 1;            //: cure=uninitialised
READY:
bar.sync 0;                                            //: cure=global-no-barrier
mov.u32 %r_bytes, 1024;                                //: cure=size-odd,size-past-end,shared-past-end
mov.u32 %r_bytes, 1020;                                //: bug=size-odd
mov.u32 %r_bytes, 1040;                                //: bug=size-past-end
add.u32 %r_line, %r_line, 1536;                        //: bug=shared-past-end
mov.u32 %r_bytes, 1024;                                //: bug=shared-past-end
@%p_other bra IN;
//: cure=expect-without-arrive
//: at=uninitialised
mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], %r_bytes;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barrier], %r_bytes; //: bug=expect-without-arrive
//: at=global-unfenced,global-no-barrier,size-odd,size-past-end,shared-past-end,unawaited,two-into-one
//: at=uninitialised
{BULK} [%r_line], [%d_there], %r_bytes, [barrier];
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [barrier], %r_bytes; //: bug=two-into-one
{BULK} [%r_line], [%d_there], %r_bytes, [barrier]; //: bug=two-into-one at=two-into-one
IN:
{wait("barrier", "0")}                                 //: cure=unawaited at=expect-without-arrive
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_line;
ld.shared.b32 %r_x, [%r_at];                           //: at=unawaited,refilled
add.s32 %r_x, %r_x, 1;
bar.sync 0;                                            //: bug=refilled
@!%p_other mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 1024; //: bug=refilled
@!%p_other {BULK} [%r_line], [%d_there], 1024, [barrier]; //: bug=refilled at=refilled
shl.b32 %r_to, %r_thread, 2; add.u32 %r_to, %r_to, %r_other;
st.shared.b32 [%r_to], %r_x;
ld.shared.b32 %r_y, [%r_at];                           //: bug=refilled at=refilled
fence.proxy.async.shared::cta;
bar.sync 0;
@%p_other bra OUT;
cp.async.bulk.global.shared::cta.bulk_group [%d_back], [%r_other], 1024; //: at=read-wait-only,no-wait-at-all
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;                            //: cure=read-wait-only,no-wait-at-all
cp.async.bulk.wait_group.read 0;                       //: bug=read-wait-only
OUT:
bar.sync 0;
add.s64 %d_x, %d_back, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_y, [%d_x];                            //: at=read-wait-only,no-wait-at-all
add.s32 %r_y, %r_y, %r_x;
st.global.b32 [%d_out], %r_y;
""", {"global-unfenced": "proxy-fence", "global-no-barrier": "async-hazard|proxy-fence|race",
      "size-odd": "misaligned",
      "size-past-end": "out-of-bounds", "shared-past-end": "out-of-bounds",
      "unawaited": "async-hazard",
      "two-into-one": "async-hazard", "uninitialised": "barrier", "expect-without-arrive": "deadlock",
      "refilled": "async-hazard", "read-wait-only": "async-hazard", "no-wait-at-all": "async-hazard"},
               with_scratch, block=256)


KERNELS = [EPILOGUE, ROUND]
