"""Launches that go where C's arrays end, or that would take all of the host's memory."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import HEADER, found, kernel, run
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.emulator.tapes import Tapes


@pytest.mark.parametrize(("width", "offset"), [(32, -4), (64, -8), (8, -1), (32, 1 << 31),
                                               (64, (1 << 63) - 8)])
def test_parameters_end(width: int, offset: int) -> None:
    register = "%d1" if width == 64 else "%h1" if width == 8 else "%r1"
    found(run(f"ld.param.u{width} {register}, [p0+{offset}];", 7), "out-of-bounds", "param")


def part_lanes(stage: int, lanes: int, end: int, gap: int = 200_000) -> str:
    """All lanes but one leave one another and meet again, by joins that are broken: one stays in them."""
    def spin(label: str, until: int) -> str:
        return f"{label}: mov.u64 %d1, %clock64; setp.lt.u64 %p2, %d1, {until}; @%p2 bra {label};"

    def at(lane: int) -> int: return (stage * 33 + lanes - lane) * gap

    text = [f"setp.eq.u32 %p1, %t, {lane}; @%p1 bra S{stage}_{lane};" for lane in range(lanes - 1)]
    text.append(spin(f"E{stage}", end))
    for lane in reversed(range(lanes - 1)):
        text += [f"bra J{stage}_{lane};", spin(f"S{stage}_{lane}", at(lane)), f"J{stage}_{lane}:",
                 spin(f"A{stage}_{lane}", at(lane - 1))]
    return "\n".join(text)


def test_more_joins_than_there_is_room_for() -> None:
    emu = Emulator(check=False)
    out = emu.alloc(np.zeros(32, np.uint32))
    body = "\n".join(part_lanes(stage, 32 - stage, 4 * 33 * 200_000) for stage in range(3))
    assert run(f"{body}\nmad.wide.u32 %d2, %t, 4, %a0; st.global.u32 [%d2], %t;", out, emu=emu).findings == []
    assert out.numpy().tolist() == list(range(32))


@pytest.mark.parametrize("step", [1 << 63, 1 << 62, (1 << 64) - 1, 0])
def test_draws_of_large_steps(step: int) -> None:
    """A step times the clusters that each stands for wraps, to 0 too."""
    emu = Emulator()
    counter = emu.alloc(np.full(1, (1 << 64) - 2, np.uint64))
    body = f"mov.u64 %d1, {step};" + "atom.global.add.u64 %d2, [%a0], %d1;" * 2
    tapes = Tapes((0,))
    emu.launch(kernel(body, (counter,)), 4, 1, [counter], tapes=tapes)
    assert tapes.warps


@pytest.mark.parametrize("box", [(0xff, 0xff, 0xff, 0xff), (0x7f, 0xff, 0xff, 0xff), (0x1f, 0x1f, 0x1f, 0)])
def test_boxes_beyond_shared_memory(box: tuple[int, ...]) -> None:
    """The rows of 256⁴ are 2³², whose low 32 bits are 0."""
    emu = Emulator()
    array = emu.alloc(np.zeros((2, 2, 2, 2, 64), np.uint16))
    data = bytearray(TensorMap.of_tiles(array, box=(1, 1, 1, 1, 64)).encode())
    data[0x38:0x3c] = bytes(box)
    text = HEADER.format(arch="sm_90a") + """.entry test(.param .align 64 .b8 map[128]) { .reg .b64 %d<2>;
        mov.b64 %d1, map; cvta.param.u64 %d1, %d1;
        cp.async.bulk.prefetch.tensor.5d.L2.global [%d1, {0, 0, 0, 0, 0}]; ret; }"""
    found(emu.launch(text, 1, 1, [bytes(data)]), "out-of-bounds", "a box larger than shared memory")


def test_mbarriers_of_a_cta() -> None:
    many = """mov.u32 %r2, 0; mov.u32 %r1, s; LOOP: mbarrier.init.shared.b64 [%r1], 1; add.u32 %r1, %r1, 8;
              add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, COUNT; @%p1 bra LOOP;"""
    for count, kinds in ((1024, []), (1025, ["barrier"])):
        report = run(many.replace("COUNT", str(count)), block=1, variables=".shared .align 8 .b8 s[65536];\n")
        assert [each.kind for each in report.findings] == kinds, list(map(str, report.findings))


TOUCH = """mov.u64 %d1, x; mov.u32 %r1, 0; mad.wide.u32 %d1, %t, 4096, %d1;
LOOP: st.global.u32 [%d1], %r1; add.u64 %d1, %d1, 131072; add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 2048; @%p1 bra LOOP;"""


def test_memory_that_is_touched() -> None:
    """A word in each page of 4 KiB: of 256 MiB the checks would keep 2 GiB."""
    emu = Emulator(max_memory=64 << 20)
    found(run(TOUCH, emu=emu, variables=".global .align 4 .b8 x[268435456];\n"), "instruction-limit",
          "the limit of the emulator's memory", "accesses to much memory")


def test_threads_that_take_much_memory() -> None:
    """Many registers, or local memory: refused, or fewer clusters run at a time."""
    few = "\n".join(f"mov.u64 %x{i}, {i};" for i in range(4000))
    text = f".reg .b64 %x<4000>; {few}\natom.global.max.u64 %d1, [%a0], %x3999;"
    emu = Emulator(max_memory=160 << 20)    # a CTA of 1024 threads has 62 MiB
    out = emu.alloc(np.zeros(1, np.uint64))
    assert run(text, out, emu=emu, grid=4, block=1024).findings == []
    assert out.numpy().tolist() == [3999]
    words = r"(?s)PTX line 4.*of registers a warp.*at most 24 MiB.*--max-memory"
    for given in (text, ".local .b8 x[65536];\nst.local.u8 [x], %h1;"):
        small = Emulator(max_memory=48 << 20)
        with pytest.raises(PTXError, match=words):
            run(given, small.alloc(np.zeros(1, np.uint64)), emu=small, block=1024)
