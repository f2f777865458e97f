"""What ptxas makes of PTX: the same instructions as without lines, their control bits, and the lines."""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ptx.timing_case import KERNELS, OURS, line_of, module, ptx
from tinygrad_nv.errors import PTXError, ToolchainError
from tinygrad_nv.ptx import sass
from tinygrad_nv.ptx.assemble import ARCHITECTURES, assemble
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.sass import disassemble
from tinygrad_nv.ptx.timing import listing as module_of_listing
from tinygrad_nv.ptx.timing.instructions import FLAGS, TimedInstruction
from tinygrad_nv.ptx.timing.listing import listing, one_a_line

# what these come from; SYNCS and BAR also of what the PTX manual says in terms of them
ORIGINS = {"HGMMA": ("wgmma.mma_async.",), "HMMA": ("mma.sync.",), "UTMALDG": ("cp.async.bulk.tensor.",),
           "SYNCS": ("mbarrier.",), "BAR": ("bar.", "barrier.")}
LOADS = ("LDG", "LDS", "LDSM", "S2R", "SHFL")  # of a latency that is not known when code is made


def only(text: str) -> tuple[TimedInstruction, ...]:
    """The kernel's instructions, with the lines of the text."""
    found = listing(text)
    return tuple(replace(each, ptx_line=found.origins[each.ptx_line]) if found.origins else each
                 for each in found.kernels["k"])


def lined(text: str, opcode: str) -> list[int]:
    return [each.ptx_line for each in only(text) if each.opcode == opcode]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_lines_leave_the_instructions_as_they_are(name: str):
    """All 128 bits of each."""
    with_lines, without = (disassemble(assemble(ptx(name), flags=flags).cubin, *FLAGS)
                           for flags in (("-lineinfo",), ()))
    assert "//## File" in with_lines
    def code(text: str) -> list[str]: return [row for row in text.splitlines() if "*/" in row]
    assert code(with_lines) == code(without)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_instructions_that_stay_have_the_line_of_their_own(name: str):
    text = ptx(name)
    for entry, code in listing(text).kernels.items():
        body = parse(text).functions[entry].body
        opcodes = {each.line: each.opcode for each in body}
        assert all(opcodes.get(each.ptx_line, "").startswith(ORIGINS.get(each.opcode, "")) for each in code)
        for opcode, origin in (("HGMMA", r"wgmma\.mma"), ("UTMALDG", r"cp\.async\.bulk\.tensor\..d\.shared")):
            wanted = Counter(each.line for each in body if re.match(origin, each.opcode))
            assert Counter(each.ptx_line for each in code if each.opcode == opcode) == wanted


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_nearly_all_instructions_have_lines(name: str):
    """Without: what ptxas begins a function with, and the trap and padding at its end."""
    for code in listing(ptx(name)).kernels.values():
        end = next(i for i, each in enumerate(code) if each.opcode == "BRA" and each.target == each.address)
        assert sum(1 for each in code[:end] if not each.ptx_line) <= 4
        assert not any(each.ptx_line for each in code[end:])


# **** control bits ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OURS)
def test_loads_set_scoreboards_and_others_wait_for_them(name: str):
    """Loads of one kind complete in order: one without a scoreboard is followed by one with."""
    for code in listing(ptx(name)).kernels.values():
        loads = [(i, each) for i, each in enumerate(code) if each.opcode in LOADS and each.guard != "@!PT"]
        assert loads
        for i, each in loads:
            assert any(other.opcode == each.opcode and other.write_barrier is not None
                       for other in code[i:i + 16])
        set_ones = {each.write_barrier for each in code} | {each.read_barrier for each in code}
        waited = {i for each in code for i in range(6) if each.wait_mask >> i & 1}
        assert waited
        assert waited <= set_ones
        assert any(each.reuse for each in code)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_consumer_waits_for_its_load_and_a_chain_stalls(arch: str):
    chain = "\n".join("  fma.rn.f32 %f1, %f1, %f1, %f2;" for _ in range(8))
    text = module(f"  ld.global.f32 %f1, [%rd1];\n  ld.global.f32 %f2, [%rd1+4];\n{chain}\n"
                  "  st.global.f32 [%rd1], %f1;\n  ret;").replace("sm_90a", arch)
    code = listing(text, arch).kernels["k"]
    loads = [each for each in code if each.opcode == "LDG"]
    chained = [each for each in code if each.opcode == "FFMA"]
    assert len(chained) == 8
    assert chained[0].wait_mask == sum({1 << each.write_barrier for each in loads})
    assert not any(each.wait_mask for each in chained[1:])
    assert all(4 <= each.stall <= 6 for each in chained)
    assert all(each.write_barrier is None and each.read_barrier is None for each in chained)


# **** lines ****

ODD = module("""  .loc 1 77 3
$outer: {
    .reg .f32 %f1; ld.global.f32 %f1, [%rd1]; ex2.approx.ftz.f32 %f1, %f1;  // two on a line
    /* a comment
       of lines */ st.global.f32
      [%rd1+4],
      %f1;
    lg2.approx.ftz.f32 %f2,
      %f1;
  }
  add.s32 %r1, %r1, -1;
  setp.ne.s32 %p1, %r1, 0;
  @%p1
    bra
    $outer;
  call (%f3), twice, (%f2);
  st.global.f32 [%rd1+8], %f3;
  ret;""", head="""
.func (.reg .f32 out) twice(.reg .f32 x)
{
  .reg .f32 %f<3>;
  mul.f32 %f1, x, x;
  sin.approx.f32 out, %f1;
  ret;
}
.file 1 "other.cu"
""") + '.section .debug_str { .b8 0 }\n'


def test_a_line_is_that_of_the_opcode():
    """Of instructions over several lines, behind labels and comments, in blocks, and in functions."""
    assert set(lined(ODD, "LDG")) == {line_of(ODD, "two on a line")}
    assert set(lined(ODD, "STG")) == {line_of(ODD, "of lines */ st"), line_of(ODD, "st.global.f32 [%rd1+8]")}
    assert lined(ODD, "CALL") == [line_of(ODD, "call (%f3)")]
    assert set(lined(ODD, "BRA")) - {0} == {line_of(ODD, "    bra")}
    mufu = {each.modifiers: each.ptx_line for each in only(ODD) if each.opcode == "MUFU"}
    assert mufu == {".EX2": line_of(ODD, "two on a line"), ".LG2": line_of(ODD, "lg2.approx"),
                    ".SIN": line_of(ODD, "sin.approx")}


# **** errors and the cache ****

@pytest.mark.slow
def test_one_entry_of_several():
    both = ptx("nvcc hopper")
    assert set(listing(both).kernels) == {"gemm", "bulk", "neighbour"}
    assert set(listing(both, entry="bulk").kernels) == {"bulk"}
    with pytest.raises(PTXError): listing(both, entry="none")


def test_a_refusal_names_the_line():
    with pytest.raises(PTXError, match="nothing"): listing(module("  nothing.f32 %f1, %f1;\n  ret;"))


def test_what_is_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = module("  st.global.u32 [%rd1], %r1;\n  ret;")
    first = listing(text).kernels
    listing.cache_clear()
    monkeypatch.setattr(module_of_listing, "disassemble", None)
    assert listing(text).kernels == first
    with pytest.raises(TypeError): listing(text.replace("%r1;\n", "%r2;\n"))


@pytest.mark.parametrize(("program", "found"), [
    (None, "no disassembler"), ("cuobjdump", "cuobjdump prints no")])
def test_a_missing_disassembler_is_said(program: str | None, found: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Path(program) if program else None
    for where in (sass, module_of_listing): monkeypatch.setattr(where, "disassembler", lambda: path)
    monkeypatch.setattr(module_of_listing, "version", lambda program: "13.0")
    listing.cache_clear()
    with pytest.raises(ToolchainError, match=found) as error: listing(module("  ret;"))
    assert error.value.fix == "pip install 'tinygrad-nv[emulator]'"


def test_several_instructions_of_a_line_are_told_apart():
    """The text is that with lines of their own; lines are those that were given."""
    steps = [f"fma.rn.f32 %f1, %f1, %f{i}, %f1;" for i in range(2, 8)]
    head, foot = "  .reg .f32 %f<9>;", "  ret; // ; not an instruction; nor that"
    given, laid = (module(f"{head}\n  {between.join(steps)}\n{foot}") for between in (" ", "\n"))
    one, origins = one_a_line(given)
    alone = one_a_line(laid)[0]
    assert [each.strip() for each in one.splitlines()] == [each.strip() for each in alone.splitlines()]
    assert one_a_line(one) == (one, ())
    lines = given.splitlines()
    assert all(each.strip() in lines[origins[i] - 1] for i, each in enumerate(one.splitlines(), 1))


@pytest.mark.slow
def test_a_newer_version_is_assembled_as_one_that_ptxas_knows():
    text = module("  ret;")
    assert listing(text.replace(".version 8.7", ".version 99.9")).kernels == listing(text).kernels
