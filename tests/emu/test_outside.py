"""What nvcc's and CUTLASS's PTX does that Triton's does not: calls, assertions, copies by a whole warp.

The PTX is ours; each test says which compiler or library writes code of its kind.
"""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, Finding, TensorMap

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
LANE = "ld.param.u64 %out, [out]; mov.u32 %t, %tid.x; mad.wide.u32 %at, %t, 4, %out;"
REGISTERS = (".reg .pred %p, %q; .reg .b32 %t, %a<9>; .reg .b64 %out, %at, %d<9>;")


def run(text: str, block: int = 64, seed: int = 0, **options: object) -> tuple[np.ndarray, list[Finding]]:
    """The 32-bit words that entry `k(out)` wrote, one for each thread, and the findings."""
    emu = Emulator(arch="sm_90a", seed=seed)
    out = emu.alloc(np.zeros(block, np.uint32))
    report = emu.launch(HEAD + text, 1, block, [out], entry="k", **options)  # type: ignore[arg-type]
    return out.numpy(), list(report.findings)


def kernel(body: str) -> str:
    """Entry `k(out)` with registers and the thread's place in `out`."""
    return f".visible .entry k(.param .u64 out) {{\n{REGISTERS}\n{LANE}\n{body}\nret;\n}}\n"


# **** calls ****

# the steps of a loop whose length differs by lane, with a return in its midst
STEPS = """
.func (.param .b32 result) steps(.param .b32 value) {
    .reg .pred %p; .reg .b32 %a<9>;
    ld.param.u32 %a1, [value];
    mov.u32 %a2, 0;
AGAIN:
    setp.eq.u32 %p, %a1, 1;
    st.param.b32 [result+0], %a2;
    @%p ret;
    add.u32 %a2, %a2, 1;
    and.b32 %a3, %a1, 1;
    setp.eq.u32 %p, %a3, 0;
    shr.u32 %a4, %a1, 1;
    mad.lo.u32 %a5, %a1, 3, 1;
    selp.b32 %a1, %a4, %a5, %p;
    bra AGAIN;
}
"""


def call(source: str, into: str, guard: str = "", number: int = 0) -> str:
    """A call of `steps` as nvcc writes it."""
    return (f"{{ // callseq {number}, 0\n.reg .b32 temp_param_reg;\n.param .b32 param0;\n"
            f"st.param.b32 [param0+0], {source};\n.param .b32 retval0;\n"
            f"{guard} call.uni (retval0), steps, (param0);\nld.param.b32 {into}, [retval0+0];\n}}\n")


def collatz(value: int) -> int:
    """Steps to 1."""
    count = 0
    while value != 1: value, count = (3 * value + 1 if value & 1 else value >> 1), count + 1
    return count


def test_a_function_called_twice() -> None:
    """Each call has registers, labels and parameters of its own; lanes return at different times."""
    body = (f"add.u32 %a1, %t, 1;\n{call('%a1', '%a2')}\nadd.u32 %a3, %a2, 1;\n"
            f"{call('%a3', '%a4', number=1)}\n"
            "mad.lo.u32 %a5, %a2, 1000, %a4; st.global.u32 [%at], %a5;")
    out, findings = run(STEPS + kernel(body))
    assert not findings
    assert out.tolist() == [1000 * collatz(t + 1) + collatz(collatz(t + 1) + 1) for t in range(64)]


def test_a_call_under_a_guard() -> None:
    """Lanes whose guard is false do not enter; what they read of the result is their own."""
    body = ("add.u32 %a1, %t, 1; setp.lt.u32 %p, %t, 5; mov.u32 %a7, 77;\n"
            ".param .b32 param0; st.param.b32 [param0], %a1;\n"
            ".param .b32 retval0; st.param.b32 [retval0], %a7;\n"
            "@%p call (retval0), steps, (param0);\nld.param.b32 %a2, [retval0];\nst.global.u32 [%at], %a2;")
    out, findings = run(STEPS + kernel(body))
    assert not findings
    assert out.tolist() == [collatz(t + 1) if t < 5 else 77 for t in range(64)]


def test_parameters_in_registers_and_nested_calls() -> None:
    """Functions may take .reg parameters; a callee calls another."""
    text = """
    .func (.reg .b32 %r) twice(.reg .b32 %x) { add.u32 %r, %x, %x; ret; }
    .func (.reg .b32 %r) more(.reg .b32 %x, .reg .b32 %y) {
        .reg .b32 %z; call (%z), twice, (%x); call (%r), twice, (%z); add.u32 %r, %r, %y; }
    """
    out, findings = run(text + kernel("call (%a1), more, (%t, 7); st.global.u32 [%at], %a1;"))
    assert not findings
    assert out.tolist() == [4 * t + 7 for t in range(64)]


def test_arrays_as_parameters() -> None:
    """A structure by value: 16 bytes, read back in parts, one of them through an address."""
    text = """
    .func (.param .align 8 .b8 result[16]) turned(.param .align 8 .b8 value[16]) {
        .reg .b32 %a<5>; .reg .b64 %d;
        ld.param.v2.b32 {%a1, %a2}, [value]; ld.param.b64 %d, [value+8];
        st.param.b64 [result], %d; st.param.v2.b32 [result+8], {%a2, %a1};
        ret;
    }
    """
    body = """
    .param .align 8 .b8 p[16]; .param .align 8 .b8 r[16];
    add.u32 %a1, %t, 1000; mov.u32 %a2, 3; mov.b64 %d1, {%a1, %a2};
    st.param.v2.b32 [p], {%t, 2}; st.param.b64 [p+8], %d1;
    call (r), turned, (p);
    ld.param.b32 %a3, [r]; ld.param.b32 %a4, [r+4]; ld.param.b32 %a5, [r+8]; ld.param.b32 %a6, [r+12];
    mad.lo.u32 %a3, %a3, 10, %a4; mad.lo.u32 %a3, %a3, 10, %a5; mad.lo.u32 %a3, %a3, 100, %a6;
    st.global.u32 [%at], %a3;
    """
    out, findings = run(text + kernel(body))
    assert not findings
    assert out.tolist() == [(((t + 1000) * 10 + 3) * 10 + 2) * 100 + t for t in range(64)]


def test_barriers_and_shared_memory_in_a_callee() -> None:
    """A function's shared variable is one for all its calls; bar.sync works in it."""
    text = """
    .func (.param .b32 result) next(.param .b32 value) {
        .shared .align 4 .b8 buffer[256];
        .reg .b32 %a<9>;
        ld.param.u32 %a1, [value];
        mov.u32 %a2, %tid.x; shl.b32 %a3, %a2, 2; mov.u32 %a4, buffer; add.u32 %a5, %a4, %a3;
        st.shared.u32 [%a5], %a1;
        bar.sync 0;
        xor.b32 %a3, %a3, 128; add.u32 %a5, %a4, %a3;
        ld.shared.u32 %a6, [%a5];
        bar.sync 0;
        st.param.b32 [result], %a6;
        ret;
    }
    """
    once = "st.param.b32 [p], %a1; call (r), next, (p); ld.param.b32 %a1, [r];\n"
    body = f".param .b32 p, r; mov.u32 %a1, %t;\n{once}add.u32 %a1, %a1, 100;\n{once}"
    body += "st.global.u32 [%at], %a1;"
    for seed in range(4):
        out, findings = run(text + kernel(body), seed=seed)
        assert not findings
        assert out.tolist() == [100 + t for t in range(64)]
    without = text.replace("bar.sync 0;\n        xor", "xor")
    assert {f.kind for f in run(without + kernel(body))[1]} >= {"race"}


def test_recursion_is_refused() -> None:
    """The chain of calls is named, with the line."""
    text = """
    .func (.reg .b32 %r) even(.reg .b32 %x);
    .func (.reg .b32 %r) odd(.reg .b32 %x) { call (%r), even, (%x); }
    .func (.reg .b32 %r) even(.reg .b32 %x) { call (%r), odd, (%x); }
    """
    with pytest.raises(PTXError, match=r"recursion: k → odd → even → odd") as error:
        run(text + kernel("call (%a1), odd, (%t);"))
    assert error.value.line == 7


@pytest.mark.parametrize(("body", "found"), [
    ("call (%a1), missing, (%t);", "function missing has no body"),
    ("call (%a1), %d1, (%t), proto;", "through a register"),
    ("call (%a1), steps, (%t, %t);", "3 results and arguments"),
])
def test_calls_that_cannot_be(body: str, found: str) -> None:
    """Errors at the call."""
    with pytest.raises(PTXError, match=found):
        run(STEPS + kernel(f"proto: .callprototype (.param .b32 _) _ (.param .b32 _);\n{body}"))


# **** printf and assert ****

TEXTS = "\n".join(f".global .align 1 .b8 {name}[{len(text) + 1}] = {{{', '.join(map(str, text))}}};"
                  for name, text in (("said", b"t < 40"), ("file", b"a.cu"), ("where", b"void k()")))
EXTERNAL = """
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
"""


def address(name: str, parameter: str) -> str:
    """A text's generic address as an argument."""
    return f"mov.u64 %d1, {name}; cvta.global.u64 %d1, %d1; st.param.b64 [{parameter}], %d1;\n"


ASSERT = ("setp.lt.u32 %p, %t, {limit}; @%p bra FINE;\n"
          "{{ .param .b64 p0, p1, p3, p4; .param .b32 p2;\n" + address("said", "p0") + address("file", "p1")
          + address("where", "p3") + "st.param.b32 [p2], 12; st.param.b64 [p4], 1;\n"
          "call.uni __assertfail, (p0, p1, p2, p3, p4); }}\nFINE: st.global.u32 [%at], %t;")


def test_a_failed_assertion_is_a_finding() -> None:
    """With its text, and the thread; the launch ends."""
    _, findings = run(EXTERNAL + TEXTS + kernel(ASSERT.format(limit=40)))
    assert [f.message for f in findings] == ["assertion failed: t < 40 (a.cu:12, void k())"]
    assert findings[0].threads == (40,)
    out, findings = run(EXTERNAL + TEXTS + kernel(ASSERT.format(limit=64)))
    assert not findings
    assert out.tolist() == list(range(64))


def test_printf_prints_nothing() -> None:
    """vprintf gives 0 and the kernel goes on."""
    body = ("{ .param .b64 p0, p1; .param .b32 r;\n" + address("said", "p0") + "st.param.b64 [p1], 0;\n"
            "call.uni (r), vprintf, (p0, p1); ld.param.b32 %a1, [r]; }\n"
            "add.u32 %a1, %a1, %t; st.global.u32 [%at], %a1;")
    out, findings = run(EXTERNAL + TEXTS + kernel(body))
    assert not findings
    assert out.tolist() == list(range(64))


# **** copies issued by a whole warp ****

STORE = """
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 out) {
    .reg .pred %p; .reg .b32 %t, %a<5>; .reg .b64 %d<5>;
    mov.u32 %t, %tid.x; mov.u32 %a1, smem; mad.lo.u32 %a2, %t, 4, %a1;
    st.shared.u32 [%a2], %t;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ge.u32 %p, %t, 32; @%p bra END;
    mov.b64 %d1, map; cvta.param.u64 %d1, %d1; ld.param.u64 %d2, [out];
    COPY
    cp.async.bulk.commit_group;
    WAIT
END: ret;
}
"""
TENSOR = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d1, {0, 0}], [%a1];"
PLAIN = "cp.async.bulk.global.shared::cta.bulk_group [%d2], [%a1], 256;"


def store(copy: str, wait: str, seed: int) -> tuple[np.ndarray, list[Finding], int]:
    """Runs `STORE`; what reached the target, findings, and bytes moved."""
    emu = Emulator(arch="sm_90a", seed=seed)
    out = emu.alloc(np.zeros((4, 16), np.uint32))
    text = HEAD + STORE.replace("COPY", copy).replace("WAIT", wait)
    report = emu.launch(text, 1, 64, [TensorMap.tiled(out, box=(4, 16)), out], dynamic_smem=256)
    return out.numpy().reshape(-1), list(report.findings), report.stats.asynchronous_bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("copy", [TENSOR, PLAIN])
def test_a_store_by_all_lanes_is_one_store(copy: str, seed: int) -> None:
    """CUTLASS's epilogues store tiles from whole warps: 32 equal copies are no race, and one is moved."""
    for wait in ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"):
        out, findings, moved = store(copy, wait, seed)
        assert not findings
        assert moved == 256
        assert out.tolist() == list(range(64))


def test_stores_of_different_lanes_still_race() -> None:
    """Lanes that store different sources to one place."""
    copy = "and.b32 %a3, %t, 1; mad.lo.u32 %a1, %a3, 16, %a1;\n" + PLAIN.replace("256", "128")
    assert {f.kind for f in store(copy, "cp.async.bulk.wait_group 0;", 0)[1]} == {"async-hazard"}


def test_reductions_count_for_each_lane() -> None:
    """32 lanes add 32 times."""
    copy = ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d2], [%a1], 256;")
    out, findings, moved = store(copy, "cp.async.bulk.wait_group 0;", 0)
    assert not findings
    assert moved == 32 * 256
    assert out.tolist() == [32 * x for x in range(64)]


# **** tiles ****

# a product of 64 x 8 x 16 in bf16, B of ones; A from TILE, where FILL put it
PRODUCT = """
.extern .shared .align ALIGN .b8 smem[];
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 a, .param .u64 out) {
    .reg .pred %p; .reg .b16 %h; .reg .b32 %t, %w, %a<9>; .reg .b64 %d<9>; .reg .f32 %f<4>;
    mov.u32 %t, %tid.x; mov.u32 %w, smem; add.u32 %a1, %w, 8192;
    add.u32 %a2, %w, TILE;
    mov.b32 %a3, 0x3f803f80; mad.lo.u32 %a4, %t, 4, %a1;
    setp.lt.u32 %p, %t, 64; @%p st.shared.b32 [%a4], %a3;
    setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared::cta.b64 [%w], COUNT;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    FILL
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [%w], 0; @!%p bra WAIT;
    and.b32 %a5, %a2, 0x3ffff; shr.u32 %a5, %a5, 4; mov.b64 %d1, {%a5, HIGH};
    and.b32 %a6, %a1, 0x3ffff; shr.u32 %a6, %a6, 4; or.b32 %a6, %a6, 0x80000; mov.b64 %d2, {%a6, 16};
    mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %d1, %d2, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %d3, [out]; mad.wide.u32 %d3, %t, 4, %d3;
    and.b32 %a7, %t, 3; setp.eq.u32 %p, %a7, 0;
    @%p st.global.f32 [%d3], %f0; @%p st.global.f32 [%d3+4], %f2;
    ret;
}
"""
# TMA, rows of 128 bytes of which 16 elements are multiplied
TENSOR_TILE = """
    setp.eq.u32 %p, %t, 0;
    mov.b64 %d1, map; cvta.param.u64 %d1, %d1;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%w], 8192;
    @%p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%a2], [%d1, {0, 0}], [%w];
"""
# cp.async, 16 bytes by each thread, in core matrices of 8 rows of 16 bytes
COPIED_TILE = """
    ld.param.u64 %d2, [a]; shr.u32 %a5, %t, 1; and.b32 %a6, %t, 1; mul.lo.u32 %a7, %a5, 128;
    mad.lo.u32 %a7, %a6, 16, %a7; cvt.u64.u32 %d3, %a7; add.u64 %d2, %d2, %d3;
    shr.u32 %a7, %a5, 3; shl.b32 %a7, %a7, 8; mad.lo.u32 %a7, %a6, 128, %a7;
    and.b32 %a5, %a5, 7; mad.lo.u32 %a7, %a5, 16, %a7; add.u32 %a7, %a7, %a2;
    cp.async.cg.shared.global [%a7], [%d2], 16;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w];
"""
STORED_TILE = COPIED_TILE.replace("cp.async.cg.shared.global [%a7], [%d2], 16;", """
    .reg .b32 %v<4>; ld.global.v4.b32 {%v0, %v1, %v2, %v3}, [%d2];
    st.shared.v4.b32 [%a7], {%v0, %v1, %v2, %v3};""").replace(
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%w];", "mbarrier.arrive.shared::cta.b64 _, [%w];")


def rows_summed(fill: str, tile: int, align: int, seed: int) -> list[Finding]:
    """Runs `PRODUCT`, and compares the rows' sums with numpy's."""
    swizzled = fill == TENSOR_TILE
    emu = Emulator(arch="sm_90a", seed=seed)
    values = np.random.default_rng(seed).integers(-3, 4, (64, 64)).astype(np.float32)
    a = emu.alloc((values.view(np.uint32) >> 16).astype(np.uint16))  # bf16
    out = emu.alloc(np.zeros(129, np.float32))
    high = "0x40000040" if swizzled else "16"  # 128B swizzle, 8 rows after 1024 bytes; none, after 256
    text = PRODUCT.replace("ALIGN", str(align)).replace("TILE", str(tile)).replace("FILL", fill)
    text = text.replace("COUNT", "1" if swizzled else "128").replace("HIGH", high)
    leading = "" if swizzled else "or.b32 %a5, %a5, 0x80000;"
    text = text.replace("shr.u32 %a5, %a5, 4;", f"shr.u32 %a5, %a5, 4; {leading}")
    arguments = [TensorMap.tiled(a, box=(64, 64), swizzle="128B", dtype="bf16"), a, out]
    report = emu.launch(HEAD + text, 1, 128, arguments, dynamic_smem=20480)
    got = out.numpy()
    at = 32 * (np.arange(64) // 16) + 4 * (np.arange(64) % 8) + np.arange(64) // 8 % 2
    assert got[at].tolist() == values[:, :16].sum(1).tolist()
    return list(report.findings)


@pytest.mark.parametrize("seed", range(4))
def test_a_tile_in_the_midst_of_a_pattern(seed: int) -> None:
    """CUTLASS does not align dynamic shared memory; TMA and wgmma number rows by address, so they agree.
    Where the program asked for alignment it meant to have it."""
    assert not rows_summed(TENSOR_TILE, 9216 + 384, 16, seed)
    assert not rows_summed(TENSOR_TILE, 9216, 1024, seed)
    assert [f.kind for f in rows_summed(TENSOR_TILE, 9216 + 384, 1024, seed)] == ["misaligned"]


@pytest.mark.parametrize("seed", range(4))
def test_copies_that_arrive_at_an_mbarrier_need_no_fence(seed: int) -> None:
    """CUTLASS's cp.async mainloop goes from their arrival to wgmma; ordinary stores do need one."""
    assert not rows_summed(COPIED_TILE, 9216, 1024, seed)
    assert {f.kind for f in rows_summed(STORED_TILE, 9216, 1024, seed)} == {"proxy-fence"}
