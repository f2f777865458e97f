"""cp.async: a pipeline of four stages on sm_80, and copies that arrive at mbarriers."""
from __future__ import annotations

import numpy as np

from .block import integers, setup
from .template import kernel, wait

STAGES, TILES, TILE = 4, 10, 2048

# the last 64 bytes of the last tile are not there: src-size 0 makes them zero
ROWS = integers(TILES * 512 - 16)
FULL = np.append(ROWS, np.zeros(16, np.int32)).reshape(TILES, 512)
SUM = FULL.sum(0, np.int32).reshape(128, 4)[::-1]


def copy(tile: str, slot: str, mark: str = "") -> str:
    """This thread's 16 bytes of a tile, to a slot; nothing is read past the end."""
    return f"""
mad.lo.u32 %r_x, {tile}, {TILE}, %r_at; cvt.u64.u32 %d_x, %r_x; add.s64 %d_x, %d_x, %d_in;
mov.u32 %r_size, 16;
setp.gt.u32 %p_past, %r_x, {ROWS.nbytes - 16}; @%p_past mov.u32 %r_size, 0; //: cure=past-end
mad.lo.u32 %r_to, {slot}, {TILE}, %r_at; add.u32 %r_to, %r_to, %r_ring;
add.u32 %r_to, %r_to, 4;                               //: bug=to-misaligned
cp.async.cg.shared.global [%r_to], [%d_x], 16, %r_size; //: at=past-end,to-misaligned,{mark}"""


PIPELINE = kernel("pipeline", "d_in d_out", f"ring:{STAGES * TILE}:16", f"""
shl.b32 %r_at, %r_thread, 4; cvt.u64.u32 %d_at, %r_at; add.s64 %d_out, %d_out, %d_at;
add.s64 %d_in, %d_in, 8;                               //: bug=from-misaligned
xor.b32 %r_near, %r_thread, 127; shl.b32 %r_near, %r_near, 4; add.u32 %r_near, %r_near, %r_ring;
mov.u32 %r_s0, 0; mov.u32 %r_s1, 0; mov.u32 %r_s2, 0; mov.u32 %r_s3, 0;
mov.u32 %r_i, 0;
AHEAD:
{copy("%r_i", "%r_i", "from-misaligned")}
cp.async.commit_group;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, {STAGES - 1};
@%p_more bra AHEAD;
mov.u32 %r_i, 0;
TURN:
cp.async.wait_group {STAGES - 2};                      //: cure=no-wait,wait-one-more
cp.async.wait_group {STAGES - 1};                      //: bug=wait-one-more
bar.sync 0;                                            //: cure=no-barrier,barrier-late
add.u32 %r_next, %r_i, {STAGES - 1};
and.b32 %r_slot, %r_next, {STAGES - 1};                //: cure=slot-in-use
and.b32 %r_slot, %r_i, {STAGES - 1};                   //: bug=slot-in-use
setp.ge.u32 %p_done, %r_next, {TILES};
@%p_done bra COPIED;
{copy("%r_next", "%r_slot", "no-barrier,barrier-late,slot-in-use")}
cp.async.commit_group;                                 //: bug=tail-uncommitted
COPIED:
cp.async.commit_group;                                 //: cure=tail-uncommitted
bar.sync 0;                                            //: bug=barrier-late
and.b32 %r_slot, %r_i, {STAGES - 1}; mad.lo.u32 %r_from, %r_slot, {TILE}, %r_near;
//: at=no-wait,wait-one-more,no-barrier,slot-in-use,tail-uncommitted,barrier-late
ld.shared.v4.b32 {{%r_a, %r_b, %r_c, %r_d}}, [%r_from];
add.s32 %r_s0, %r_s0, %r_a; add.s32 %r_s1, %r_s1, %r_b; add.s32 %r_s2, %r_s2, %r_c;
add.s32 %r_s3, %r_s3, %r_d;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, {TILES};
@%p_more bra TURN;
st.global.v4.b32 [%d_out], {{%r_s0, %r_s1, %r_s2, %r_s3}};
""", {"no-wait": "async-hazard", "wait-one-more": "async-hazard",
      "no-barrier": "async-hazard",
      "barrier-late": "async-hazard", "slot-in-use": "async-hazard", "tail-uncommitted": "async-hazard",
      "past-end": "out-of-bounds", "to-misaligned": "misaligned", "from-misaligned": "misaligned"},
                  setup(ROWS, SUM), arch="sm_80")

# warps 0 and 1 copy, warps 2 and 3 add up; mbarriers say when slots are full (64 threads) and empty
HANDED = integers(6, 256)
HANDOVER = kernel("handover", "d_in d_out", "ring:2048:16 full:16:8 empty:16:8", f"""
and.b32 %r_at, %r_thread, 63; shl.b32 %r_at, %r_at, 4; cvt.u64.u32 %d_at, %r_at;
add.s64 %d_in, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mbarrier.init.shared::cta.b64 [full], 64; mbarrier.init.shared::cta.b64 [full+8], 64; //: cure=count-many
mbarrier.init.shared::cta.b64 [full], 65; mbarrier.init.shared::cta.b64 [full+8], 65; //: bug=count-many
//: cure=empty-count-few
mbarrier.init.shared::cta.b64 [empty], 64; mbarrier.init.shared::cta.b64 [empty+8], 64;
//: bug=empty-count-few
mbarrier.init.shared::cta.b64 [empty], 63; mbarrier.init.shared::cta.b64 [empty+8], 63;
READY:
bar.sync 0;
mov.u32 %r_i, 0; mov.u32 %r_phase, 0;
setp.ge.u32 %p_taker, %r_thread, 64;
@%p_taker bra TAKE;
GIVE:
and.b32 %r_slot, %r_i, 1; shl.b32 %r_x, %r_slot, 3; add.u32 %r_y, %r_x, %r_full; add.u32 %r_z, %r_x, %r_empty;
shl.b32 %r_to, %r_slot, 10; add.u32 %r_to, %r_to, %r_ring; add.u32 %r_to, %r_to, %r_at;
xor.b32 %r_last, %r_phase, 1;
{wait("%r_z", "%r_last")}                              //: cure=empty-unawaited
cp.async.cg.shared.global [%r_to], [%d_in], 16;        //: at=arrive-early,empty-unawaited
cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r_y]; //: cure=arrive-early,with-increment
cp.async.mbarrier.arrive.shared::cta.b64 [%r_y];       //: bug=with-increment
mbarrier.arrive.shared::cta.b64 _, [%r_y];             //: bug=arrive-early
add.s64 %d_in, %d_in, 1024;
xor.b32 %r_phase, %r_phase, %r_slot;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, 6;
@%p_more bra GIVE;
bra END;
TAKE:
mov.u32 %r_s0, 0; mov.u32 %r_s1, 0; mov.u32 %r_s2, 0; mov.u32 %r_s3, 0;
TURN:
and.b32 %r_slot, %r_i, 1; shl.b32 %r_x, %r_slot, 3; add.u32 %r_y, %r_x, %r_full; add.u32 %r_z, %r_x, %r_empty;
shl.b32 %r_from, %r_slot, 10; add.u32 %r_from, %r_from, %r_ring; add.u32 %r_from, %r_from, %r_at;
{wait("%r_y", "%r_phase")}                             //: at=count-many,with-increment
ld.shared.v4.b32 {{%r_a, %r_b, %r_c, %r_d}}, [%r_from]; //: at=arrive-early,empty-unawaited
add.s32 %r_s0, %r_s0, %r_a; add.s32 %r_s1, %r_s1, %r_b; add.s32 %r_s2, %r_s2, %r_c;
add.s32 %r_s3, %r_s3, %r_d;
mbarrier.arrive.shared::cta.b64 _, [%r_z];                     //: at=empty-count-few
xor.b32 %r_phase, %r_phase, %r_slot;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, 6;
@%p_more bra TURN;
st.global.v4.b32 [%d_out], {{%r_s0, %r_s1, %r_s2, %r_s3}};
END:
cp.async.wait_all;
""", {"count-many": "deadlock", "with-increment": "deadlock", "arrive-early": "async-hazard",
      "empty-unawaited": "async-hazard|barrier", "empty-count-few": "barrier"},
                  setup(HANDED, HANDED.sum(0, np.int32)))

KERNELS = [PIPELINE, HANDOVER]
