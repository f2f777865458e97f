"""The public face: memory, arguments, module variables, shapes, traces and counters; launches that ask for
too much; the survey of mutants."""
from __future__ import annotations

import io
import os
import time
from itertools import pairwise

import numpy as np
import pytest

from tests.support.ptx import fuzz_ptx
from tests.support.ptx.kernel_texts import HEADER, found, kernel, run, sound, words
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, Finding, TensorMap, Trace
from tinygrad_nv.ptx.emulator.tapes import Tapes

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
COPY = """mad.wide.u32 %d1, %t, 4, %a0; ld.global.b32 %r1, [%d1];
mad.wide.u32 %d2, %t, 4, %a1; st.global.b32 [%d2], %r1;"""


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "int32", "float32", "float64", "int64",
                                   "bool"])
def test_memory_keeps_shape_type_and_values(dtype: str):
    array = (np.arange(24) % 2).reshape(2, 3, 4).astype(dtype)
    buffer = Emulator().alloc(array.transpose(2, 0, 1))  # not contiguous
    got = buffer.numpy()
    assert (got.dtype, got.shape) == (array.dtype, (4, 2, 3))
    np.testing.assert_array_equal(got, array.transpose(2, 0, 1))


def test_memory_is_a_copy_both_ways():
    array = np.zeros(4, np.int32)
    buffer = Emulator().alloc(array)
    array[0] = 7
    buffer.numpy()[1] = 7
    assert buffer.numpy().tolist() == [0, 0, 0, 0]


def test_allocations_lie_apart_and_are_aligned():
    emu = Emulator()
    buffers = [emu.alloc(size) for size in (1, 100, 1 << 17, 3)]
    assert all(b.ptr % 512 == 0 for b in buffers)
    assert all(b.ptr - (a.ptr + a.nbytes) >= 1 << 15 for a, b in pairwise(buffers))


def test_each_kind_of_argument_arrives():
    text = HEAD + """.visible .entry k(.param .u64 out, .param .u32 a, .param .s64 b, .param .f32 c,
 .param .f64 d, .param .u16 e, .param .u8 f, .param .align 8 .b8 g[12]) {
 .reg .b64 %o, %x; .reg .b32 %r; .reg .b16 %h;
 ld.param.u64 %o, [out];
 ld.param.u32 %r, [a]; st.global.u32 [%o], %r;
 ld.param.u64 %x, [b]; st.global.u64 [%o+8], %x;
 ld.param.b32 %r, [c]; st.global.b32 [%o+4], %r;
 ld.param.b64 %x, [d]; st.global.b64 [%o+16], %x;
 ld.param.u16 %h, [e]; st.global.u16 [%o+24], %h;
 ld.param.u8 %h, [f]; st.global.u16 [%o+26], %h;
 ld.param.b32 %r, [g+8]; st.global.b32 [%o+28], %r;
 ret; }"""
    emu = Emulator()
    out = emu.alloc(32)
    sound(emu.launch(text, 1, 1, [out.ptr, 7, -2, 1.5, np.float64(0.1), 65535, True, b"abcdefghijkl"]))
    raw = out.numpy().tobytes()
    assert np.frombuffer(raw, "<u4", 1)[0] == 7
    assert np.frombuffer(raw, "<f4", 1, 4)[0] == 1.5
    assert np.frombuffer(raw, "<i8", 1, 8)[0] == -2
    assert np.frombuffer(raw, "<f8", 1, 16)[0] == 0.1
    assert np.frombuffer(raw, "<u2", 2, 24).tolist() == [65535, 1]
    assert raw[28:] == b"ijkl"


def test_module_variables_keep_what_launches_wrote():
    text = HEAD + """.global .align 4 .u32 calls = 40; .const .align 4 .u32 table[2] = {1, 2};
.visible .entry k(.param .u64 out) { .reg .b64 %o; .reg .b32 %r<3>; ld.param.u64 %o, [out];
 ld.global.u32 %r0, [calls]; ld.const.u32 %r1, [table+4]; add.u32 %r0, %r0, %r1; st.global.u32 [calls], %r0;
 st.global.u32 [%o], %r0; ret; }"""
    emu = Emulator()
    out = emu.alloc(4)
    for want in (42, 44):
        sound(emu.launch(text, 1, 1, [out]))
        assert words(out)[0] == want
    other = Emulator()
    out = other.alloc(4)
    sound(other.launch(text, 1, 1, [out]))
    assert words(out)[0] == 42


def test_grids_in_three_dimensions():
    """Each thread writes its place: every CTA and thread is there once."""
    body = """mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y;
mad.lo.u32 %r1, %r1, %r2, %r3;
mov.u32 %r2, %nctaid.x; mad.lo.u32 %r1, %r1, %r2, %c;
mov.u32 %r2, %ntid.z; mov.u32 %r3, %tid.z; mad.lo.u32 %r1, %r1, %r2, %r3;
mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mad.lo.u32 %r1, %r1, %r2, %r3;
mov.u32 %r2, %ntid.x; mad.lo.u32 %r1, %r1, %r2, %t;
mad.wide.u32 %d1, %r1, 4, %a0; atom.global.add.u32 %r4, [%d1], %r1;"""
    emu = Emulator()
    count = 2 * 3 * 4 * 5 * 3 * 2
    out = emu.alloc(np.ones(count, np.int32))
    sound(emu.launch(kernel(body, (out,)), (4, 3, 2), (5, 3, 2), [out]))
    assert words(out).tolist() == list(range(1, count + 1))


def test_more_clusters_than_the_device_holds_run_in_turn():
    emu = Emulator()
    out = emu.alloc(np.zeros(3000, np.int32))
    body = "mad.wide.u32 %d1, %c, 4, %a0; st.global.u32 [%d1], %c;"
    sound(run(body, out, emu=emu, grid=3000, block=1, dynamic=200_000))
    assert words(out).tolist() == list(range(3000))


def test_ctas_wait_for_ctas_that_come_later():
    """CTA 0 spins on a flag of the last: all that fit on the device are started."""
    emu = Emulator()
    flag = emu.alloc(np.zeros(1, np.int32))
    body = """setp.eq.u32 %p1, %c, 99; @!%p1 bra WAIT; mov.u32 %r1, 1;
st.release.gpu.global.u32 [%a0], %r1; bra END;
WAIT: ld.acquire.gpu.global.u32 %r1, [%a0]; setp.eq.u32 %p2, %r1, 0; @%p2 bra WAIT;
END: nanosleep.u32 1;"""
    sound(run(body, flag, emu=emu, grid=100, block=32))


def test_counters():
    emu = Emulator()
    a, b = emu.alloc(np.arange(64, dtype=np.int32)), emu.alloc(256)
    stats = run(COPY, a, b, emu=emu, block=64).stats
    assert stats.instructions["ld.global.b32"] == 2
    assert stats.warp_instructions == sum(stats.instructions.values())
    assert (stats.global_read_bytes, stats.global_written_bytes, stats.l2_bytes) == (256, 256, 512)
    assert set(stats.sectors_per_request.values()) == {4.0}


def test_a_trace_names_lines_and_values():
    emu = Emulator()
    a, b = emu.alloc(np.arange(64, dtype=np.int32)), emu.alloc(256)
    said = io.StringIO()
    emu.launch(kernel(COPY, (a, b)), 1, 64, [a, b], trace=Trace(cta=0, warps=(1,), file=said))
    text = said.getvalue()
    assert "warp 1" in text
    assert "warp 0" not in text
    assert "ld.global.b32" in text
    assert "%r1=0x20" in text  # thread 32 read element 32


def test_a_finding_prints_itself():
    text = str(Finding("race", "what happened", 12, (0, 3), (5, 7), 2))
    assert text == "race: line 12: what happened [CTA 0, 3; thread 5, 7] (2 times)"


def test_what_was_lowered_once_is_used_again():
    emu = Emulator()
    a, b = emu.alloc(np.arange(64, dtype=np.int32)), emu.alloc(256)
    text = kernel(COPY, (a, b))
    emu.launch(text, 1, 64, [a, b])
    (loaded,) = emu.modules.values()
    before = loaded.program(loaded.module.functions["test"])
    emu.launch(text, 1, 64, [b, a])
    assert loaded.program(loaded.module.functions["test"]) is before


def test_what_was_lowered_once_serves_all_emulators_but_for_other_addresses():
    """Variables of a module lie elsewhere where something was allocated before."""
    text = HEAD + """.global .b32 counter; .visible .entry k(.param .b64 out) {
        .reg .b32 %r<3>; .reg .b64 %d<3>; mov.u64 %d1, counter; ld.global.u32 %r1, [%d1]; add.u32 %r1, %r1, 7;
        st.global.u32 [%d1], %r1; ld.param.u64 %d2, [out]; st.global.u32 [%d2], %r1; ret; }"""
    first, again, other = Emulator(), Emulator(seed=1), Emulator()
    other.alloc(1 << 20)
    made = []
    for emu in (first, again, other):
        out = [emu.alloc(4)] if emu is not other else [other.alloc(4)]
        sound(emu.launch(text, 1, 1, out))
        assert out[0].numpy().view(np.int32) == [7], "the counter of another emulator is another one"
        (loaded,) = emu.modules.values()
        made.append(loaded.program(loaded.module.functions["k"]))
    assert made[0] is made[1] is not made[2]


def test_a_tensor_map_is_an_argument():
    emu = Emulator()
    buffer = emu.alloc(np.zeros((64, 64), np.float16))
    text = HEAD + ".visible .entry k(.param .align 64 .b8 map[128]) { ret; }"
    sound(emu.launch(text, 1, 1, [TensorMap.of_tiles(buffer, box=(64, 64), swizzle="128B")]))


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


def test_what_ends_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(seed: int, index: int) -> str:
        if index == 1: time.sleep(1.5)
        if index == 2: time.sleep(60)
        if index == 3: os._exit(7)
        if index == 4: raise ValueError("one of ours")
        return "found" if index == 1 else "runs"

    monkeypatch.setattr(fuzz_ptx, "outcome", outcome)
    monkeypatch.setattr(fuzz_ptx, "kernels", tuple)
    monkeypatch.setattr(fuzz_ptx, "library", lambda: None)
    told: list[str] = []
    counts, bad = fuzz_ptx.survey(0, 6, told.append, seconds=1, alone=4)
    assert counts == {"runs": 2, "found": 1, "slow": 1, "timeout": 1, "crash": 2}
    assert bad == [2, 3, 4]
    text = "\n".join(told)
    assert [word for word in ("mutant 1: 1 s were too few; alone within 4 s: found", "mutant 2: timeout",
                              "mutant 3: ended its process (7)", "ValueError: one of ours")
            if word not in text] == [], text
