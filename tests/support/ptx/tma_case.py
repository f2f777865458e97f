"""Kernels around tensor copies, and a second derivation of what they must do.

What must lie in shared memory is derived a second time here, from indices: element (…, i1, i0) of a box is
at its place in a dense array, whose 16-byte pieces are then exchanged within each 128-byte line of shared
memory by the line's number. Data are integers, so results are exact.
"""
from __future__ import annotations

import itertools

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

SEEDS = (0, 1, 2, 3)
PERIODS = {"none": 1, "32B": 2, "64B": 4, "128B": 8}  # lines after which the exchange repeats
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 p0, .param .u64 p1{params}) {{
  .reg .pred %p<8>; .reg .b16 %h<4>; .reg .b32 %r<40>; .reg .b64 %d<20>;
  .shared .align 1024 .b8 tile[16384];
  .shared .align 128 .b8 edited[128];
  .shared .align 8 .b64 bar[2];
  mov.b64 %d2, map;
  cvta.param.u64 %d2, %d2;
  ld.param.u64 %d0, [p0];
  ld.param.u64 %d1, [p1];
  mov.u32 %r0, %tid.x;
  mov.u32 %r2, tile;
  mov.u32 %r4, bar;
  mov.u32 %r5, edited;
  setp.eq.u32 %p0, %r0, 0;
{body}
  ret;
}}
"""
INIT = """
  @%p0 mbarrier.init.shared::cta.b64 [%r4], 1;
  @%p0 fence.mbarrier_init.release.cluster;
  bar.sync 0;
"""
EXPECT = "  @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], {bytes};\n"
WAIT = """
W0: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], 0;
  @!%p1 bra W0;
"""
# all of `tile`'s first {bytes} bytes to p1, or from it
OUT = """
  mov.u32 %r10, %r0;
L1: setp.ge.u32 %p2, %r10, {words};
  @%p2 bra L2;
  mad.lo.u32 %r11, %r10, 4, %r2;
  mad.wide.u32 %d3, %r10, 4, %d1;
  ld.shared.b32 %r12, [%r11];
  st.global.b32 [%d3], %r12;
  add.u32 %r10, %r10, 32;
  bra L1;
L2:
"""
IN = OUT.replace("ld.shared.b32 %r12, [%r11]", "ld.global.b32 %r12, [%d3]").replace(
    "st.global.b32 [%d3], %r12", "st.shared.b32 [%r11], %r12").replace("L1", "L3").replace("L2", "L4")
FENCE = "  fence.proxy.async.shared::cta;\n  bar.sync 0;\n"
DONE = "  cp.async.bulk.commit_group;\n  cp.async.bulk.wait_group 0;\n"


def kernel(body: str, params: str = "") -> str: return HEAD.format(body=body, params=params)


def kinds(report) -> set[str]: return {finding.kind for finding in report.findings}


def place(at, map_: str = "%d2") -> str: return f"[{map_}, {{{', '.join(map(str, at[::-1]))}}}]"


def load_text(at, bytes_: int, more: str = "", map_: str = "%d2", offset: int = 0) -> str:
    """Load of the box at `at` (outermost first)."""
    return (EXPECT.format(bytes=bytes_)
            + f"  @%p0 cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile.mbarrier::complete_tx"
            f"::bytes{more} [%r2+{offset}], {place(at, map_)}, [%r4];\n")


def load(emu: Emulator, map_: TensorMap, at, bytes_: int, offset: int = 0):
    """The bytes of shared memory after a load."""
    out = emu.alloc(np.zeros(bytes_ + offset, np.uint8))
    body = INIT + load_text(at, bytes_, offset=offset) + WAIT
    body += OUT.replace("%r10, %r0;", f"%r10, %r0;\n  add.u32 %r10, %r10, {offset // 4};", 1).format(
        words=(bytes_ + offset) // 4)
    report = emu.launch(kernel(body), grid=1, block=32, args=[map_, out, out])
    return report, out.numpy()[offset:]


def box_of(array: np.ndarray, at, box, steps=None, fill=0) -> np.ndarray:
    """The elements a box covers, `fill` outside the array, one by one."""
    steps = steps or (1,) * len(box)
    steps = (*steps[:-1], 1)
    counts = [-(-b // s) for b, s in zip(box, steps, strict=True)]
    out = np.full(counts, fill, array.dtype)
    for index in itertools.product(*map(range, counts)):
        where = tuple(a + i * s for a, i, s in zip(at, index, steps, strict=True))
        if all(0 <= x < n for x, n in zip(where, array.shape, strict=True)): out[index] = array[where]
    return out


def swizzled(data: bytes, mode: str, offset: int = 0) -> np.ndarray:
    """Dense bytes as they lie in shared memory, from `offset` bytes after a multiple of 1024."""
    period = PERIODS[mode]
    pieces = np.frombuffer(data, np.uint8).reshape(-1, 16)
    out = np.zeros_like(pieces)
    for number, piece in enumerate(pieces):
        line, column = divmod(number + offset // 16, 8)
        out[line * 8 + (column ^ line % period) - offset // 16] = piece
    return out.reshape(-1)


def counting(shape, dtype) -> np.ndarray:
    size = int(np.prod(shape))
    return (np.arange(1, size + 1) % 251).astype(dtype).reshape(shape)


def store(emu: Emulator, map_: TensorMap, at, data: np.ndarray, what: str = "cp", how: str = "",
          body: str | None = None):
    """A box in shared memory, stored or reduced."""
    text = IN.format(words=data.nbytes // 4) + FENCE + (
        f"  @%p0 {what}.async.bulk.tensor.{len(at)}d.global.shared::cta{how}.tile.bulk_group "
        f"{place(at)}, [%r2];\n") + DONE
    return emu.launch(kernel(body or text), grid=1, block=32, args=[map_, emu.alloc(data), emu.alloc(data)])
