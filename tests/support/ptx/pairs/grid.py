"""CTAs of a grid with global memory: atomics, flags, the last block, what is not theirs; endless loops."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator

from .block import bytes_of, integers, setup
from .template import kernel

# four CTAs each have a quarter of K and add to one row
PARTS = integers(4, 128)


def sums(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """Parts, and a row of zeros to add them to."""
    out = emu.alloc(np.zeros(128, np.int32))
    return [emu.alloc(PARTS), out], [(out, PARTS.sum(0, np.int32))]


SPLIT = kernel("split", "d_in d_out", "", """
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_x, %d_in, %d_x;
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_at, %d_out, %d_at;
ld.global.b32 %r_x, [%d_x];
red.relaxed.gpu.global.add.s32 [%d_at], %r_x;          //: cure=no-atomics,of-the-cta,of-the-cluster
red.relaxed.cta.global.add.s32 [%d_at], %r_x;          //: bug=of-the-cta at=of-the-cta
red.relaxed.cluster.global.add.s32 [%d_at], %r_x;      //: bug=of-the-cluster at=of-the-cluster
ld.global.b32 %r_y, [%d_at];                           //: bug=no-atomics at=no-atomics
add.s32 %r_y, %r_y, %r_x;                              //: bug=no-atomics
st.global.b32 [%d_at], %r_y;                           //: bug=no-atomics at=no-atomics
""", {"no-atomics": "race", "of-the-cta": "race", "of-the-cluster": "race"}, sums, grid=4)


# each CTA leaves a sum of its own; who comes last adds them up
def last_block(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """Parts, space for partial sums, a counter, an output."""
    out = emu.alloc(512)
    return ([emu.alloc(PARTS), emu.alloc(PARTS.nbytes), emu.alloc(np.zeros(1, np.int32)), out],
            [(out, bytes_of(3 * PARTS.sum(0, np.int32)))])


LAST = kernel("last", "d_in d_parts d_count d_out", "told:4:4", """
mad.lo.u32 %r_x, %r_cta, 128, %r_thread; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_from, %d_in, %d_x;
add.s64 %d_to, %d_parts, %d_x;
ld.global.b32 %r_x, [%d_from]; mul.lo.s32 %r_x, %r_x, 3;
st.global.b32 [%d_to], %r_x;                           //: at=no-fence,no-first-barrier,fence-cta
fence.acq_rel.gpu;                                     //: cure=no-fence,fence-cta
membar.cta;                                            //: bug=fence-cta
bar.sync 0;                                            //: cure=no-first-barrier
setp.ne.u32 %p_other, %r_thread, 0;
@%p_other bra TOLD;
atom.relaxed.gpu.global.inc.u32 %r_y, [%d_count], 3;   //: cure=count-cta
atom.relaxed.cta.global.inc.u32 %r_y, [%d_count], 3;   //: bug=count-cta at=count-cta
fence.acq_rel.gpu;
st.shared.b32 [told], %r_y;                            //: at=no-second-barrier
TOLD:
bar.sync 0;                                            //: cure=no-second-barrier
ld.shared.b32 %r_y, [told];                            //: at=no-second-barrier
setp.ne.u32 %p_done, %r_y, 3;
@%p_done bra END;
mov.u32 %r_sum, 0; mov.u32 %r_i, 0;
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_from, %d_parts, %d_at; add.s64 %d_to, %d_out, %d_at;
PART:
//: cure=non-coherent
//: at=no-fence,no-first-barrier,fence-cta
ld.global.b32 %r_x, [%d_from];
ld.global.nc.b32 %r_x, [%d_from];                      //: bug=non-coherent at=non-coherent
add.s32 %r_sum, %r_sum, %r_x;
add.s64 %d_from, %d_from, 512;
add.u32 %r_i, %r_i, 1;
setp.lt.u32 %p_more, %r_i, 4;
@%p_more bra PART;
st.global.b32 [%d_to], %r_sum;
END:
""", {"no-fence": "race", "no-first-barrier": "race",
      "no-second-barrier": "race", "fence-cta": "race", "count-cta": "race", "non-coherent": "race"},
              last_block, grid=4)


# CTA 0 hands a row to CTA 1, with a flag that one thread raises and one looks at
def message(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """A row, space for the message, the flag, an output."""
    out = emu.alloc(512)
    return ([emu.alloc(PARTS[0]), emu.alloc(512), emu.alloc(np.zeros(1, np.int32)), out],
            [(out, bytes_of(PARTS[0, ::-1] + 1))])


FLAG = kernel("flag", "d_in d_row d_flag d_out", "", """
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_in, %d_in, %d_at;
setp.ne.u32 %p_other, %r_thread, 0;
setp.eq.u32 %p_second, %r_cta, 1;
@%p_second bra SECOND;
ld.global.b32 %r_x, [%d_in]; add.s32 %r_x, %r_x, 1;
add.s64 %d_x, %d_row, %d_at;
//: at=store-relaxed,load-relaxed,store-plain,no-sender-barrier,no-receiver-barrier
//: at=store-cta,store-cluster,load-cta,load-cluster
st.global.b32 [%d_x], %r_x;
bar.sync 0;                                            //: cure=no-sender-barrier
@%p_other bra END;
mov.u32 %r_one, 1;
//: cure=store-relaxed,store-plain,never-raised,store-cta,store-cluster
st.release.gpu.global.b32 [%d_flag], %r_one;
st.release.cta.global.b32 [%d_flag], %r_one;           //: bug=store-cta
st.release.cluster.global.b32 [%d_flag], %r_one;       //: bug=store-cluster
st.relaxed.gpu.global.b32 [%d_flag], %r_one;           //: bug=store-relaxed
st.global.b32 [%d_flag], %r_one;                       //: bug=store-plain at=store-plain
bra END;
SECOND:
@%p_other bra SEEN;
LOOK:
//: cure=load-relaxed,load-cta,load-cluster
//: at=store-plain,never-raised
ld.acquire.gpu.global.b32 %r_x, [%d_flag];
ld.acquire.cta.global.b32 %r_x, [%d_flag];             //: bug=load-cta
ld.acquire.cluster.global.b32 %r_x, [%d_flag];         //: bug=load-cluster
ld.relaxed.gpu.global.b32 %r_x, [%d_flag];             //: bug=load-relaxed
setp.ne.u32 %p_wait, %r_x, 1;                          //: at=never-raised
@%p_wait bra LOOK;                                     //: at=never-raised
SEEN:
bar.sync 0;                                            //: cure=no-receiver-barrier
xor.b32 %r_x, %r_thread, 127; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_x, %d_row, %d_x;
//: at=store-relaxed,load-relaxed,store-plain,no-sender-barrier,no-receiver-barrier
//: at=store-cta,store-cluster,load-cta,load-cluster
ld.global.b32 %r_x, [%d_x];
add.s64 %d_out, %d_out, %d_at;
st.global.b32 [%d_out], %r_x;
END:
""", {"store-relaxed": "race", "load-relaxed": "race", "store-plain": "race", "no-sender-barrier": "race",
      "no-receiver-barrier": "race", "never-raised": "instruction-limit", "store-cta": "race",
      "store-cluster": "race", "load-cta": "race", "load-cluster": "race"}, message, grid=2,
      step_limit=200_000)

# the same with relaxed accesses and fences around them
FENCED = kernel("fenced", "d_in d_row d_flag d_out", "", """
mul.wide.u32 %d_at, %r_thread, 4; add.s64 %d_in, %d_in, %d_at;
setp.ne.u32 %p_other, %r_thread, 0;
setp.eq.u32 %p_second, %r_cta, 1;
@%p_second bra SECOND;
ld.global.b32 %r_x, [%d_in]; add.s32 %r_x, %r_x, 1;
add.s64 %d_x, %d_row, %d_at;
//: at=no-sender-fence,no-receiver-fence,sender-fence-cta,receiver-fence-cta,raised-cta,polled-cta
st.global.b32 [%d_x], %r_x;
bar.sync 0;
@%p_other bra END;
fence.acq_rel.gpu;                                     //: cure=no-sender-fence,sender-fence-cta
fence.acq_rel.cta;                                     //: bug=sender-fence-cta
red.relaxed.gpu.global.add.u32 [%d_flag], 1;           //: cure=raised-cta
red.relaxed.cta.global.add.u32 [%d_flag], 1;           //: bug=raised-cta
bra END;
SECOND:
LOOK:
ld.relaxed.gpu.global.b32 %r_x, [%d_flag];             //: cure=polled-cta
ld.relaxed.cta.global.b32 %r_x, [%d_flag];             //: bug=polled-cta
setp.ne.u32 %p_wait, %r_x, 1;
@%p_wait bra LOOK;
fence.acq_rel.gpu;                                     //: cure=no-receiver-fence,receiver-fence-cta
membar.cta;                                            //: bug=receiver-fence-cta
bar.sync 0;                                            //: bug=receiver-fence-cta
xor.b32 %r_x, %r_thread, 127; mul.wide.u32 %d_x, %r_x, 4; add.s64 %d_x, %d_row, %d_x;
//: at=no-sender-fence,no-receiver-fence,sender-fence-cta,receiver-fence-cta,raised-cta,polled-cta
ld.global.b32 %r_x, [%d_x];
add.s64 %d_out, %d_out, %d_at;
st.global.b32 [%d_out], %r_x;
END:
""", {"no-sender-fence": "race", "no-receiver-fence": "race", "sender-fence-cta": "race",
      "receiver-fence-cta": "race", "raised-cta": "race", "polled-cta": "race"}, message, grid=2,
                step_limit=200_000)

# each CTA has 128 columns of a row of 500
ROW = integers(500)


def shifted(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
    """The row, an output, and the address of a buffer given back before the launch."""
    arguments, outputs = setup(ROW, ROW + np.append(ROW[1:], 0).astype(np.int32))(emu)
    freed = emu.alloc(ROW)
    emu.free(freed)
    return [*arguments, freed.ptr], outputs


SHIFT = kernel("shift", "d_in d_out d_freed", "", """
mov.b64 %d_in, %d_freed;                               //: bug=freed
mul.lo.u32 %r_x, %r_cta, 128;                          //: cure=overlapping
mul.lo.u32 %r_x, %r_cta, 127;                          //: bug=overlapping
add.u32 %r_x, %r_x, %r_thread;
setp.ge.u32 %p_past, %r_x, 500;                        //: cure=bound-off-by-one
setp.gt.u32 %p_past, %r_x, 500;                        //: bug=bound-off-by-one
@%p_past bra END;
mul.wide.u32 %d_at, %r_x, 4; add.s64 %d_x, %d_in, %d_at; add.s64 %d_to, %d_out, %d_at;
ld.global.b32 %r_y, [%d_x];                            //: at=freed,bound-off-by-one
setp.ge.u32 %p_end, %r_x, 499;
mov.u32 %r_z, 0;
@!%p_end ld.global.b32 %r_z, [%d_x+4];                 //: at=freed
add.s32 %r_y, %r_y, %r_z;
add.s32 %r_y, %r_y, %r_cta;                            //: bug=overlapping
st.global.b32 [%d_to], %r_y;                           //: at=overlapping,bound-off-by-one
add.s64 %d_x, %d_out, 4; add.s64 %d_x, %d_x, %d_at;    //: bug=reads-neighbour
@!%p_end ld.global.b32 %r_z, [%d_x];                   //: bug=reads-neighbour at=reads-neighbour
END:
""", {"freed": "out-of-bounds", "overlapping": "race", "bound-off-by-one": "out-of-bounds",
      "reads-neighbour": "race"}, shifted, grid=4)

KERNELS = [SPLIT, LAST, FLAG, FENCED, SHIFT]
