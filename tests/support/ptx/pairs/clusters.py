"""Clusters: shared memory of other CTAs, remote arrivals, multicast."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

from .block import bytes_of, integers, setup
from .template import TENSOR, kernel, wait

VALUES = integers(4, 128)
SWAPPED = VALUES.reshape(2, 2, 128)[:, ::-1].reshape(4, 128) + VALUES

# each CTA of a pair reads what the other has in shared memory
EXCHANGE = kernel("exchange", "d_in d_out", "line:512:16", """
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_at, %r_x, 4;
add.s64 %d_in, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_x, [%d_in];
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_line;
st.shared.b32 [%r_at], %r_x;                           //: at=no-first-barrier,arrive-relaxed,fence-cta
fence.acq_rel.cta;                                     //: bug=fence-cta
//: cure=no-first-barrier,arrive-relaxed,cta-barrier,twice,fence-cta
barrier.cluster.arrive.release.aligned;
barrier.cluster.arrive.relaxed.aligned;                //: bug=arrive-relaxed,fence-cta
barrier.cluster.wait.acquire.aligned;                  //: cure=no-first-barrier,cta-barrier at=twice
bar.sync 0;                                            //: bug=cta-barrier
mov.u32 %r_rank, %cluster_ctarank;
xor.b32 %r_peer, %r_rank, 1;                           //: cure=no-such-rank
add.u32 %r_peer, %r_rank, 1;                           //: bug=no-such-rank
mapa.shared::cluster.u32 %r_far, %r_at, %r_peer;
//: cure=own-window
//: at=no-first-barrier,arrive-relaxed,no-such-rank,cta-barrier,fence-cta
ld.shared::cluster.b32 %r_y, [%r_far];
ld.shared::cta.b32 %r_y, [%r_far];                     //: bug=own-window at=own-window
barrier.cluster.arrive.release.aligned;                //: cure=exits-early
barrier.cluster.wait.acquire.aligned;                  //: cure=exits-early
add.s32 %r_x, %r_x, %r_y;
st.global.b32 [%d_out], %r_x;
""", {"no-first-barrier": "race", "arrive-relaxed": "race", "cta-barrier": "race",
      "no-such-rank": "out-of-bounds", "own-window": "out-of-bounds", "exits-early": "race|out-of-bounds",
      "twice": "barrier", "fence-cta": "race"}, setup(VALUES, SWAPPED), grid=4, cluster=2)

# each CTA of a pair puts its numbers into the other's shared memory
PUT = kernel("put", "d_in d_out", "line:512:16", """
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_at, %r_x, 4;
add.s64 %d_in, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_x, [%d_in];
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_line;
mov.u32 %r_rank, %cluster_ctarank; xor.b32 %r_peer, %r_rank, 1;
mapa.shared::cluster.u32 %r_far, %r_at, %r_peer;
barrier.cluster.arrive.relaxed.aligned;                //: cure=not-started,arrived-alone
barrier.cluster.wait.acquire.aligned;                  //: cure=not-started,arrived-alone
barrier.cluster.arrive.relaxed.aligned;                //: bug=arrived-alone
st.shared::cluster.b32 [%r_far], %r_x;                 //: at=not-started,arrived-alone,exits-early
barrier.cluster.wait.acquire.aligned;                  //: bug=arrived-alone
barrier.cluster.arrive.release.aligned;                //: cure=exits-early
barrier.cluster.wait.acquire.aligned;                  //: cure=exits-early
bar.sync 0;                                            //: bug=exits-early
ld.shared.b32 %r_y, [%r_at];
add.s32 %r_x, %r_x, %r_y;
st.global.b32 [%d_out], %r_x;
""", {"not-started": "race", "arrived-alone": "race", "exits-early": "race"},
             setup(VALUES, SWAPPED), grid=4, cluster=2)

# CTA 0 of each pair hands a row to CTA 1 with a flag in global memory
ROWS = integers(4, 128, seed=2)


def rows_and_flags(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """Rows, a flag for each pair, an output of which pairs have rows."""
    out = emu.alloc(1024)
    return ([emu.alloc(ROWS), emu.alloc(1024), emu.alloc(np.zeros(2, np.int32)), out],
            [(out, bytes_of(ROWS[::2, ::-1] + 1))])


TOLD = kernel("told", "d_in d_row d_flag d_out", "", """
mov.u32 %r_rank, %cluster_ctarank; shr.u32 %r_pair, %r_cta, 1;
mul.wide.u32 %d_x, %r_pair, 4; add.s64 %d_flag, %d_flag, %d_x;
mul.wide.u32 %d_x, %r_pair, 512; add.s64 %d_row, %d_row, %d_x; add.s64 %d_out, %d_out, %d_x;
setp.ne.u32 %p_other, %r_thread, 0; mul.wide.u32 %d_at, %r_thread, 4;
setp.eq.u32 %p_second, %r_rank, 1; setp.eq.u32 %p_odd, %r_pair, 1;
@%p_second bra SECOND;
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_in, %d_in, %d_x;
ld.global.b32 %r_x, [%d_in]; add.s32 %r_x, %r_x, 1;
add.s64 %d_x, %d_row, %d_at;
st.global.b32 [%d_x], %r_x;                            //: at=release-cta,acquire-cta,other-pair
bar.sync 0;
@%p_other bra END;
st.release.cluster.global.b32 [%d_flag], 1;            //: cure=release-cta
st.release.cta.global.b32 [%d_flag], 1;                //: bug=release-cta
bra END;
SECOND:
@!%p_odd add.s64 %d_row, %d_row, 512;                  //: bug=other-pair
@!%p_odd add.s64 %d_flag, %d_flag, 4;                  //: bug=other-pair
@%p_odd sub.s64 %d_row, %d_row, 512;                   //: bug=other-pair
@%p_odd sub.s64 %d_flag, %d_flag, 4;                   //: bug=other-pair
@%p_other bra SEEN;
LOOK:
ld.acquire.cluster.global.b32 %r_x, [%d_flag];         //: cure=acquire-cta
ld.acquire.cta.global.b32 %r_x, [%d_flag];             //: bug=acquire-cta
setp.ne.u32 %p_wait, %r_x, 1;
@%p_wait bra LOOK;
SEEN:
bar.sync 0;
xor.b32 %r_x, %r_thread, 127; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_x, %d_row, %d_x;
ld.global.b32 %r_x, [%d_x];                            //: at=release-cta,acquire-cta,other-pair
add.s64 %d_out, %d_out, %d_at;
st.global.b32 [%d_out], %r_x;
END:
""", {"release-cta": "race", "acquire-cta": "race", "other-pair": "race"}, rows_and_flags, grid=4, cluster=2,
              step_limit=200_000)

# st.async to the other CTA, whose mbarrier counts the bytes
SEND = kernel("send", "d_in d_out", "line:512:16 barrier:8:8", f"""
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_at, %r_x, 4;
add.s64 %d_in, %d_in, %d_at; add.s64 %d_out, %d_out, %d_at;
ld.global.b32 %r_x, [%d_in];
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mbarrier.init.shared::cta.b64 [barrier], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 512; //: cure=bytes-many,bytes-few
mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 516; //: bug=bytes-many
mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], 384; //: bug=bytes-few
fence.mbarrier_init.release.cluster;                   //: cure=init-relaxed
READY:
bar.sync 0;
barrier.cluster.arrive.relaxed.aligned;                //: cure=init-unseen
barrier.cluster.wait.acquire.aligned;                  //: cure=init-unseen
mov.u32 %r_rank, %cluster_ctarank; xor.b32 %r_peer, %r_rank, 1;
shl.b32 %r_at, %r_thread, 2; add.u32 %r_at, %r_at, %r_line;
mapa.shared::cluster.u32 %r_far, %r_at, %r_peer;
mapa.shared::cluster.u32 %r_far_barrier, %r_barrier, %r_peer; //: cure=own-barrier
mov.u32 %r_far_barrier, %r_barrier;                    //: bug=own-barrier
//: at=unawaited,own-barrier,init-relaxed,init-unseen,bytes-few
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r_far], %r_x, [%r_far_barrier];
//: cure=unawaited
//: at=bytes-many,own-barrier,init-relaxed
{wait("barrier", "0")}
ld.shared.b32 %r_y, [%r_at];                           //: at=unawaited,bytes-few
add.s32 %r_x, %r_x, %r_y;
st.global.b32 [%d_out], %r_x;
""", {"unawaited": "async-hazard", "bytes-many": "deadlock",
      "bytes-few": "async-hazard|deadlock",
      "own-barrier": "barrier|deadlock", "init-relaxed": "race", "init-unseen": "race|barrier"},
              setup(VALUES, SWAPPED), grid=4, cluster=2)

# CTA 0 of each pair works, CTA 1 tells it how far it is by remote arrivals
NOTICE = kernel("notice", "d_in d_out", "barrier:8:8", f"""
mov.u32 %r_rank, %cluster_ctarank;
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mbarrier.init.shared::cta.b64 [barrier], 128;          //: cure=count-many,count-few
mbarrier.init.shared::cta.b64 [barrier], 129;          //: bug=count-many
mbarrier.init.shared::cta.b64 [barrier], 127;          //: bug=count-few
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_at, %r_x, 4;
add.s64 %d_to, %d_out, %d_at; add.s64 %d_from, %d_in, %d_at;
setp.eq.u32 %p_first, %r_rank, 0;
@%p_first bra FIRST;
ld.global.b32 %r_x, [%d_from]; add.s32 %r_x, %r_x, 1;
st.global.b32 [%d_to], %r_x;                           //: at=relaxed,exits,arrive-cta,wait-cta
mapa.shared::cluster.u32 %r_far, %r_barrier, 0;
//: cure=relaxed,exits,arrive-cta
//: at=count-few
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r_far];
mbarrier.arrive.shared::cluster.b64 _, [%r_far];       //: bug=arrive-cta
mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r_far]; //: bug=relaxed
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r_far]; //: bug=exits at=exits
bra END;
FIRST:
//: cure=exits,wait-cta at=count-many
{wait("barrier", "0").replace(".parity.", ".parity.acquire.cluster.")}
{wait("barrier", "0")}                                 //: bug=wait-cta
xor.b32 %r_x, %r_thread, 127; mad.lo.u32 %r_x, %r_cta, 128, %r_x; add.u32 %r_x, %r_x, 128;
mul.wide.u32 %d_at, %r_x, 4;
add.s64 %d_from, %d_out, %d_at;
ld.global.b32 %r_x, [%d_from];                         //: at=relaxed,exits,arrive-cta,wait-cta
st.global.b32 [%d_to], %r_x;
END:
""", {"count-many": "deadlock", "count-few": "barrier", "relaxed": "race", "exits": "race|out-of-bounds",
      "arrive-cta": "race", "wait-cta": "race"},
                setup(VALUES, np.stack([VALUES[1, ::-1], VALUES[1], VALUES[3, ::-1], VALUES[3]]) + 1),
                grid=4, cluster=2)

STAGES, TURNS, TILE = 3, 8, 2048
COLUMNS = integers(TURNS, 16, 32)


def columns(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """Tiles of 16 x 32; both CTAs get all of them, each loads a half of each for both."""
    out = emu.alloc(2 * 128 * 16)
    source = TensorMap.of_tiles(emu.alloc(COLUMNS.reshape(-1, 32)), box=(8, 32))
    total = COLUMNS.sum(0, np.int32).reshape(128, 4)[::-1]
    return [source, out], [(out, bytes_of(np.stack([total, total])))]


# warp 4 loads, warps 0 to 3 add up; a slot is free when the warps of both CTAs have read it
MULTICAST = kernel("multicast", "map_in d_out", f"ring:{STAGES * TILE}:128 full:24:8 empty:24:8", f"""
mov.u32 %r_rank, %cluster_ctarank;
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra READY;
mov.u32 %r_count, 8;                                   //: cure=own-consumers-only
mov.u32 %r_count, 4;                                   //: bug=own-consumers-only
mbarrier.init.shared::cta.b64 [full], 1; mbarrier.init.shared::cta.b64 [full+8], 1;
mbarrier.init.shared::cta.b64 [full+16], 1; mbarrier.init.shared::cta.b64 [empty], %r_count;
mbarrier.init.shared::cta.b64 [empty+8], %r_count; mbarrier.init.shared::cta.b64 [empty+16], %r_count;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.relaxed.aligned;                //: cure=peer-not-ready
barrier.cluster.wait.acquire.aligned;                  //: cure=peer-not-ready
bar.sync 0;                                            //: bug=peer-not-ready
mov.u32 %r_i, 0; mov.u32 %r_slot, 0; mov.u32 %r_zero, 0;
setp.eq.u32 %p_loader, %r_warp, 4;
@!%p_loader bra CONSUME;
setp.ne.u32 %p_idle, %r_lane, 0;
@%p_idle bra END;
mov.u32 %r_parity, 1;
mov.b16 %h_both, 3;                                    //: cure=mask-outside
mov.b16 %h_both, 7;                                    //: bug=mask-outside
LOAD:
shl.b32 %r_x, %r_slot, 3; add.u32 %r_mine, %r_x, %r_full; add.u32 %r_free, %r_x, %r_empty;
{wait("%r_free", "%r_parity")}                         //: at=release-missing
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_mine], {TILE}; //: cure=own-half-expected
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_mine], {TILE // 2}; //: bug=own-half-expected
shl.b32 %r_y, %r_rank, 3; mad.lo.u32 %r_y, %r_i, 16, %r_y;
mad.lo.u32 %r_to, %r_slot, {TILE}, %r_ring; shl.b32 %r_x, %r_rank, 10; add.u32 %r_to, %r_to, %r_x;
//: at=own-consumers-only,peer-not-ready,own-half-expected,mask-outside
{TENSOR}.multicast::cluster [%r_to], [%d_map_in, {{%r_zero, %r_y}}], [%r_mine], %h_both;
add.u32 %r_slot, %r_slot, 1;
setp.eq.u32 %p_wrap, %r_slot, {STAGES};
@%p_wrap mov.u32 %r_slot, 0;
@%p_wrap xor.b32 %r_parity, %r_parity, 1;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, {TURNS};
@%p_more bra LOAD;
bra END;
CONSUME:
shl.b32 %r_at, %r_thread, 4; xor.b32 %r_near, %r_at, 2032; add.u32 %r_near, %r_near, %r_ring;
mov.u32 %r_parity, 0; mov.u32 %r_s0, 0; mov.u32 %r_s1, 0; mov.u32 %r_s2, 0; mov.u32 %r_s3, 0;
setp.gt.u32 %p_quiet, %r_lane, 1;                      //: cure=own-consumers-only
setp.ne.u32 %p_quiet, %r_lane, 0;                      //: bug=own-consumers-only
TURN:
shl.b32 %r_x, %r_slot, 3; add.u32 %r_mine, %r_x, %r_full; add.u32 %r_free, %r_x, %r_empty;
{wait("%r_mine", "%r_parity")}                         //: at=release-missing
mad.lo.u32 %r_from, %r_slot, {TILE}, %r_near;
ld.shared.v4.b32 {{%r_a, %r_b, %r_c, %r_d}}, [%r_from]; //: at=own-consumers-only,own-half-expected
add.s32 %r_s0, %r_s0, %r_a; add.s32 %r_s1, %r_s1, %r_b; add.s32 %r_s2, %r_s2, %r_c;
add.s32 %r_s3, %r_s3, %r_d;
bar.warp.sync 0xffffffff;                              //: cure=release-unordered
mapa.shared::cluster.u32 %r_far, %r_free, %r_lane;     //: cure=own-consumers-only
mapa.shared::cluster.u32 %r_far, %r_free, %r_rank;     //: bug=own-consumers-only
//: cure=release-missing
//: at=peer-not-ready
@!%p_quiet mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r_far];
add.u32 %r_slot, %r_slot, 1;
setp.eq.u32 %p_wrap, %r_slot, {STAGES};
@%p_wrap mov.u32 %r_slot, 0;
@%p_wrap xor.b32 %r_parity, %r_parity, 1;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, {TURNS};
@%p_more bra TURN;
cvt.u64.u32 %d_x, %r_at; add.s64 %d_out, %d_out, %d_x; mul.wide.u32 %d_x, %r_rank, 2048;
add.s64 %d_out, %d_out, %d_x;
st.global.v4.b32 [%d_out], {{%r_s0, %r_s1, %r_s2, %r_s3}};
END:
barrier.cluster.arrive.release;                        //: cure=exits-early
barrier.cluster.wait.acquire;                          //: cure=exits-early
""", {"own-consumers-only": "async-hazard", "peer-not-ready": "race|barrier",
      "own-half-expected": "async-hazard|deadlock",
      "mask-outside": "out-of-bounds", "release-missing": "deadlock",
      "exits-early": "race|out-of-bounds|async-hazard"},
                   columns, grid=2, cluster=2, block=160)

KERNELS = [EXCHANGE, PUT, TOLD, SEND, NOTICE, MULTICAST]
