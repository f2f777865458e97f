"""Threads of one CTA with ordinary memory: reductions, double buffers, named barriers, warps, bounds."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator

from .template import Setup, kernel


def integers(*shape: int, seed: int = 1) -> np.ndarray:
    """Small random integers in 32 bits."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.int32)


def bytes_of(x: np.ndarray) -> np.ndarray: return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def setup(source: np.ndarray, result: np.ndarray, *more: object) -> Setup:
    """Arguments: the source, an output nothing has been written to, and more."""
    def make(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
        out = emu.alloc(result.nbytes)
        return [emu.alloc(source), out, *more], [(out, bytes_of(result))]
    return make


# **** a tree in shared memory ****

VALUES = integers(256)
TREE = kernel("tree", "d_in d_out", "sums:1024:16", """
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_x, %d_in, %d_at;
ld.global.b32 %r_x, [%d_x];
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_sums;
setp.gt.u32 %p_last, %r_thread, 250;                   //: bug=unwritten
@!%p_last st.shared.b32 [%r_at], %r_x;                 //: bug=unwritten
st.shared.b32 [%r_at], %r_x;                           //: cure=unwritten at=no-first-barrier
bar.sync 0;                                            //: cure=no-first-barrier
mov.u32 %r_step, 128;
FOLD:
setp.ge.u32 %p_idle, %r_thread, %r_step;
@%p_idle bra FOLDED;
shl.b32 %r_y, %r_step, 2; add.u32 %r_y, %r_y, %r_at;
add.u32 %r_y, %r_y, 4;                                 //: bug=past-end
ld.shared.b32 %r_x, [%r_at];
//: at=no-first-barrier,no-fold-barrier,unwritten,past-end
ld.shared.b32 %r_y, [%r_y];
add.s32 %r_x, %r_x, %r_y;
st.shared.b32 [%r_at], %r_x;                           //: at=no-fold-barrier
bar.sync 0;                                            //: bug=divergent-barrier at=divergent-barrier
FOLDED:
bar.sync 0;                                            //: cure=no-fold-barrier,divergent-barrier
shr.u32 %r_step, %r_step, 1;
setp.ne.u32 %p_more, %r_step, 0;
@%p_more bra FOLD;
setp.ne.u32 %p_other, %r_thread, 0;
@!%p_other st.global.b32 [%d_out], %r_x;
""", {"no-first-barrier": "race", "no-fold-barrier": "race", "unwritten": "uninitialized",
      "past-end": "out-of-bounds|uninitialized", "divergent-barrier": "barrier|race|deadlock"},
              setup(VALUES, np.array(VALUES.sum(), np.int32)), block=256)

# **** two buffers, four values a thread ****

ROWS = integers(8, 512)
# in each turn every thread reads its neighbour's four values
DOUBLE = kernel("double", "d_in d_out", "buffers:4096:16", """
mul.wide.u32 %d_at, %r_thread, 16; add.s64 %d_x, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
shl.b32 %r_at, %r_thread, 4;
add.u32 %r_at, %r_at, 8;                               //: bug=store-misaligned
add.s64 %d_x, %d_x, 4;                                 //: bug=load-misaligned
xor.b32 %r_near, %r_thread, 127; shl.b32 %r_near, %r_near, 4;
mov.u32 %r_s0, 0; mov.u32 %r_s1, 0; mov.u32 %r_s2, 0; mov.u32 %r_s3, 0;
mov.u32 %r_turn, 0;
NEXT_ROW:
and.b32 %r_half, %r_turn, 1;                           //: cure=one-buffer
mov.u32 %r_half, 0;                                    //: bug=one-buffer
shl.b32 %r_half, %r_half, 11; add.u32 %r_half, %r_half, %r_buffers;
ld.global.v4.b32 {%r_a, %r_b, %r_c, %r_d}, [%d_x];     //: at=load-misaligned
add.u32 %r_to, %r_half, %r_at;
st.shared.v4.b32 [%r_to], {%r_a, %r_b, %r_c, %r_d};    //: at=one-buffer,store-misaligned,no-barrier
bar.sync 0;                                            //: cure=no-barrier
add.u32 %r_from, %r_half, %r_near;
ld.shared.v4.b32 {%r_a, %r_b, %r_c, %r_d}, [%r_from];  //: at=one-buffer,no-barrier
add.s32 %r_s0, %r_s0, %r_a; add.s32 %r_s1, %r_s1, %r_b; add.s32 %r_s2, %r_s2, %r_c;
add.s32 %r_s3, %r_s3, %r_d;
add.s64 %d_x, %d_x, 2048;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, 8;
@%p_more bra NEXT_ROW;
st.global.v4.b32 [%d_out], {%r_s0, %r_s1, %r_s2, %r_s3};
""", {"one-buffer": "race", "no-barrier": "race", "store-misaligned": "misaligned",
      "load-misaligned": "misaligned"}, setup(ROWS, ROWS.sum(0, np.int32).reshape(128, 4)[::-1]))

# **** named barriers: warps 0 and 1 give, warps 2 and 3 take ****

GIVE_TAKE = integers(6, 64)
NAMED = kernel("named", "d_in d_out", "buffers:512:16", """
and.b32 %r_at, %r_thread, 63; mul.wide.u32 %d_at, %r_at, 4; shl.b32 %r_at, %r_at, 2;
add.s64 %d_x, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
mov.u32 %r_turn, 0; mov.u32 %r_sum, 0;
setp.ge.u32 %p_taker, %r_thread, 64;
@%p_taker bra TAKE;
GIVE:
and.b32 %r_half, %r_turn, 1; add.u32 %r_full, %r_half, 1; add.u32 %r_empty, %r_half, 3;
shl.b32 %r_half, %r_half, 8; add.u32 %r_to, %r_half, %r_buffers; add.u32 %r_to, %r_to, %r_at;
ld.global.b32 %r_x, [%d_x];
setp.lt.u32 %p_early, %r_turn, 2;
@%p_early bra GIVEN;
//: cure=empty-unawaited,wrong-id
//: at=taker-silent,full-64,empty-160
bar.sync %r_empty, 128;
bar.sync %r_full, 128;                                 //: bug=wrong-id at=wrong-id
GIVEN:
st.shared.b32 [%r_to], %r_x;                           //: at=empty-unawaited,full-unawaited,wrong-id
bar.arrive %r_full, 128;                               //: cure=count-differs
bar.arrive %r_full, 96;                                //: bug=count-differs at=count-differs
add.s64 %d_x, %d_x, 256;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, 6;
@%p_more bra GIVE;
bra END;
TAKE:
and.b32 %r_half, %r_turn, 1; add.u32 %r_full, %r_half, 1; add.u32 %r_empty, %r_half, 3;
shl.b32 %r_half, %r_half, 8; add.u32 %r_from, %r_half, %r_buffers; add.u32 %r_from, %r_from, %r_at;
bar.sync %r_full, 128;                                 //: cure=full-unawaited at=count-differs,wrong-id
ld.shared.b32 %r_x, [%r_from];                         //: at=empty-unawaited,full-unawaited,wrong-id
add.s32 %r_sum, %r_sum, %r_x;
setp.ge.u32 %p_late, %r_turn, 4;
@!%p_late bar.arrive %r_empty, 128;                    //: cure=taker-silent
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, 6;
@%p_more bra TAKE;
st.global.b32 [%d_out], %r_sum;
END:
""", {"empty-unawaited": "race", "full-unawaited": "race", "wrong-id": "deadlock|barrier|race",
      "count-differs": "barrier", "taker-silent": "deadlock"}, setup(GIVE_TAKE, GIVE_TAKE.sum(0, np.int32)))

# **** lanes of a warp ****

LANES = integers(32)
# scan through shared memory: each lane adds the value `step` lanes below, then all lanes agree on the last
WARP = kernel("warp", "d_in d_out", "line:128:16", """
mul.wide.u32 %d_at, %r_lane, 4; add.s64 %d_x, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_x, [%d_x];
shl.b32 %r_at, %r_lane, 2; add.u32 %r_at, %r_at, %r_line;
mov.u32 %r_step, 1;
SCAN:
st.shared.b32 [%r_at], %r_x;                           //: at=no-warp-sync,no-second-sync
bar.warp.sync 0xffffffff;                              //: cure=no-warp-sync
setp.lt.u32 %p_low, %r_lane, %r_step;
shl.b32 %r_y, %r_step, 2; sub.u32 %r_y, %r_at, %r_y;
@!%p_low ld.shared.b32 %r_y, [%r_y];                   //: at=no-warp-sync,no-second-sync
@!%p_low add.s32 %r_x, %r_x, %r_y;
bar.warp.sync 0xffffffff;                              //: cure=no-second-sync
shl.b32 %r_step, %r_step, 1;
setp.lt.u32 %p_more, %r_step, 32;
@%p_more bra SCAN;
setp.ge.u32 %p_high, %r_lane, 16;                      //: bug=lanes-missing
@%p_high bra SUBTRACT;                                 //: bug=lanes-missing
shfl.sync.idx.b32 %r_y, %r_x, 31, 31, 0xffffffff;      //: at=lanes-missing
sub.s32 %r_x, %r_y, %r_x;
SUBTRACT:
bar.sync 0;
st.global.b32 [%d_out], %r_x;
""", {"no-warp-sync": "race", "no-second-sync": "race", "lanes-missing": "barrier|deadlock"},
              setup(LANES, LANES.sum(dtype=np.int32) - np.cumsum(LANES, dtype=np.int32)), block=32)

# **** memory that is not there ****

TABLE = integers(64)
LOCAL = kernel("depot", "d_in d_out", "", """
.local .align 16 .b8 stack[32];
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_x, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_x, [%d_x];
mov.u32 %r_i, 0; mov.u32 %r_sum, 0;
PUSH:
shl.b32 %r_at, %r_i, 2; mov.u32 %r_y, stack; add.u32 %r_at, %r_at, %r_y;
add.s32 %r_y, %r_x, %r_i; st.local.b32 [%r_at], %r_y;  //: at=local-past-end
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, 8;                          //: cure=local-past-end
setp.le.u32 %p_more, %r_i, 8;                          //: bug=local-past-end
@%p_more bra PUSH;
and.b32 %r_i, %r_thread, 7; shl.b32 %r_at, %r_i, 2; mov.u32 %r_y, stack; add.u32 %r_at, %r_at, %r_y;
ld.local.b32 %r_x, [%r_at];
st.global.b32 [%d_out], %r_x;                          //: at=global-past-end
st.global.b32 [%d_out+4], %r_x;                        //: bug=global-past-end at=global-past-end
""", {"local-past-end": "out-of-bounds", "global-past-end": "out-of-bounds"},
               setup(TABLE, TABLE + np.arange(64, dtype=np.int32) % 8), block=64)

# a table of pages: block i of the sequence lies in page table[i] of the cache
CACHE, PAGES = integers(6, 128), np.array([3, 0, 5, 2], np.int32)


def paged(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """The cache, its table, an output."""
    out = emu.alloc(512)
    return [emu.alloc(CACHE), emu.alloc(PAGES), out], [(out, bytes_of(CACHE[PAGES].sum(0, np.int32)))]


PAGED = kernel("paged", "d_cache d_table d_out", "", """
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_out, %d_out, %d_at;
mov.u32 %r_i, 0; mov.u32 %r_sum, 0;
PAGE:
mul.wide.u32 %d_x, %r_i, 4; add.s64 %d_x, %d_table, %d_x;
ld.global.b32 %r_page, [%d_x];                         //: at=page-past-table
setp.eq.u32 %p_bad, %r_i, 2;                           //: bug=page-outside
@%p_bad mov.u32 %r_page, 77;                           //: bug=page-outside
mul.wide.s32 %d_x, %r_page, 512; add.s64 %d_x, %d_x, %d_cache; add.s64 %d_x, %d_x, %d_at;
ld.global.nc.b32 %r_x, [%d_x];                         //: at=page-outside
add.s32 %r_sum, %r_sum, %r_x;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, 4;                          //: cure=page-past-table
setp.lt.u32 %p_more, %r_i, 5;                          //: bug=page-past-table
@%p_more bra PAGE;
st.global.b32 [%d_out], %r_sum;
""", {"page-outside": "out-of-bounds", "page-past-table": "out-of-bounds"}, paged)

# counts in shared memory: warps add, thread 0 clears in between
HISTOGRAM = np.random.default_rng(3).integers(0, 16, (2, 128)).astype(np.int32)
COUNTS = np.stack([np.bincount(row, minlength=16) for row in HISTOGRAM]).astype(np.int32)
COUNT = kernel("count", "d_in d_out", "bins:64:16", """
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_x, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
shl.b32 %r_mine, %r_thread, 2; add.u32 %r_mine, %r_mine, %r_bins;
setp.ge.u32 %p_other, %r_thread, 16;
mov.u32 %r_turn, 0; mov.u32 %r_zero, 0;
ROW:
@!%p_other st.shared.b32 [%r_mine], %r_zero;           //: at=clear-races
bar.sync 0;                                            //: cure=clear-races
ld.global.b32 %r_x, [%d_x]; shl.b32 %r_x, %r_x, 2; add.u32 %r_x, %r_x, %r_bins;
red.shared.add.u32 [%r_x], 1;                          //: cure=plain-add at=clear-races,plain-read
ld.shared.b32 %r_y, [%r_x];                            //: bug=plain-add at=plain-add
add.u32 %r_y, %r_y, 1;                                 //: bug=plain-add
st.shared.b32 [%r_x], %r_y;                            //: bug=plain-add at=plain-add
bar.sync 0;                                            //: cure=plain-read
@!%p_other ld.shared.b32 %r_y, [%r_mine];              //: at=plain-read
@!%p_other st.global.b32 [%d_out], %r_y;
bar.sync 0;
add.s64 %d_x, %d_x, 512; add.s64 %d_out, %d_out, 64;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, 2;
@%p_more bra ROW;
""", {"clear-races": "race", "plain-add": "race", "plain-read": "race"},
      setup(HISTOGRAM, COUNTS))

KERNELS = [TREE, DOUBLE, NAMED, WARP, LOCAL, PAGED, COUNT]
