"""wgmma on operands that the threads themselves put into shared memory, or hold in registers.

Operands are not swizzled: 8 rows of 16 bytes are together, the next 8 columns are 128 bytes
on, the next 8 rows 256.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator

from .block import bytes_of
from .rings import CLEAR, COLUMNS, STORE
from .template import Setup, kernel, registers

TURNS = 6
DESCRIPTOR = 128 >> 4 << 16 | 256 >> 4 << 32


def factors(twice: bool = False) -> Setup:
    """A [64, 96] and B [32, 96] of small integers in f16 and their product in f32; `twice`: what was summed
    up is doubled after every 16 columns."""
    random = np.random.default_rng(2)
    a = random.integers(-3, 4, (64, 16 * TURNS)).astype(np.float16)
    b = random.integers(-3, 4, (COLUMNS, 16 * TURNS)).astype(np.float16)
    result = np.zeros((64, COLUMNS), np.float32)
    for k in range(0, 16 * TURNS, 16):
        result += a[:, k:k + 16].astype(np.float32) @ b[:, k:k + 16].astype(np.float32).T
        if twice: result *= 2

    def make(emu: Emulator) -> tuple[list[object], list[tuple[object, np.ndarray]]]:
        out = emu.alloc(result.nbytes)
        return [emu.alloc(a), emu.alloc(b), out], [(out, bytes_of(result))]
    return make


def multiply(a: str, majors: str) -> str:
    """One product of 64 x 32 x 16: A a descriptor or registers, `majors` both K-major."""
    return (f"wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {{{registers('f_c', 16)}}}, {a}, "
            f"%d_b, 1, 1, 1, {majors};")


def descriptor(name: str) -> str:
    """Descriptor %d_{name} of the tile at address %r_{name}."""
    return (f"shr.u32 %r_x, %r_{name}, 4; and.b32 %r_x, %r_x, 0x3fff; cvt.u64.u32 %d_{name}, %r_x; "
            f"or.b64 %d_{name}, %d_{name}, {DESCRIPTOR};")


# thread t has 16 bytes: row t / 2, half t % 2 of its 16 columns; of B there are only 32 rows
PLACE = """
shr.u32 %r_row, %r_thread, 1; and.b32 %r_half, %r_thread, 1;
mul.lo.u32 %r_x, %r_row, 192; shl.b32 %r_y, %r_half, 4; add.u32 %r_x, %r_x, %r_y; cvt.u64.u32 %d_x, %r_x;
add.s64 %d_from_a, %d_a, %d_x; add.s64 %d_from_b, %d_b, %d_x;
shr.u32 %r_at, %r_row, 3; shl.b32 %r_at, %r_at, 8; and.b32 %r_x, %r_row, 7; shl.b32 %r_x, %r_x, 4;
add.u32 %r_at, %r_at, %r_x; shl.b32 %r_x, %r_half, 7; add.u32 %r_at, %r_at, %r_x;
setp.ge.u32 %p_no_b, %r_thread, 64;"""

# two buffers; a group stays in flight while the next tiles come
STAGED = kernel("staged", "d_a d_b d_out", "tiles_a:4096:128 tiles_b:2048:128", f"""
{PLACE}
{CLEAR}
mov.u32 %r_turn, 0;
TURN:
and.b32 %r_buffer, %r_turn, 1;                         //: cure=one-buffer
mov.u32 %r_buffer, 0;                                  //: bug=one-buffer
shl.b32 %r_a, %r_buffer, 11; add.u32 %r_a, %r_a, %r_tiles_a; add.u32 %r_to_a, %r_a, %r_at;
shl.b32 %r_b, %r_buffer, 10; add.u32 %r_b, %r_b, %r_tiles_b; add.u32 %r_to_b, %r_b, %r_at;
ld.global.v4.b32 {{%r_u0, %r_u1, %r_u2, %r_u3}}, [%d_from_a];
@!%p_no_b ld.global.v4.b32 {{%r_v0, %r_v1, %r_v2, %r_v3}}, [%d_from_b];
//: at=no-proxy-fence,no-barrier,one-buffer,no-wait
st.shared.v4.b32 [%r_to_a], {{%r_u0, %r_u1, %r_u2, %r_u3}};
//: at=no-proxy-fence,no-barrier,one-buffer,no-wait
@!%p_no_b st.shared.v4.b32 [%r_to_b], {{%r_v0, %r_v1, %r_v2, %r_v3}};
fence.proxy.async.shared::cta;                         //: cure=no-proxy-fence
bar.sync 0;                                            //: cure=no-barrier
{descriptor("a")}
{descriptor("b")}
wgmma.fence.sync.aligned;
{multiply("%d_a", "0, 0")}                       //: at=no-proxy-fence,no-barrier,one-buffer,no-wait
wgmma.commit_group.sync.aligned;                       //: cure=uncommitted
wgmma.wait_group.sync.aligned 1;                       //: cure=no-wait
bar.sync 0;
add.s64 %d_from_a, %d_from_a, 32; add.s64 %d_from_b, %d_from_b, 32;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra TURN;
wgmma.wait_group.sync.aligned 0;
{STORE}
""", {
    "no-proxy-fence": "proxy-fence", "no-barrier": "wgmma-hazard|proxy-fence|race",
    "one-buffer": "wgmma-hazard", "no-wait": "wgmma-hazard", "uncommitted": "wgmma-hazard"},
                factors())

# cp.async brings the tiles, one after the other
COPIED = kernel("copied", "d_a d_b d_out", "tiles_a:2048:128 tiles_b:1024:128", f"""
{PLACE}
{CLEAR}
add.u32 %r_to_a, %r_tiles_a, %r_at; add.u32 %r_to_b, %r_tiles_b, %r_at;
mov.u32 %r_a, %r_tiles_a; mov.u32 %r_b, %r_tiles_b;
{descriptor("a")}
{descriptor("b")}
mov.u32 %r_turn, 0;
TURN:
cp.async.cg.shared.global [%r_to_a], [%d_from_a], 16;  //: at=no-proxy-fence,no-copy-wait,freed-early
@!%p_no_b cp.async.cg.shared.global [%r_to_b], [%d_from_b], 16; //: at=no-proxy-fence,no-copy-wait,freed-early
cp.async.commit_group;
cp.async.wait_group 0;                                 //: cure=no-copy-wait
fence.proxy.async.shared::cta;                         //: cure=no-proxy-fence
bar.sync 0;
wgmma.fence.sync.aligned;                              //: cure=scaled-unfenced
//: at=no-proxy-fence,no-copy-wait,freed-early,scaled-unfenced
{multiply("%d_a", "0, 0")}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;                       //: cure=freed-early,scaled-early
{" ".join(f"add.f32 %f_c{i}, %f_c{i}, %f_c{i};" for i in range(16))} //: cure=freed-early at=scaled-early
bar.sync 0;
add.s64 %d_from_a, %d_from_a, 32; add.s64 %d_from_b, %d_from_b, 32;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra TURN;
wgmma.wait_group.sync.aligned 0;
{STORE}
""", {"no-proxy-fence": "proxy-fence", "no-copy-wait": "async-hazard|wgmma-hazard",
      "freed-early": "wgmma-hazard",
      "scaled-unfenced": "wgmma-hazard", "scaled-early": "wgmma-hazard"},
                factors(twice=True), refused="scaled-unfenced scaled-early")

# A comes straight into registers; the six tiles of B are all there before
HELD = kernel("held", "d_a d_b d_out", f"tiles_b:{1024 * TURNS}:128", f"""
{PLACE}
{CLEAR}
add.u32 %r_to, %r_tiles_b, %r_at;
mov.u32 %r_turn, 0;
FILL:
@!%p_no_b ld.global.v4.b32 {{%r_v0, %r_v1, %r_v2, %r_v3}}, [%d_from_b];
@!%p_no_b st.shared.v4.b32 [%r_to], {{%r_v0, %r_v1, %r_v2, %r_v3}};
add.s64 %d_from_b, %d_from_b, 32; add.u32 %r_to, %r_to, 1024;
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
shl.b32 %r_row, %r_warp, 4; shr.u32 %r_x, %r_lane, 2; add.u32 %r_row, %r_row, %r_x;
and.b32 %r_x, %r_lane, 3; shl.b32 %r_x, %r_x, 2; mad.lo.u32 %r_x, %r_row, 192, %r_x;
cvt.u64.u32 %d_x, %r_x; add.s64 %d_from_a, %d_a, %d_x;
mov.u32 %r_b, %r_tiles_b;
mov.u32 %r_turn, 0;
TURN:
ld.global.b32 %r_a0, [%d_from_a]; ld.global.b32 %r_a1, [%d_from_a+1536]; //: at=overwritten
ld.global.b32 %r_a2, [%d_from_a+16]; ld.global.b32 %r_a3, [%d_from_a+1552];
{descriptor("b")}
wgmma.fence.sync.aligned;                              //: cure=a-unfenced
{multiply("{" + registers("r_a", 4) + "}", "0")}    //: at=a-unfenced,past-end
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;                       //: cure=overwritten
add.s64 %d_from_a, %d_from_a, 32; add.u32 %r_b, %r_b, 1024;
add.u32 %r_b, %r_b, 512;                               //: bug=past-end
add.u32 %r_turn, %r_turn, 1;
setp.lt.u32 %p_more, %r_turn, {TURNS};
@%p_more bra TURN;
wgmma.wait_group.sync.aligned 0;
{STORE}
""", {"overwritten": "wgmma-hazard", "a-unfenced": "wgmma-hazard", "past-end": "out-of-bounds"},
              factors(), refused="a-unfenced")

KERNELS = [STAGED, COPIED, HELD]
