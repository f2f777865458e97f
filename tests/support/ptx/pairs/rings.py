"""A warp-specialised matmul: TMA fills a ring of three stages, wgmma empties it.

Warpgroup 0 loads, warpgroup 1 multiplies. Stage s has an mbarrier `full` (its bytes) and one `empty` (four
warps have done with it). One wgmma group stays in flight, so a stage is given back one turn after it was
read.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

from .template import TENSOR, arrive, kernel, registers, wait

STAGES, TURNS, COLUMNS = 3, 14, 32
A_BYTES, B_BYTES = 64 * 128, COLUMNS * 128


def product(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """A [64, 512] and B [32, 512] of small integers in f16, and their product in f32."""
    random = np.random.default_rng(1)
    a = random.integers(-3, 4, (64, 64 * TURNS)).astype(np.float16)
    b = random.integers(-3, 4, (COLUMNS, 64 * TURNS)).astype(np.float16)
    out = emu.alloc(4 * 64 * COLUMNS)
    maps = [TensorMap.of_tiles(emu.alloc(x), box=(len(x), 64), swizzle="128B") for x in (a, b)]
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    return [*maps, out], [(out, expected.reshape(-1).view(np.uint8))]


def wgmma(step: int) -> str:
    """One product of 64 x 32 x 16, `step` of four along the 128 bytes of a row."""
    return (f"add.s64 %d_x, %d_a, {2 * step}; add.s64 %d_y, %d_b, {2 * step}; "
            f"wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {{{registers('f_c', 16)}}}, %d_x, %d_y, "
            "1, 1, 1, 0, 0;")


CLEAR = " ".join(f"mov.f32 %f_c{i}, 0f00000000;" for i in range(16))

# the fragment's rows 16 warp + lane / 4 and 8 below, columns 2 (lane % 4) and every 8th pair from there
STORE = "\n".join([
    "and.b32 %r_row, %r_warp, 3; shl.b32 %r_row, %r_row, 4; shr.u32 %r_x, %r_lane, 2;",
    "add.u32 %r_row, %r_row, %r_x;",
    "and.b32 %r_x, %r_lane, 3; shl.b32 %r_x, %r_x, 3; mad.lo.u32 %r_x, %r_row, 128, %r_x;",
    "cvt.u64.u32 %d_x, %r_x; add.s64 %d_x, %d_out, %d_x;",
    *(f"st.global.v2.f32 [%d_x+{32 * (i // 4) + 1024 * (i // 2 % 2)}], {{%f_c{i}, %f_c{i + 1}}};"
      for i in range(0, 16, 2))])

BODY = f"""
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mbarrier.init.shared::cta.b64 [barriers], 1; mbarrier.init.shared::cta.b64 [barriers+8], 1;
mbarrier.init.shared::cta.b64 [barriers+16], 1;
mov.u32 %r_x, 4;                                       //: cure=release-count-many,release-count-few
mov.u32 %r_x, 5;                                       //: bug=release-count-many
mov.u32 %r_x, 3;                                       //: bug=release-count-few
mbarrier.init.shared::cta.b64 [barriers+24], %r_x; mbarrier.init.shared::cta.b64 [barriers+32], %r_x;
mbarrier.init.shared::cta.b64 [barriers+40], %r_x;     //: cure=init-missing
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;                                            //: cure=init-unseen
setp.ge.u32 %p_consumer, %r_warp, 4;
@%p_consumer bra CONSUMER;

// the producer: one thread
setmaxnreg.dec.sync.aligned.u32 40;                    //: cure=registers-kept
@%p_other bra END;
mov.u32 %r_turn, 0; mov.u32 %r_slot, 0;
mov.u32 %r_parity, 1;                                  //: cure=producer-parity
mov.u32 %r_parity, 0;                                  //: bug=producer-parity
LOAD:
shl.b32 %r_x, %r_slot, 3; add.u32 %r_full, %r_x, %r_barriers;
setp.eq.u32 %p_skip, %r_turn, {STAGES};                //: bug=producer-skips
@%p_skip bra FILL;                                     //: bug=producer-skips
//: cure=empty-unawaited
//: at=producer-parity,release-count-many,release-missing,init-missing
{wait("%r_full+24", "%r_parity")}
FILL:
mad.lo.u32 %r_a, %r_slot, {A_BYTES}, %r_tiles_a; mad.lo.u32 %r_b, %r_slot, {B_BYTES}, %r_tiles_b;
add.u32 %r_b, %r_a, 0;                                 //: bug=same-slot
add.u32 %r_b, %r_b, 64;                                //: bug=tile-misaligned
shl.b32 %r_x, %r_turn, 6;
mov.u32 %r_bytes, {A_BYTES + B_BYTES};                 //: cure=bytes-many,bytes-few
mov.u32 %r_bytes, {A_BYTES + B_BYTES + 16};            //: bug=bytes-many
mov.u32 %r_bytes, {A_BYTES};                           //: bug=bytes-few
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_full], %r_bytes; //: cure=bytes-none at=empty-unawaited
{arrive("%r_full")}                                    //: bug=bytes-none
//: at=full-unawaited,release-early,producer-skips,same-slot,empty-unawaited,consumer-parity,try-once
//: at=bytes-few,bytes-none,init-missing,init-unseen
{TENSOR} [%r_a], [%d_map_a, {{%r_x, 0}}], [%r_full];
//: at=full-unawaited,same-slot,tile-misaligned,bytes-few,bytes-none
{TENSOR} [%r_b], [%d_map_b, {{%r_x, 0}}], [%r_full];
add.u32 %r_slot, %r_slot, 1;
setp.eq.u32 %p_wrap, %r_slot, {STAGES};
@%p_wrap mov.u32 %r_slot, 0;
@%p_wrap xor.b32 %r_parity, %r_parity, 1;              //: cure=producer-never-flips
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra LOAD;
bra END;

// the consumers
CONSUMER:
setmaxnreg.inc.sync.aligned.u32 216;                   //: at=registers-kept
{CLEAR}
mov.u32 %r_turn, 0; mov.u32 %r_slot, 0;
mov.u32 %r_parity, 0;                                  //: cure=consumer-parity
mov.u32 %r_parity, 1;                                  //: bug=consumer-parity
mov.u32 %r_last, 0;
MULTIPLY:
shl.b32 %r_x, %r_slot, 3; add.u32 %r_full, %r_x, %r_barriers;
//: cure=full-unawaited,try-once
//: at=bytes-many,producer-never-flips,bytes-few,bytes-none,init-unseen,release-missing
{wait("%r_full", "%r_parity")}
mbarrier.try_wait.parity.shared::cta.b64 %p_done, [%r_full], %r_parity; //: bug=try-once
mad.lo.u32 %r_a, %r_slot, {A_BYTES}, %r_tiles_a; mad.lo.u32 %r_b, %r_slot, {B_BYTES}, %r_tiles_b;
add.u32 %r_a, %r_a, 512;                               //: bug=descriptor-misaligned
add.u32 %r_b, %r_b, 0x38000;                           //: bug=descriptor-outside
shr.u32 %r_a, %r_a, 4; and.b32 %r_a, %r_a, 0x3fff; shr.u32 %r_b, %r_b, 4; and.b32 %r_b, %r_b, 0x3fff;
cvt.u64.u32 %d_a, %r_a; or.b64 %d_a, %d_a, 0x4000004000010000;
cvt.u64.u32 %d_b, %r_b; or.b64 %d_b, %d_b, 0x4000004000010000;
wgmma.fence.sync.aligned;                              //: cure=no-wgmma-fence
//: at=full-unawaited,release-early,empty-unawaited,no-wgmma-fence,descriptor-misaligned,descriptor-outside
//: at=consumer-parity,try-once,same-slot
{wgmma(0)}
{wgmma(1)}
{wgmma(2)}
{wgmma(3)}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 1;
setp.eq.u32 %p_free, %r_turn, 0;                       //: cure=release-early
setp.ne.u32 %p_free, %r_lane, 0;                       //: bug=release-early
mov.u32 %r_last, %r_full;                              //: bug=release-early
setp.ne.or.u32 %p_free, %r_lane, 0, %p_free;
//: cure=release-missing
//: at=init-missing,init-unseen,release-count-few
@!%p_free mbarrier.arrive.shared::cta.b64 _, [%r_last+24];
mov.u32 %r_last, %r_full;
add.u32 %r_slot, %r_slot, 1;
setp.eq.u32 %p_wrap, %r_slot, {STAGES};
@%p_wrap mov.u32 %r_slot, 0;
@%p_wrap xor.b32 %r_parity, %r_parity, 1;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra MULTIPLY;
wgmma.wait_group.sync.aligned 0;                       //: cure=read-in-flight
{STORE}
END:
"""

RING = kernel(
    "ring", "map_a map_b d_out",
    f"tiles_a:{STAGES * A_BYTES}:1024 tiles_b:{STAGES * B_BYTES}:1024 barriers:48:8", BODY, {
        "full-unawaited": "wgmma-hazard",
        "consumer-parity": "wgmma-hazard|async-hazard",
        "try-once": "wgmma-hazard",
        "producer-parity": "deadlock",
        "producer-never-flips": "wgmma-hazard|async-hazard|deadlock",
        "producer-skips": "wgmma-hazard|async-hazard",
        "empty-unawaited": "wgmma-hazard|async-hazard|barrier",
        "release-early": "wgmma-hazard",
        "release-missing": "deadlock",
        "release-count-many": "deadlock",
        "release-count-few": "barrier",
        "bytes-many": "deadlock",
        "bytes-few": "async-hazard|deadlock",
        "bytes-none": "async-hazard|wgmma-hazard",
        "same-slot": "async-hazard",
        "tile-misaligned": "misaligned",
        "descriptor-misaligned": "misaligned",
        "descriptor-outside": "out-of-bounds",
        "no-wgmma-fence": "wgmma-hazard",
        "read-in-flight": "wgmma-hazard",
        "init-missing": "barrier",
        "init-unseen": "race|barrier",
        "registers-kept": "deadlock",
    }, product, block=256, directives=".maxnreg 128", refused="no-wgmma-fence read-in-flight")

KERNELS = [RING]
