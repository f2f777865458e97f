"""PTX text in, structure out: what Triton writes, scopes, constants, and errors that name the line."""
from __future__ import annotations

import struct
from pathlib import Path

import pytest
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.operands import OperandParser
from tinygrad_nv.ptx.parser import Parser, parse
from tinygrad_nv.ptx.syntax import Address, Immediate, Instruction, Pair, Register, Sink, Symbol, Vector

KERNELS = Path(__file__).parents[2] / "emu" / "ptx" / "nvcc"


def kernel(body: str, parameters: str = ".param .u64 p", head: str = ""):
    """The one function of a module around `body`."""
    head = f".version 8.7\n.target sm_90a\n.address_size 64\n{head}\n"
    return parse(f"{head}.visible .entry k({parameters})\n{{\n{body}\nret;\n}}\n").functions["k"]


@triton.jit
def _add(x, y, out, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, m, n, k, bm: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr):
    a = tl.make_tensor_descriptor(a_ptr, [m, k], [k, 1], [bm, bk])
    b = tl.make_tensor_descriptor(b_ptr, [n, k], [k, 1], [bn, bk])
    c = tl.make_tensor_descriptor(c_ptr, [m, n], [n, 1], [bm, bn])
    row, column, total = tl.program_id(0) * bm, tl.program_id(1) * bn, tl.zeros((bm, bn), tl.float32)
    for i in range(0, k, bk): total = tl.dot(a.load([row, i]), b.load([column, i]).T, total)
    c.store([row, column], total.to(tl.bfloat16))


def compiled(fn, signature: dict[str, str], constants: dict[str, int], arch: int) -> str:
    source = ASTSource(fn, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]


ADD = ({"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"block": 256})
MATMUL = ({"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*bf16", "m": "i32", "n": "i32", "k": "i32"},
          {"bm": 64, "bn": 64, "bk": 64})


@pytest.mark.parametrize("arch", [80, 90])
def test_what_triton_writes_for_an_addition(arch: int):
    module = parse(compiled(_add, *ADD, arch))
    (function,) = module.functions.values()
    assert module.target.startswith(f"sm_{arch}")
    assert function.directives["reqntid"] == (128,)
    assert [v.offset for v in function.parameters.values()] == [0, 8, 16, 24, 32, 40]
    assert {i.mnemonic for i in function.body} >= {"ld", "st", "add", "setp", "ret", "mov"}
    guards = [i.guard.kind for i in function.body if i.guard is not None]
    assert guards
    assert set(guards) == {"pred"}


def test_what_triton_writes_for_a_tma_matmul():
    text = compiled(_matmul, *MATMUL, 90)
    (function,) = parse(text).functions.values()
    wgmma = [i for i in function.body if i.mnemonic == "wgmma" and i.modifiers[0] == "mma_async"]
    assert wgmma
    accumulator = wgmma[0].operands[0]
    assert isinstance(accumulator, Vector)
    assert len(accumulator.items) == 32
    loads = [i for i in function.body if i.opcode.startswith("cp.async.bulk.tensor.2d.shared::c")]
    assert loads
    source = loads[0].operands[1]
    assert isinstance(source, Address)
    assert source.coordinates is not None
    assert len(source.coordinates.items) == 2
    # inline assembly repeats its labels and registers in scopes: each gets a name of its own
    waits = [name for name in function.labels if name.startswith("waitLoop")]
    assert len(waits) == len(set(waits)) == text.count("waitLoop:")
    for i in function.body:
        if i.mnemonic == "bra": assert i.operands[0].name in function.labels
        assert text.splitlines()[i.line - 1].find(i.mnemonic) >= 0


def test_blocks_are_scopes():
    body = (".reg .b32 %r<3>; { .reg .b32 %r<9>, x; mov.b32 x, %r8; L: bra L; }"
            "{ .reg .f32 x; mov.f32 x, 1.0; L: bra L; }")
    function = kernel(body)
    first, loop, second, again, _ = function.body
    assert first.operands[0].kind == "b32"
    assert second.operands[0].kind == "f32"
    assert first.operands[0].name != second.operands[0].name
    assert loop.operands[0] != again.operands[0]
    assert [function.labels[i.operands[0].name] for i in (loop, again)] == [1, 3]


def test_a_branch_forward_into_an_outer_scope():
    function = kernel(".reg .pred %p<2>; { @!%p1 bra done; } done:")
    assert (function.body[0].guard, function.body[0].negated) == (Register("%p1", "pred"), True)
    assert function.labels["done"] == 1


@pytest.mark.parametrize(("text", "value"), [
    ("0x10", 16), ("017", 15), ("0b101", 5), ("10U", 10), ("-1", -1), ("~0", -1), ("(1+2)*3", 9),
    ("1 << 4 | 2", 18), ("-7/2", -3), ("-7%2", -1), ("1?2:3", 2), ("WARP_SZ*2", 64), ("!5", 0),
    ("0xffffffffffffffff", (1 << 64) - 1), ("(.s64)0xffffffffffffffff", -1), ("0f3F800000", 1.0),
    ("0d4000000000000000", 2.0), ("1.5", 1.5), ("2*1.5", 3.0)])
def test_constants(text: str, value: float):
    operand = kernel(f".reg .b64 %rd<2>; mov.b64 %rd1, {text};").body[0].operands[1]
    assert isinstance(operand, Immediate)
    assert operand.value == value


@given(st.floats(width=32))
def test_hexadecimal_floats_keep_their_bits(value: float):
    bits = struct.pack(">f", value)
    operand = kernel(f".reg .f32 %f<2>; mov.f32 %f1, 0f{bits.hex().upper()};").body[0].operands[1]
    assert isinstance(operand, Immediate)
    assert operand.float_bits == 32
    assert struct.pack(">f", operand.value) == bits or value != value


def test_every_kind_of_operand():
    head = ".extern .shared .align 16 .b8 smem[]; .global .align 4 .f32 table[2] = {1.5, 0f40000000};"
    body = """.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<3>;
      setp.lt.u32 %p1|%p2, %r1, %r2;  ld.global.v4.b32 {%r1, %r2, _, %r4}, [%rd1+-16];
      st.shared.b32 [smem+8], %r1;  mov.u32 %r3, %tid.x;  mov.u64 %rd2, table+4;  @!%p1 bra $L;
      cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3]; $L:"""
    setp, load, store, tid, table, branch, bulk, _ = kernel(body, head=head).body
    assert setp.operands[0] == Pair(Register("%p1", "pred"), Register("%p2", "pred"))
    assert load.operands[0].items[2] == Sink()
    assert load.operands[1] == Address(Register("%rd1", "b64"), -16)
    assert store.operands[0] == Address(Symbol("smem", 8))
    assert tid.operands[1] == Register("%tid.x", "special")
    assert table.operands[1] == Symbol("table", 4)
    assert branch.operands[0] == Symbol("$L")
    assert bulk.operands[0].coordinates == Vector((Register("%r1", "b32"), Register("%r2", "b32")))
    assert bulk.modifiers == ("async", "bulk", "tensor", "2d", "global", "shared::cta", "bulk_group")


def test_an_element_of_a_variable_is_its_bytes_from_the_start():
    function = kernel(".shared .align 4 .b32 a[8];\n.reg .b64 %r<2>;\n"
                      "mov.u64 %r1, a[3];\nmov.u64 %r1, a[0];\n"
                      "mov.u64 %r1, a[2] + 1;\nmov.u64 %r1, a + 3;")
    assert [i.operands[1] for i in function.body[:4]] == [Symbol("a", 12), Symbol("a"), Symbol("a", 9),
                                                          Symbol("a", 3)]


def test_variables_and_parameters():
    text = (".version 8.7\n.target sm_80\n.address_size 64\n.extern .shared .align 16 .b8 smem[];\n"
            ".const .align 4 .u32 c[3] = {1, 0x10};\n.global .align 1 .b8 s[4] = {97, 98};\n"
            ".visible .entry k(.param .u32 n, .param .align 64 .b8 map[128],\n"
            ".param .u64 .ptr .global .align 1 q)\n"
            ".maxntid 128, 1, 1\n.minnctapersm 2\n{ .shared .align 8 .b64 bar[2]; ret; }")
    module = parse(text)
    function = module.functions["k"]
    places = [(v.offset, v.nbytes, v.align) for v in function.parameters.values()]
    assert places == [(0, 4, 4), (64, 128, 64), (192, 8, 8)]
    assert function.parameter_bytes == 200
    assert function.directives == {"maxntid": (128, 1, 1), "minnctapersm": (2,)}
    assert module.variables["smem"].nbytes == 0
    assert (module.variables["c"].nbytes, module.variables["c"].data) == (12, struct.pack("<II", 1, 16))
    assert module.variables["s"].data == b"ab"
    assert function.variables["bar"].nbytes == 16


@pytest.mark.parametrize(("body", "words", "line"), [
    ("mov.b32 %r1, 5", "';' expected", 8), ("bra nowhere;", "label nowhere is not defined", 8),
    ("@%q bra x; x:", "guard %q is not declared", 8), ("? ;", "an instruction is expected", 8),
    (".reg .q32 %r<3>;", "unknown register type", 8), ("mov.b32 _, 1/0;", "division by zero", 8),
    ("mov.b32 _,\n$$#;", "unexpected '#'", 9)])
def test_errors_name_the_line(body: str, words: str, line: int):
    with pytest.raises(PTXError, match="PTX line") as caught: kernel(f".reg .b32 %r<3>;\n{body}")
    assert words in str(caught.value)
    assert caught.value.line == line


@pytest.mark.parametrize("text", ["", ".version 8.7\n.target sm_90a\n.entry k() {", ".version 8.7\nfoo"])
def test_what_is_no_module_is_refused(text: str):
    with pytest.raises(PTXError): parse(text)


# **** instructions on a line, which are read by their operands' texts ****

ODD = """.version 8.7
.target sm_90a
.address_size 64
.shared .align 4 .b8 table[64];
.visible .entry k(.param .b64 out) {
 .reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %d<4>;
 mov.b32 %r1, 010; mov.b32 %r2 , -3 ; add.s32 %r3,%r1,(4+2)*8; /* between */ mov.b32 %r4, table+4; // after
 @!%p1 bra DONE; @ %p2 bra.uni DONE;
 { .reg .b32 %r1, %x; mov.b32 %r1, 5; mov.b32 %x, %r1; add.s32 %r3, %x, %r1; }
 mov.b32 %r1, %r2; mov.b64 {%r1, %r2}, %d1; mov.b64 %d1, {%r1,
 %r2}; setp.eq.u32 %p1|%p2, %r1, 0x10; setp.eq.u32 _|%p2, %r1, 1; selp.b32 %r1, 1, 0, !%p1;
 ld.shared.b32 %r1, [table+8]; ld.shared.b32 %r1, [table]; ld.shared.v2.b32 {%r1, %r2}, [%r3 + 16];
 ld.global.b32 %r1, [%d1+012]; ld.global.b32 %r1, [%d1+-4]; mov.u32 %r1, %tid.x;
DONE: ret; mov.f32 %r1, 0f3F800000;
}
"""


@pytest.mark.parametrize("path", [None, *sorted(KERNELS.glob("*.ptx"))], ids=lambda path: path and path.stem)
def test_a_line_is_read_as_words_are(path: Path | None, monkeypatch: pytest.MonkeyPatch):
    """And nearly all are lines."""
    text, lines = ODD if path is None else path.read_text(), 0
    read = OperandParser.line_instruction

    def counted(self: OperandParser) -> Instruction | None:
        nonlocal lines
        lines += (made := read(self)) is not None
        return made
    monkeypatch.setattr(OperandParser, "line_instruction", counted)
    by_lines = Parser(text).module()
    monkeypatch.setattr(OperandParser, "line_instruction", lambda self: None)
    assert repr(by_lines) == repr(Parser(text).module())  # a NaN is not equal to itself
    instructions = sum(len(each.body) for each in (*by_lines.functions.values(), *by_lines.callees.values()))
    assert lines > 0.8 * instructions or path is None


@pytest.mark.parametrize("line", ["add.s32 %r1, %r2", "add.s32 %r1,, %r2;", "add.s32 %r1, %r2, ;",
                                  "bra NOWHERE;", "mov.b32 %r1, ^;", "@%q bra DONE;",
                                  "ld.global.b32 %r1, [%d1;", "mov.b32 %r1 %r2;"])
def test_errors_of_a_line_are_those_of_words(line: str, monkeypatch: pytest.MonkeyPatch):
    text, said = ODD.replace(" ret;", f" ret;\n {line}"), []
    for _ in range(2):
        with pytest.raises(PTXError) as caught: parse(text)
        said.append(str(caught.value))
        monkeypatch.setattr(OperandParser, "line_instruction", lambda self: None)
    assert said[0] == said[1]
