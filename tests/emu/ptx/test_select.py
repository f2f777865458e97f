"""Comparisons, selections, divisions by constants, moves and special registers on the emulator, and forms
that PTX does not have."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx.lanewise import HEADER, UNSIGNED, apply, apply1, integers, typed
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def widths(kind: str) -> int:
    """Bits of a type."""
    return int(kind[1:])


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b}


def comparisons(kind: str) -> list[str]:
    """Those the type has."""
    if kind[0] == "b": return ["eq", "ne"]
    return [*list(COMPARISONS)[:6], *(list(COMPARISONS)[6:] if kind[0] == "u" else [])]


@pytest.mark.parametrize("kind", [*INTEGERS, "b16", "b32", "b64"])
def test_comparisons(kind: str) -> None:
    """setp and set of integers, each comparison, with Boolean operations and both destinations."""
    n = widths(kind)
    a, b = integers(n, 256, 1), integers(n, 256, 2)
    b[::3] = a[::3]
    c = np.arange(256) % 2 == 0
    for name in comparisons(kind):
        want = np.array([COMPARISONS[name](typed(int(x), kind), typed(int(y), kind)) for x,
                         y in zip(a, b, strict=True)])
        body = (f"setp.{name}.{kind} %d0, %s0, %s1; setp.{name}.and.{kind} %d1|%d2, %s0, %s1, %s2;"
                f"setp.{name}.or.{kind} %d3, %s0, %s1, !%s2; setp.{name}.xor.{kind} _|%d4, %s0, %s1, %s2;"
                f"set.{name}.u32.{kind} %d5, %s0, %s1; set.{name}.and.f32.{kind} %d6, %s0, %s1, %s2;")
        got = apply(body, [a, b, c], [np.bool_] * 5 + [np.uint32] * 2)
        wanted = (want, want & c, ~want & c, want | ~c, ~want ^ c)
        for result, expected in zip(got, wanted, strict=False):
            assert np.array_equal(result.astype(np.bool_), expected), name
        assert np.array_equal(got[5], np.where(want, 0xffffffff, 0))
        assert np.array_equal(got[6], np.where(want & c, 0x3f800000, 0))


@pytest.mark.parametrize("kind", ["b16", "s32", "u64", "f32", "f64"])
def test_selections(kind: str) -> None:
    """selp by a predicate, slct by a sign; -0 counts as positive, NaN as negative."""
    n = widths(kind)
    a, b, p = integers(n, 256, 1), integers(n, 256, 2), np.arange(256) % 3 == 0
    by = integers(32, 256, 3)
    by[:4] = (0x80000000, 0x7fc00000, 0x80000001, 0)
    body = (f"selp.{kind} %d0, %s0, %s1, %s2; slct.{kind}.s32 %d1, %s0, %s1, %s3;"
            f"slct.{kind}.f32 %d2, %s0, %s1, %s3;"
            f"slct.ftz.{kind}.f32 %d3, %s0, %s1, %s3;")
    got = apply(body, [a, b, p, by], [UNSIGNED[n // 8]] * 4)
    numbers, ints = by.view(np.float32), by.view(np.int32)
    flushed = np.where(np.abs(numbers) < 2.0**-126, np.float32(0), numbers)
    for result, choice in zip(got, (p, ints >= 0, numbers >= 0, flushed >= 0), strict=True):
        assert np.array_equal(result, np.where(choice, a, b))


# **** errors ****

@pytest.mark.parametrize("line", ["add.f32x2 %d0, %s0, %s0", "mul.s32 %d0, %s0, %s0", "add.s64 %d0, %s0, %s0",
                                  "add.rn.s32 %d0, %s0, %s0", "add.s32 %d0, %s0",
                                  "bfe.b32 %d0, %s0, %s0, %s0",
                                  "setp.num.s32 %q0, %s0, %s0", "setp.s32 %q0, %s0, %s0",
                                  "add.s32 5, %s0, %s0",
                                  "redux.sync.min.b32 %d0, %s0, -1", "cvt.f32.e4m3 %d0, %s0",
                                  "mov.b64 %w0, {%s0}",
                                  "frobnicate.b32 %d0, %s0"])
def test_what_does_not_exist(line: str) -> None:
    """Forms and operands that PTX does not have are refused with their line."""
    with pytest.raises(PTXError) as error: apply1(f"{line};", np.zeros(1, np.uint32), result=np.uint32)
    assert error.value.line > 0
    assert line.split()[0] in str(error.value)


POWERS = (1, 2, 128, 1 << 31)
OTHERS = (3, 5, 6, 7, 43, 100, 641, 6144, 12289, (1 << 16) + 1, (1 << 31) - 1, (1 << 31) + 1, (1 << 32) - 1)


def numbers(divisor: int) -> np.ndarray:
    """Where a quotient changes, and others."""
    last = (1 << 32) // divisor * divisor
    near = [at + by for at in (0, divisor, 7 * divisor, last, last - divisor, 1 << 31, 1 << 32)
            for by in (-1, 0, 1)]
    random = np.random.default_rng(divisor).integers(0, 1 << 32, 107)
    return np.array([*(at for at in near if 0 <= at < 1 << 32), *random], np.uint64)[:128].astype(np.uint32)


def divide(kind: str, values: np.ndarray, divisor: int) -> np.ndarray:
    """Returns the quotient and the rest of each value, by a kernel that has no division."""
    kb = Kernel("divided", arch="sm_80", threads=128)
    out, given = kb.pointer("out"), kb.pointer("given")
    with kb.if_(kb.tid.x < len(values)):
        number = kb.ld("global", kind, (given + kb.tid.x.to("u64") * 4).at())[0]
        kb.st("global", kind, (out + kb.tid.x.to("u64") * 8).at(), [number // divisor, number % divisor])
    assert [op for op in ("div.", "rem.") if op in kb.ptx()] == []
    emu = Emulator("sm_80")
    found = emu.alloc(8 * len(values))
    emu.launch(kb.ptx(), 1, 128, [found, emu.alloc(values)])
    return found.numpy().view(values.dtype).reshape(-1, 2)


@pytest.mark.parametrize("divisor", [*POWERS, *OTHERS])
def test_a_constant_divisor_needs_no_division(divisor: int):
    values = numbers(divisor)
    quotients, rests = divide("u32", values, divisor).T
    np.testing.assert_array_equal(quotients, values // np.uint32(divisor))
    np.testing.assert_array_equal(rests, values % np.uint32(divisor))


@pytest.mark.parametrize("divisor", [1, 2, 128, 1 << 30])
def test_signed_numbers_are_rounded_towards_zero(divisor: int):
    near = [at + by for at in (-divisor, 0, divisor) for by in (-1, 0, 1)]
    values = np.array([*near, -(1 << 31), (1 << 31) - 1, -12345, 12345], np.int32)
    expected = [(int(each / divisor), each - int(each / divisor) * divisor) for each in values.tolist()]
    assert divide("s32", values, divisor).tolist() == [list(each) for each in expected]


def test_what_has_no_shorter_way_is_divided():
    kb = Kernel("divided", arch="sm_80", threads=32)
    signed, wide = kb.tid.x.to("s32"), kb.tid.x.to("u64")
    for value, divisor in ((signed, 3), (signed, -8), (wide, 3), (kb.tid.x, kb.tid.x), (kb.tid.x, 0)):
        _ = value // divisor
    for opcode, count in (("div.s32", 2), ("div.u64", 1), ("div.u32", 2)):
        assert kb.ptx().count(opcode) == count


COUNT = 640


def test_vectors() -> None:
    """mov packs and unpacks 2 and 4 items; sinks and constants too."""
    words, longs = integers(32, COUNT, 1), integers(64, COUNT, 2)
    body = (".reg .b16 %h<8>; .reg .b8 %c<8>; .reg .b128 %x<2>;"
            "mov.b32 {%h0, %h1}, %s0; mov.b32 %d0, {%h1, %h0};"
            "mov.b64 {%t0, %t1}, %s1; mov.b64 %d1, {%t1, %t0};"
            "mov.b64 {%h2, %h3, %h4, %h5}, %s1; mov.b64 %d2, {%h5, %h4, %h3, %h2};"
            "mov.b32 {%c0, %c1, %c2, %c3}, %s0; mov.b32 %d3, {%c3, %c2, %c1, %c0};"
            "mov.b16 {%c4, %c5}, %h0; mov.b16 %d4, {%c5, %c4};"
            "mov.b128 %x0, {%s1, %d1}; mov.b128 %x1, %x0; mov.b128 {%w0, %w1}, %x1; sub.u64 %d5, %w1, %w0;"
            "mov.b128 {%t2, %t3, %t4, %t5}, %x1; mov.b128 %x0, {%t5, %t4, %t3, %t2}; mov.b128 {_, %d6}, %x0;"
            "mov.b64 {_, %t6}, %s1; mov.b64 %d7, {%t6, 7};")
    got = apply(body, [words, longs], [np.uint32, np.uint64, np.uint64, np.uint32, np.uint16, np.uint64,
                                       np.uint64, np.uint64])
    ones = (1 << 64) - 1
    for i, (word, long) in enumerate(zip(words.tolist(), longs.tolist(), strict=True)):
        swapped = (long << 32 | long >> 32) & ones
        halves = sum((long >> 16 * j & 0xffff) << 16 * (3 - j) for j in range(4))
        low = word & 0xffff
        want = [(word << 16 | word >> 16) & 0xffffffff, swapped, halves,
                int.from_bytes(word.to_bytes(4, "big"), "little"),
                low >> 8 | (low & 255) << 8, (swapped - long) & ones, swapped, long >> 32 | 7 << 32]
        assert [int(result[i]) for result in got] == want


def test_special_registers() -> None:
    """Each special register that a kernel can read, in 16, 32 and 64 bits."""
    names = ["%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y",
             "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%lanemask_eq", "%lanemask_lt",
             "%lanemask_le", "%lanemask_gt", "%lanemask_ge", "%clusterid.x", "%nclusterid.x",
             "%cluster_ctaid.x", "%cluster_nctaid.x", "%cluster_ctarank", "%cluster_nctarank",
             "%dynamic_smem_size", "%clusterid.w", "%nclusterid.w", "%tid.w", "%ntid.w", "%ctaid.w",
             "%nctaid.w", "%cluster_ctaid.w", "%cluster_nctaid.w", "%is_explicit_cluster"]
    count = len(names)
    reads = [f"mov.u32 %r1, {name}; st.global.u32 [%rd1+{4 * i}], %r1;" for i, name in enumerate(names)]
    reads[-1] = f"mov.pred %p1, {names[-1]}; selp.u32 %r1, 1, 0, %p1;"
    reads.append(f"st.global.u32 [%rd1+{4 * count - 4}], %r1;")
    text = HEADER + f""".visible .entry specials(.param .u64 out) {{
    .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %h<2>; .reg .pred %p<2>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %ctaid.y; mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
    mov.u32 %r2, %tid.y; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x; mad.lo.u32 %r2, %r2, %r3, %r4;
    mad.lo.u32 %r1, %r1, 48, %r2;
    mad.wide.u32 %rd1, %r1, {4 * count + 16}, %rd1;
    {" ".join(reads)}
    cvt.u64.u32 %rd2, %tid.x; st.global.u64 [%rd1+{4 * count}], %rd2;
    cvt.u64.u32 %rd2, %ctaid.x; mov.u64 %rd3, %clock64; mov.u64 %rd4, %clock64; setp.gt.u64 %p1, %rd4, %rd3;
    mov.u16 %h1, %tid.x; cvt.u32.u16 %r5, %h1; selp.u32 %r6, %r5, -1, %p1;
    st.global.u32 [%rd1+{4 * count + 8}], %r6; cvt.u32.u64 %r7, %rd2;
    st.global.u32 [%rd1+{4 * count + 12}], %r7;
    ret; }}"""
    emu = Emulator(arch="sm_90a", check=True, seed=0)
    out = emu.alloc(np.zeros((4 * 3 * 48, count + 4), np.uint32))
    report = emu.launch(text, grid=(4, 3, 1), block=(24, 2, 1), args=[out], cluster=(2, 1, 1),
                        dynamic_smem=512)
    assert not report.findings
    for at, row in enumerate(out.numpy().reshape(4 * 3 * 48, count + 4).tolist()):
        cta, thread = divmod(at, 48)
        lane, bit = thread % 32, 1 << thread % 32
        want = {"%tid.x": thread % 24, "%tid.y": thread // 24, "%tid.z": 0, "%ntid.x": 24, "%ntid.y": 2,
                "%ntid.z": 1,
                "%ctaid.x": cta % 4, "%ctaid.y": cta // 4, "%nctaid.x": 4, "%nctaid.y": 3, "%nctaid.z": 1,
                "%laneid": lane, "%warpid": thread // 32, "%lanemask_eq": bit, "%lanemask_lt": bit - 1,
                "%lanemask_le": 2 * bit - 1, "%lanemask_gt": 0xffffffff & ~(2 * bit - 1),
                "%lanemask_ge": 0xffffffff & ~(bit - 1), "%clusterid.x": cta % 4 // 2, "%nclusterid.x": 2,
                "%cluster_ctaid.x": cta % 2, "%cluster_nctaid.x": 2, "%cluster_ctarank": cta % 2,
                "%cluster_nctarank": 2, "%dynamic_smem_size": 512, "%is_explicit_cluster": 1,
                **{name: 0 for name in names if name.endswith(".w")}}
        assert dict(zip(names, row, strict=False)) == want
        assert row[count:] == [thread % 24, 0, thread % 24, cta % 4]


def test_unknown_special_register() -> None:
    """One that is not emulated is refused by its name."""
    with pytest.raises(PTXError, match="%pm0"):
        apply1("mov.u32 %d0, %pm0;", np.zeros(1, np.uint32), result=np.uint32)


# **** addresses ****

def test_generic_addresses() -> None:
    """cvta, isspacep, addresses of variables: in its own space and as a generic address a variable is the
    same."""
    text = HEADER + """.shared .align 16 .b8 tile[64];
.global .align 4 .b32 table[4] = {10, 20, 30, 40};
.visible .entry spaces(.param .u64 out, .param .align 8 .b8 object[16]) {
    .reg .b32 %r<19>; .reg .b64 %rd<19>; .reg .pred %p<9>;
    .local .align 8 .b8 mine[16];
    ld.param.u64 %rd1, [out];
    mov.u64 %rd2, tile; cvta.shared.u64 %rd3, %rd2; mov.u32 %r1, tile+4; mov.u32 %r2, 7;
    st.shared.u32 [%r1], %r2;
    ld.u32 %r3, [%rd3+4]; st.global.u32 [%rd1], %r3;
    cvta.to.shared.u64 %rd4, %rd3; sub.u64 %rd4, %rd4, %rd2; st.global.u64 [%rd1+8], %rd4;
    mov.u64 %rd5, mine; cvta.local.u64 %rd6, %rd5; mov.u32 %r4, 9; st.u32 [%rd6+8], %r4;
    ld.local.u32 %r5, [mine+8]; st.global.u32 [%rd1+16], %r5;
    cvta.to.local.u64 %rd7, %rd6; sub.u64 %rd7, %rd7, %rd5; st.global.u64 [%rd1+24], %rd7;
    mov.u64 %rd8, object; cvta.param.u64 %rd9, %rd8; ld.u32 %r6, [%rd9+4]; st.global.u32 [%rd1+32], %r6;
    cvta.global.u64 %rd10, table; ld.u32 %r7, [%rd10+8]; st.global.u32 [%rd1+36], %r7;
    cvta.to.global.u64 %rd11, %rd1;
    isspacep.shared %p1, %rd3; isspacep.local %p2, %rd6; isspacep.param %p3, %rd9; isspacep.global %p4, %rd10;
    isspacep.shared::cluster %p5, %rd3; isspacep.global %p6, %rd3; isspacep.shared::cta %p7, %rd6;
    selp.u32 %r8, 1, 0, %p1; @%p2 or.b32 %r8, %r8, 2; @%p3 or.b32 %r8, %r8, 4; @%p4 or.b32 %r8, %r8, 8;
    @%p5 or.b32 %r8, %r8, 16; @%p6 or.b32 %r8, %r8, 32; @%p7 or.b32 %r8, %r8, 64;
    st.global.u32 [%rd11+40], %r8; nanosleep.u32 20; ret; }"""
    emu = Emulator(arch="sm_90a", check=True, seed=0)
    out = emu.alloc(np.zeros(12, np.uint32))
    report = emu.launch(text, grid=(1, 1, 1), block=(1, 1, 1),
                        args=[out, np.arange(4, dtype=np.uint32).tobytes()])
    assert not report.findings
    assert out.numpy().view(np.uint32).tolist() == [7, 0, 0, 0, 9, 0, 0, 0, 1, 30, 31, 0]


def test_cache_policies() -> None:
    """createpolicy gives the numbers that ptxas does."""
    cases = {"fractional.L2::evict_first.b64 %d0, 1.0": 0x12f0000000000000,
             "fractional.L2::evict_last.b64 %d0": 0x14f0000000000000,
             "fractional.L2::evict_last.b64 %d0, 0.5": 0x1470000000000000,
             "fractional.L2::evict_normal.b64 %d0, 1.0": 0x16f0000000000000,
             "fractional.L2::evict_unchanged.b64 %d0": 0x10f0000000000000,
             "fractional.L2::evict_last.L2::evict_first.b64 %d0, 0.25": 0x1530000000000000,
             "fractional.L2::evict_first.b64 %d0, %s0": 0x1270000000000000,
             "range.global.L2::evict_last.b64 %d0, [%base], 128, 256": 0x14f0000000000000,
             "cvt.L2.b64 %d0, 0x1122334455667788": 0x1122334455667788}
    for opcode, want in cases.items():
        got = apply1(f"createpolicy.{opcode};", np.array([0x3f000000], np.uint32), result=np.uint64)
        assert got.tolist() == [want], opcode
