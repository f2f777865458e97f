"""Loads and stores: every space, type and vector; bounds, alignment, initialisation; sectors and bank
conflicts."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import found, kinds, run, sound, words
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator

RNG = np.random.default_rng(1)
SHARED = ".shared .align 1024 .b8 tile[4096];\n"
REGISTER = {1: "h", 2: "h", 4: "r", 8: "d", 16: "q"}
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
         "b128")


def bits(kind: str) -> int:
    """Width of a type."""
    return int(kind[1:])


def operands(kind: str, count: int) -> str:
    """Registers for a vector."""
    names = [f"%{REGISTER[bits(kind) // 8]}{i}" for i in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def copy(space: str, address: str, kind: str, count: int) -> str:
    """A body that carries each thread's elements from %a0 to %a1 by way of `space`."""
    size, opcode = bits(kind) // 8 * count, f"{f'.v{count}' if count > 1 else ''}.{kind}"
    return f"""
        mad.wide.u32 %d28, %t, {size}, %a0; mad.wide.u32 %d29, %t, {size}, %a1;
        {address.format(size=size)}
        ld.global{opcode} {operands(kind, count)}, [%d28];
        st{space}{opcode} [%d30], {operands(kind, count)};
        ld{space}{opcode} {operands(kind, count)}, [%d30];
        st.global{opcode} [%d29], {operands(kind, count)};"""


# places of a thread's own in each space, in %d30
SPACES = {
    ".global": "mov.b64 %d30, module; mad.wide.u32 %d30, %t, {size}, %d30;",
    ".shared": "mov.b64 %d30, tile; mad.wide.u32 %d30, %t, {size}, %d30;",
    ".shared::cta": "mov.b64 %d30, tile; mad.wide.u32 %d30, %t, {size}, %d30;",
    ".local": "mov.b64 %d30, depot;",
    "": "mov.b64 %d30, tile; cvta.shared.u64 %d30, %d30; mad.wide.u32 %d30, %t, {size}, %d30;",
    " ": "mov.b64 %d30, depot; cvta.local.u64 %d30, %d30;",
    "  ": "mov.b64 %d30, module; cvta.global.u64 %d30, %d30; mad.wide.u32 %d30, %t, {size}, %d30;"}


@pytest.mark.parametrize("space", SPACES)
def test_every_type_and_vector_passes_through_every_space(space: str) -> None:
    for kind in TYPES:
        for count in (1, 2, 4):
            if bits(kind) * count > 128: continue
            emu = Emulator()
            data = RNG.integers(0, 256, bits(kind) // 8 * count * 32, dtype=np.uint8)
            a, b = emu.alloc(data), emu.alloc(data.nbytes)
            body = ".local .align 16 .b8 depot[64];\n" + copy(space.strip(), SPACES[space], kind, count)
            sound(run(body, a, b, emu=emu, variables=SHARED + ".global .align 1024 .b8 module[4096];\n"))
            assert np.array_equal(b.numpy(), data), (space, kind, count)


@pytest.mark.parametrize("kind", ["u8", "s8", "b8", "u16", "s16", "u32", "s32"])
def test_loads_extend_to_the_register(kind: str) -> None:
    dtype = np.dtype({"b": "u", "u": "u", "s": "i"}[kind[0]] + str(bits(kind) // 8))
    info = np.iinfo(dtype)
    values = np.array([0, 1, info.max, info.max - 1, info.min,
                       info.min // 2 - 1 if info.min else info.max // 2 + 1],
                      dtype).repeat(6)[:32]
    for register, width in (("h", 2), ("r", 4), ("d", 8)):
        if width * 8 < bits(kind): continue
        emu = Emulator()
        a, b = emu.alloc(values), emu.alloc(8 * 32)
        sound(run(f"""mad.wide.u32 %d1, %t, {dtype.itemsize}, %a0; mad.wide.u32 %d2, %t, {width}, %a1;
                      ld.global.{kind} %{register}3, [%d1];
                      st.global.b{8 * width} [%d2], %{register}3;""", a, b, emu=emu))
        got = b.numpy()[:32 * width].view(f"{dtype.kind}{width}")
        assert np.array_equal(got, values.astype(f"{dtype.kind}{width}")), (kind, register)


def test_a_16_bit_register_keeps_no_more_than_16_bits() -> None:
    """-1 loaded as s8 into 16 bits, then widened as unsigned, or beside zeros."""
    emu = Emulator()
    a, b = emu.alloc(np.full(1, -1, np.int8)), emu.alloc(8)
    sound(run("""mov.b16 %h2, 0; ld.global.s8 %h1, [%a0]; cvt.u32.u16 %r1, %h1; mov.b32 %r2, {%h1, %h2};
                 st.global.v2.u32 [%a1], {%r1, %r2};""", a, b, emu=emu, block=1))
    assert words(b).tolist() == [0xffff, 0xffff]


def test_stores_take_the_low_bits_of_wider_registers() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(16, np.uint8))
    sound(run("""mov.b64 %d1, 0x1122334455667788; mov.b32 %r1, 0xaabbccdd;
                 st.global.b8 [%a0], %d1; st.global.b16 [%a0+2], %d1; st.global.b32 [%a0+4], %d1;
                 st.global.b8 [%a0+1], %r1; st.global.v2.b16 [%a0+8], {%r1, %r1};""", a, emu=emu, block=1))
    assert a.numpy().tobytes().hex() == "88dd8877" "88776655" "ddccddcc" "00000000"


def test_vectors_hold_immediates_sinks_and_single_items() -> None:
    emu = Emulator()
    a, b = emu.alloc(np.arange(4, dtype=np.uint32) + 10), emu.alloc(np.zeros(4, np.uint32))
    sound(run("""ld.global.v4.b32 {_, %r1, _, %r2}, [%a0]; st.global.v4.b32 [%a1], {%r2, 7, %r1, -1};
                 ld.global.b32 {%r3}, [%a0]; st.global.b32 [%a1+8], {%r3};""", a, b, emu=emu, block=1))
    assert words(b).tolist() == [13, 7, 10, 0xffffffff]


def test_hints_are_accepted() -> None:
    emu = Emulator()
    a = emu.alloc(np.arange(32, dtype=np.uint32))
    report = run("""mov.b64 %d1, 0x12f0000000000000;
        ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%r1, %r2, %r3, %r4}, [%a0];
        ld.global.L1::evict_last.L2::cache_hint.b32 %r5, [%a0+16], %d1; ld.global.cg.b32 %r6, [%a0];
        ldu.global.b32 %r7, [%a0]; ld.weak.global.ca.b32 %r8, [%a0]; st.global.cs.b32 [%a0], %r1;
        st.global.L2::cache_hint.b32 [%a0+4], %r2, %d1;
        prefetch.global.L2 [%a0]; prefetchu.L1 [%a0]; prefetch.global.L1 [%a0+1000000];
        applypriority.global.L2::evict_normal [%a0], 128;""", a, emu=emu, block=1)
    sound(report)
    assert ["which ld.global.nc (line 6) has read" in note.message for note in report.notes] == [True, True]
    assert words(a).tolist() == list(range(32))


def test_parameters_by_name_by_address_and_generic() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(4, np.uint32))
    sound(run("""ld.param.u32 %r1, [p1]; mov.b64 %d1, p1; ld.param.u32 %r2, [%d1+4];
                 cvta.param.u64 %d2, %d1; ld.u32 %r3, [%d2]; ld.param.v2.u32 {%r4, %r5}, [p1];
                 st.global.v4.u32 [%a0], {%r1, %r2, %r3, %r5};""", a, 5, 6, emu=emu, block=1))
    assert words(a).tolist() == [5, 6, 5, 6]


def test_constants_and_module_variables() -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(4, np.uint32))
    variables = ".const .align 4 .u32 table[4] = {3, 1, 4, 1};\n.global .align 4 .u32 total;\n"
    body = """ld.const.u32 %r1, [table+8];
              mov.b64 %d1, table; mad.wide.u32 %d1, %t, 4, %d1; ld.const.u32 %r2, [%d1];
              ld.global.u32 %r3, [total]; add.u32 %r3, %r3, 1; st.global.u32 [total], %r3;
              st.global.v4.u32 [%a0], {%r1, %r2, %r3, 0};"""
    sound(run(body, a, emu=emu, block=1, variables=variables))
    assert words(a).tolist() == [4, 3, 1, 0]
    sound(run(body, a, emu=emu, block=1, variables=variables))
    assert words(a)[2] == 2  # the variable lives as long as the module


def test_shared_memory_of_another_cta() -> None:
    """Rank 0 writes into rank 1's memory, which it addresses by the rank in bits 24 and up."""
    emu = Emulator()
    a = emu.alloc(np.zeros(2, np.uint32))
    body = """mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, tile; xor.b32 %r3, %r2, 0x1000000;
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
              add.u32 %r4, %r1, 40; st.shared::cluster.u32 [%r3], %r4;
              barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
              ld.shared.u32 %r5, [%r2]; mad.wide.u32 %d1, %r1, 4, %a0; st.global.u32 [%d1], %r5;"""
    sound(run(body, a, emu=emu, grid=2, block=1, cluster=2, variables=SHARED))
    assert words(a).tolist() == [41, 40]
    report = run(body.replace("st.shared::cluster", "st.shared"), a, grid=2, emu=emu, block=1, cluster=2,
                 variables=SHARED)
    assert set(kinds(report)) == {"out-of-bounds", "uninitialized"}
    assert ".shared::cluster reaches other CTAs" in report.findings[0].message


# **** what is wrong ****

OUTSIDE = {  # instruction of one thread (%a0: 64 bytes), words of the finding
    "past the end": ("ld.global.b32 %r1, [%a0+64];", "read of 4 bytes", "begins 0 bytes past the end",
                     "64 bytes"),
    "across the end": ("st.global.b8 [%a0+64], %r1;", "write of 1 bytes",
                       "past the end of the allocation of 64"),
    "half outside": ("add.u64 %d1, %a0, 56; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d1];",
                     "ends 8 bytes past the end"),
    "before": ("ld.global.b64 %d1, [%a0+-16];", "16 bytes before the allocation of 64 bytes"),
    "null": ("mov.b64 %d1, 0; ld.global.b32 %r1, [%d1];", "read of 4 bytes at 0x0,"),
    "generic null": ("mov.b64 %d1, 8; st.b32 [%d1], %r1;", "write of 4 bytes at 0x8,"),
    "shared": ("mov.u32 %r2, tile; ld.shared.b32 %r1, [%r2+4096];",
               "4 bytes past the 4096 bytes of shared memory at 0x400"),
    "below shared": ("mov.u32 %r2, tile; st.shared.b32 [%r2+-1024], %r1;",
                     "1024 bytes before the 4096 bytes of shared memory at 0x400"),
    "generic shared": ("mov.b64 %d1, tile; cvta.shared.u64 %d1, %d1; st.b32 [%d1+8192], %r1;",
                       "shared address 0x2400"),
    "no such rank": ("mov.u32 %r2, 0x3000400; ld.shared::cluster.b32 %r1, [%r2];", "rank 3",
                     "the cluster has 1"),
    "local": ("mov.b64 %d1, depot; st.local.b32 [%d1+64], %r1;",
              "offset 0x40 of the 64 bytes of local memory"),
    "parameters": ("mov.b64 %d1, p0; ld.param.b32 %r1, [%d1+4096];", "param memory"),
    "parameters are constant": ("mov.b64 %d1, p0; cvta.param.u64 %d1, %d1; st.b32 [%d1], %r1;",
                                "can only be read")}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", OUTSIDE)
def test_out_of_bounds(name: str, check: bool) -> None:
    """With checks on or off; the kernel goes on."""
    body, *message = OUTSIDE[name]
    emu = Emulator(check=check)
    a = emu.alloc(np.zeros(16, np.uint32))
    report = run(".local .align 16 .b8 depot[64];\nmov.b32 %r1, 1;\n" + body + "\nst.global.u32 [%a0+4], 99;",
                 a, emu=emu, block=1, variables=SHARED)
    found(report, "out-of-bounds", *message)
    assert report.findings[0].ptx_line == 8
    assert words(a).tolist() == [0, 99, *[0] * 14]  # nothing else was written


def test_lanes_outside_do_not_hurt_the_others() -> None:
    """Loads outside give 0, stores outside are dropped; the finding counts the lanes."""
    emu = Emulator()
    a, b = emu.alloc(np.arange(1, 21, dtype=np.uint32)), emu.alloc(np.full(32, 7, np.uint32))
    report = run("""mad.wide.u32 %d1, %t, 4, %a0; mad.wide.u32 %d2, %t, 4, %a1; mov.b32 %r1, 5;
                    ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;
                    st.global.u32 [%d1], 3;""",
                 a, b, emu=emu)
    found(report, "out-of-bounds", "past the end")
    assert words(b).tolist() == [*range(1, 21), *[0] * 12]
    assert words(a).tolist() == [3] * 20
    assert sorted(finding.count for finding in report.findings) == [12, 12]


@pytest.mark.parametrize("lane", [0, 13, 31])
def test_one_lane_is_enough(lane: int) -> None:
    """One of 32 lanes reads at the end, half outside, outside, or at an address that is not aligned."""
    for offset, size, kind in ((260, 4, ""), (264, 4, "out-of-bounds"), (256, 8, ""),
                               (256, 16, "out-of-bounds"), (252, 8, "misaligned"), (2, 4, "misaligned")):
        emu = Emulator()
        a = emu.alloc(np.zeros(66, np.uint32))
        report = run(f"""setp.eq.u32 %p1, %t, {lane}; mov.b64 %d1, %a0; @%p1 add.s64 %d1, %d1, {offset};
                         ld.global.b{8 * size} %{REGISTER[size]}1, [%d1];""", a, emu=emu)
        assert kinds(report) == ([kind] if kind else []), (offset, size)
        assert not kind or (report.findings[0].count, report.findings[0].threads) == (1, (lane,))


def test_the_nearest_allocation_is_named() -> None:
    emu = Emulator()
    a, b = emu.alloc(np.zeros(4, np.uint32)), emu.alloc(np.zeros(8, np.uint32))
    gap = b.ptr - a.ptr
    report = run(f"ld.global.b32 %r1, [%a0+{gap - 4}]; ld.global.b32 %r1, [%a0+20];", a, b, emu=emu, block=1)
    assert [f.kind for f in report.findings] == ["out-of-bounds"]  # one line, one finding
    assert "4 bytes before the allocation of 32 bytes" in report.findings[0].message


@pytest.mark.parametrize(("opcode", "offset", "ok"), [
    ("ld.global.b16 %h1, [%a0+{}];", 1, 2), ("ld.global.b32 %r1, [%a0+{}];", 2,
                                             4), ("ld.global.b64 %d1, [%a0+{}];", 4, 8),
    ("ld.global.v2.b32 {{%r1, %r2}}, [%a0+{}];", 4, 8), ("st.global.v4.b32 [%a0+{}], {{%r0, %r0, %r0, %r0}};",
                                                         8, 16),
    ("ld.shared.v2.b64 {{%d1, %d2}}, [tile+{}];", 8, 16), ("st.shared.b32 [tile+{}], %r0;", 3, 0)])
def test_misaligned(opcode: str, offset: int, ok: int) -> None:
    zero = "st.shared.v4.b32 [tile], {0, 0, 0, 0}; st.shared.v4.b32 [tile+16], {0, 0, 0, 0}; mov.b32 %r0, 1;"
    emu = Emulator()
    a = emu.alloc(np.zeros(64, np.uint32))
    found(run(zero + opcode.format(offset), a, emu=emu, block=1, variables=SHARED), "misaligned",
          "not a multiple of")
    sound(run(zero + opcode.format(ok), a, emu=emu, block=1, variables=SHARED))


def test_uninitialised_global_and_shared() -> None:
    emu = Emulator()
    a = emu.alloc(64)
    report = run("ld.global.b32 %r1, [%a0+8];", a, emu=emu, block=1)
    found(report, "uninitialized", "read of 4 bytes", "never written")
    sound(run("st.global.b32 [%a0+8], 1; ld.global.b32 %r1, [%a0+8];", a, emu=emu, block=1))
    sound(run("ld.global.b32 %r1, [%a0+8];", a, emu=emu, block=1))  # stays written
    parts = "st.global.b8 [%a0], 1; st.global.b8 [%a0+1], 1; st.global.b8 [%a0+3], 1;"
    found(run(parts + "ld.global.b32 %r1, [%a0];", a, emu=emu, block=1), "uninitialized", "byte 2 of them")
    found(run("ld.shared.b32 %r1, [tile];", emu=emu, block=1, variables=SHARED), "uninitialized",
          "shared address 0x400")
    sound(run("st.shared.b32 [tile], 1; ld.shared.b32 %r1, [tile];", emu=emu, block=1, variables=SHARED))
    sound(run("ld.shared.b32 %r1, [tile];", emu=Emulator(check=False), block=1, variables=SHARED))


def test_discarded_lines_hold_nothing() -> None:
    emu = Emulator()
    a = emu.alloc(256)
    write = "st.global.b32 [%a0], 1; st.global.b32 [%a0+128], 1;"
    found(run(write + "discard.global.L2 [%a0], 128; ld.global.b32 %r1, [%a0];", a, emu=emu, block=1),
          "uninitialized")
    sound(run(write + "discard.global.L2 [%a0], 128; ld.global.b32 %r1, [%a0+128];", a, emu=emu, block=1))


@pytest.mark.parametrize(("body", "message"), [
    ("ld.global.v4.b32 {%r1, %r2}, [%a0];", "2 registers"), ("ld.global.b64 %r1, [%a0];",
                                                             "a register of 4 bytes"),
    ("st.const.b32 [%a0], %r1;", "no instruction"), ("st.param.b32 [p0], %r1;", "no instruction"),
    ("ld.global %r1, [%a0];", "no instruction"), ("ld.global.b32 %r1, %a0;", "an address in brackets"),
    ("ld.global.v2.b32 {%r1, %d1}, [%a0];", "different sizes"), ("ld.global.b32 %p1, [%a0];",
                                                                 "a register of"),
    ("discard.global.L2 [%a0], 64;", "128"), ("ld.global.b32 %r1, [nowhere];", "nowhere is not declared")])
def test_what_ptx_does_not_allow_is_an_error_with_its_line(body: str, message: str) -> None:
    emu = Emulator()
    with pytest.raises(PTXError, match=message) as error: run("\n" + body, emu.alloc(16), emu=emu, block=1)
    assert error.value.line == 6


# **** order ****

def message_passing(write: str, read: str, between: str = "", after: str = "") -> tuple[str, np.ndarray]:
    """CTA 0 writes data and then a flag, CTA 1 waits for the flag and reads. The findings' kinds, and what
    CTA 1 read."""
    emu = Emulator()
    data, flag, out = (emu.alloc(np.zeros(1, np.uint32)) for _ in range(3))
    report = run(f"""setp.ne.u32 %p1, %c, 0; @%p1 bra READER;
        st.global.u32 [%a0], 42; {between} {write} [%a1], 1; ret;
        READER: {read} %r1, [%a1]; setp.eq.u32 %p2, %r1, 0; @%p2 bra READER; {after}
        ld.global.u32 %r2, [%a0]; st.global.u32 [%a2], %r2;""", data, flag, out, emu=emu, grid=2, block=1)
    return ",".join(kinds(report)), words(out)


def test_release_and_acquire_order_two_ctas() -> None:
    assert message_passing("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32") == ("", [42])
    assert message_passing("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32", "fence.acq_rel.gpu;",
                           "fence.acq_rel.gpu;") == ("", [42])
    assert message_passing("st.volatile.global.u32", "ld.volatile.global.u32", "membar.gl;",
                           "membar.gl;") == ("", [42])


@pytest.mark.parametrize(("write", "read"),
                         [("relaxed", "acquire"), ("release", "relaxed"), ("relaxed", "relaxed")])
def test_half_of_a_pair_does_not(write: str, read: str) -> None:
    assert message_passing(f"st.{write}.gpu.global.u32", f"ld.{read}.gpu.global.u32")[0] == "race"


# **** counters ****

def passes(addresses: np.ndarray, size: int) -> tuple[int, int]:
    """Passes and the least of them, the definition spelled out: lanes go in groups of 128 bytes; in each, a
    bank gives one of its words a pass."""
    lanes, total, least = 128 // max(size, 4), 0, 0
    for start in range(0, 32, lanes):
        asked = {int(a) // 4 + k for a in addresses[start:start + lanes] for k in range(max(1, size // 4))}
        total += max(sum(word % 32 == bank for word in asked) for bank in range(32))
        least += 1
    return total, total - least


@pytest.mark.parametrize("kind", ["b8", "b16", "b32", "b64", "v2.b32", "v4.b32", "v2.b64"])
def test_bank_conflicts_are_counted(kind: str) -> None:
    scalar = kind.split(".")[-1]
    count = int(kind[1]) if kind[0] == "v" else 1
    size = bits(scalar) // 8 * count
    patterns = [np.arange(32) * size, np.arange(32) * 4 * size % 4096, np.arange(32) * 128 % 4096,
                np.zeros(32, int),
                (np.arange(32) * 128 + np.arange(32) * size) % 4096 // size * size]
    patterns += [RNG.integers(0, 4096 // size, 32) * size for _ in range(10)]
    for pattern in patterns:
        emu = Emulator(check=False)
        a = emu.alloc(pattern.astype(np.uint32))
        report = run(f"""mad.wide.u32 %d1, %t, 4, %a0; ld.global.u32 %r9, [%d1]; mov.u32 %r10, tile;
                         add.u32 %r9, %r9, %r10; ld.shared.{kind} {operands(scalar,
                                                                            count)}, [%r9];""", a, emu=emu,
                     variables=SHARED)
        site = next(s for s in report.stats.sites if s.opcode.startswith("ld.shared"))
        assert (site.passes, site.conflicts) == passes(pattern, size), (kind, pattern)
        assert report.stats.shared_bytes == 32 * size
    assert report.stats.bank_conflicts.get(site.line, 0) == site.conflicts


@pytest.mark.parametrize(("stride", "offset", "sectors"),
                         [(4, 0, 4), (4, 4, 5), (8, 0, 8), (32, 0, 32), (64, 0, 32), (0, 0, 1),
                                                          (16, 0, 16)])
def test_sectors_of_a_request(stride: int, offset: int, sectors: int) -> None:
    emu = Emulator()
    a = emu.alloc(np.zeros(1024, np.uint32))
    for order in ("", "xor.b32 %r1, %t, 21;"):  # any permutation of the lanes touches the same sectors
        report = run(f"""mov.u32 %r1, %t; {order} mad.wide.u32 %d1, %r1, {stride}, %a0;
                         ld.global.u32 %r2, [%d1+{offset}];""", a, emu=emu)
        assert list(report.stats.sectors_per_request.values()) == [sectors]
        assert (report.stats.global_read_bytes, report.stats.l2_bytes) == (128, 32 * sectors)


def test_bytes_written_and_predicated_lanes() -> None:
    emu = Emulator()
    a = emu.alloc(1024)
    report = run("""setp.lt.u32 %p1, %t, 8; mad.wide.u32 %d1, %t, 16, %a0;
                    @%p1 st.global.v4.b32 [%d1], {1, 2, 3, 4};""", a, emu=emu)
    stats = report.stats
    assert (stats.global_written_bytes, stats.global_read_bytes, stats.l2_bytes) == (128, 0, 128)
    assert words(a)[:32].tolist() == [1, 2, 3, 4] * 8
