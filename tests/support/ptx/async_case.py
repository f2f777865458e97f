"""Kernels around asynchronous copies: a thread's 16 bytes of shared and global memory, an mbarrier, waits."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator

SEEDS = (0, 1, 2, 3)
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k({params}) {{
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<20>; .reg .f32 %f<8>;
  .shared .align 128 .b8 tile[4096];
  .shared .align 128 .b8 other[4096];
  .shared .align 8 .b64 bar[4];
{loads}
  mov.u32 %r0, %tid.x;
  shl.b32 %r1, %r0, 4;
  mov.u32 %r2, tile;
  add.u32 %r3, %r2, %r1;
  mov.u32 %r4, bar;
  mov.u32 %r5, other;
  add.u32 %r6, %r5, %r1;
  cvt.u64.u32 %d8, %r1;
  setp.eq.u32 %p0, %r0, 0;
{body}
  ret;
}}
"""
INIT = """
  @%p0 mbarrier.init.shared::cta.b64 [%r4], {count};
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
WAIT = """
W{n}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4{at}], {parity};
  @!%p1 bra W{n};
"""


def wait(n: int = 0, parity: int = 0, at: str = "") -> str: return WAIT.format(n=n, parity=parity, at=at)


def kernel(body: str, pointers: int = 2, scalars: int = 0) -> str:
    """A kernel whose pointer parameters are in %d0…, 32-bit ones in %r20…; thread t's 16 bytes of `tile` are
    at %r3, of `other` at %r6, and %d8 is 16 t."""
    names = [*(f".param .u64 p{i}" for i in range(pointers)), *(f".param .u32 s{i}" for i in range(scalars))]
    loads = [*(f"  ld.param.u64 %d{i}, [p{i}];" for i in range(pointers)),
             *(f"  ld.param.u32 %r{20 + i}, [s{i}];" for i in range(scalars))]
    return HEAD.format(params=", ".join(names), loads="\n".join(loads), body=body)


def kinds(report) -> set[str]: return {finding.kind for finding in report.findings}


def run(body: str, *args, seed: int = 0, block: int = 32, scalars: int = 0, **more):
    emu = Emulator(seed=seed)
    buffers = [emu.alloc(a) if isinstance(a, np.ndarray) else a for a in args]
    pointers = len(args) - scalars
    return emu.launch(kernel(body, pointers, scalars), grid=more.pop("grid", 1), block=block, args=buffers,
                      **more), [b.numpy() for b in buffers[:pointers]]


def numbers(count: int) -> np.ndarray: return np.arange(1, count + 1, dtype=np.uint32)


DATA, ZEROS, SEVENS = numbers(128), np.zeros(128, np.uint32), np.full(128, 7, np.uint32)
CG = "cp.async.cg.shared.global [%r3], [%d2], 16;\n"
COMMIT = "cp.async.commit_group;\n"
# addresses of a thread's 16 bytes of p0 and p1; its 16 bytes of `tile` to p1
COPY = "  add.u64 %d2, %d0, %d8;\n  add.u64 %d3, %d1, %d8;\n"
BACK = """  ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r3];
  st.global.v4.b32 [%d3], {%r10, %r11, %r12, %r13};
"""
