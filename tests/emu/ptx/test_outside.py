"""What nvcc's PTX does that Triton's does not: calls, assertions, barriers of the grid.

The PTX is ours; each test says which compiler or library writes code of its kind.
"""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, Finding

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
    """Lanes whose guard is false do not enter. The parameter that takes the result is the callee's alone to
    write: without the call it may be anything (an H100 reads 0 where a store before the call wrote 77)."""
    body = ("add.u32 %a1, %t, 1; setp.lt.u32 %p, %t, 5;\n"
            ".param .b32 param0; st.param.b32 [param0], %a1;\n.param .b32 retval0;\n"
            "@%p call (retval0), steps, (param0);\nld.param.b32 %a2, [retval0];\n"
            "selp.u32 %a2, %a2, 77, %p;\nst.global.u32 [%at], %a2;")
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


# of an int, a double, a text, a long and a star for the width; what is printed for each thread
PRINTED = {b"none, 100%%\n": (0, "none, 100%\n"),
           b"%d|%-6.2f|%s|%llx|%*u|": (6, "-1|0.50  |t < 40|123456789a|   7|"),
           b"%hhd %c %p": (2, "-1 @ 0x743c203430")}  # CUDA has no hh: an H100's driver counts 2


@pytest.mark.parametrize("form", PRINTED)
def test_printf_prints(form: bytes) -> None:
    """One line of each thread; its result is the number of arguments of conversions that CUDA has."""
    count, wanted = PRINTED[form]
    texts = f".global .align 1 .b8 form[{len(form) + 1}] = {{{', '.join(map(str, form))}}};\n" + TEXTS
    values = {b"%hhd %c %p": ("st.local.b32 [args], -1; st.local.b32 [args+4], 64;"
                              "st.local.b64 [args+8], 499224949808;")}.get(form, """
        st.local.b32 [args], -1; st.local.f64 [args+8], 0d3FE0000000000000;
        mov.u64 %d1, said; cvta.global.u64 %d1, %d1; st.local.b64 [args+16], %d1;
        st.local.b64 [args+24], 78187493530; st.local.b32 [args+32], 4; st.local.b32 [args+36], 7;""")
    body = (f".local .align 8 .b8 args[40]; {{ .param .b64 p0, p1; .param .b32 r;\n{values}\n"
            + address("form", "p0") + "mov.u64 %d1, args; cvta.local.u64 %d1, %d1; st.param.b64 [p1], %d1;\n"
            "call.uni (r), vprintf, (p0, p1); ld.param.b32 %a1, [r]; }\n st.global.u32 [%at], %a1;")
    emu = Emulator()
    out = emu.alloc(np.zeros(64, np.uint32))
    report = emu.launch(HEAD + EXTERNAL + texts + kernel(body), 1, 64, [out])
    assert not report.findings
    assert out.numpy().tolist() == [count] * 64
    assert report.printed == wanted * 64


# **** cooperative groups and CUB ****

def test_a_barrier_of_the_grid() -> None:
    """Cooperative groups find its word through %envreg1 and %envreg2: the first thread of each block adds,
    then waits until all have."""
    body = """
    .reg .b32 %lo, %hi, %seen, %cta; .reg .b64 %word;
    mov.u32 %hi, %envreg1; mov.u32 %lo, %envreg2; mov.b64 %word, {%lo, %hi};
    mov.u32 %cta, %ctaid.x; mad.lo.u32 %a1, %cta, 64, %t; mad.wide.u32 %at, %a1, 4, %out;
    st.global.u32 [%at], %a1;
    barrier.sync 0;
    setp.ne.u32 %p, %t, 0; @%p bra HERE;
    fence.acq_rel.gpu;
    atom.add.relaxed.gpu.u32 %seen, [%word+4], 1;
SPIN: ld.acquire.gpu.u32 %seen, [%word+4];
    setp.lt.u32 %p, %seen, 6; @%p bra SPIN;
HERE: barrier.sync 0;
    xor.b32 %a1, %a1, 64; mad.wide.u32 %d1, %a1, 4, %out;
    ld.global.u32 %a2, [%d1]; add.u32 %a2, %a2, 1000;
    st.global.u32 [%at+2048], %a2;
    """
    for seed in range(4):
        emu = Emulator(arch="sm_90a", seed=seed)
        out = emu.alloc(np.zeros(1024, np.uint32))
        report = emu.launch(HEAD + kernel(body), 6, 64, [out])
        assert not report.findings
        assert out.numpy()[512:512 + 384].tolist() == [1000 + (i ^ 64) for i in range(384)]


def test_modifiers_in_another_order() -> None:
    """CUB writes vote.ballot.sync; ptxas takes modifiers in any order."""
    body = """
    and.b32 %a1, %t, 3; setp.eq.u32 %p, %a1, 1;
    vote.ballot.sync.b32 %a2, %p, -1;
    st.global.u32 [%at], %a2;
    """
    out, findings = run(kernel(body))
    assert not findings
    assert out.tolist() == [0x22222222] * 64
