"""SASS by the blocks of its PTX: what one execution of each block stands for."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.ptx.timing_case import AMPERE, KERNELS, OURS, line_of, module, ptx
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.sass import dominators, natural_loops
from tinygrad_nv.ptx.syntax import PTXFunction
from tinygrad_nv.ptx.timing.instructions import TimedInstruction
from tinygrad_nv.ptx.timing.listing import listing
from tinygrad_nv.ptx.timing.placement import Copy, Placement, ptx_blocks

# what PTX and SASS have one for one, but for tries at an mbarrier again
PAIRS = (("wgmma.mma_async", "HGMMA."), ("mma.sync", "HMMA."), ("mbarrier.arrive", "SYNCS.ARRIVE"),
         ("mbarrier.try_wait", "SYNCS.PHASECHK"))


def of(text: str) -> tuple[Placement, PTXFunction]:
    return listing(text).placement("k"), parse(text).functions["k"]


def at(found: Placement, function: PTXFunction, line: int) -> int:
    """The PTX block of a line."""
    return next(i for i, part in enumerate(found.blocks)
                if line in [each.line for each in function.body[part.start:part.stop]])


def name_of(each: TimedInstruction) -> str: return each.opcode + each.modifiers


def opcodes(copy: Copy) -> list[str]: return [each.opcode for each in copy.instructions]


# **** our kernels ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_block_does_is_among_its_instructions(name: str):
    """As many of each as the PTX block has, with those that are within it."""
    text = ptx(name)
    for entry in listing(text).kernels:
        found, function = listing(text).placement(entry), parse(text).functions[entry]
        for of_ptx, of_sass in PAIRS:
            wanted = Counter(found.homes[each.line][0] for each in function.body
                             if each.opcode.startswith(of_ptx))
            got = Counter(i for i, copies in enumerate(found.copies) if copies
                          for each in copies[0].instructions if name_of(each).startswith(of_sass))
            assert got == wanted


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", OURS)
def test_instructions_are_in_the_block_of_their_line_or_in_one_that_is_executed_as_often(name: str):
    """ptxas moves some to where they are executed as often, and few to where it is not."""
    text = ptx(name)
    for entry, code in listing(text).kernels.items():
        found = listing(text).placement(entry)
        as_often = equivalent(found)
        hosts = {each.address: host for host, block in zip(found.hosts, found.sass, strict=True)
                 for each in block}
        lined = sum(1 for each in code if each.ptx_line)
        assert len(found.out_of_place) <= 0.12 * lined   # most are packed as soon as their sums are there
        moved = [each for each in found.out_of_place
                 if not any(as_often(home, hosts[each.address]) for home in found.homes[each.ptx_line])]
        assert len(moved) <= 0.07 * lined   # most of decode, which reads its queries once, ahead of all else


def equivalent(found: Placement) -> Callable[[int, int], bool]:
    """Whether two PTX blocks are in the same loops, and neither is executed without the other."""
    follow, end = [part.follow for part in found.blocks], len(found.blocks)
    before = [[end - i for i, nexts in enumerate(follow) if to in (nexts or (end,))]
              for to in range(end, -1, -1)]
    above, below, loops = dominators(follow), dominators(before), natural_loops(follow).values()
    def same(a: int, b: int) -> bool:
        return all((a in loop) == (b in loop) for loop in loops) and (
            (a in above[b] and end - b in below[end - a]) or (b in above[a] and end - a in below[end - b]))
    return same


@pytest.mark.parametrize("name", KERNELS)
def test_instructions_are_placed_once(name: str):
    """But for what is called, and for tries again, which are in no pass."""
    for entry in listing(ptx(name)).kernels:
        found = listing(ptx(name)).placement(entry)
        placed = Counter(each.address for copies in found.copies for copy in copies
                         for each in copy.instructions)
        assert set(placed.values()) == {1}
        retried = {each.address for i in found.retries for each in found.sass[i]}
        assert not placed.keys() & retried
        reached = {each.address for host, block in zip(found.hosts, found.sass, strict=True)
                   if host is not None for each in block}
        assert len(reached - retried - placed.keys()) <= 0.2 * len(reached)


# **** PTX blocks ****

def test_blocks_begin_where_branches_go_and_after_what_may_leave():
    """A label that no branch names begins none."""
    text = module("""  mov.u32 %r2, 0;
$unused:
  setp.eq.s32 %p1, %r1, 0;
  @%p1 ret;
$loop:
  add.s32 %r2, %r2, 1;
  setp.lt.s32 %p2, %r2, %r1;
  @%p2 bra $loop;
  brx.idx %r1, $table;
$table: .branchtargets $loop, $end;
$end:
  ret;""")
    blocks = ptx_blocks(parse(text).functions["k"])
    assert [(block.stop - block.start, block.follow) for block in blocks] == [
        (5, (1,)), (3, (1, 2)), (1, (1, 3)), (1, ())]


# **** what ptxas does to blocks ****

def test_invariants_are_placed_outside_their_loop():
    text = module("""  mov.f32 %f3, 0f00000000;
  mov.u32 %r2, %tid.x;
$loop:
  cvt.rn.f32.s32 %f1, %r2;
  ld.volatile.global.f32 %f2, [%rd1];
  fma.rn.f32 %f3, %f2, %f1, %f3;
  add.s32 %r1, %r1, -1;
  setp.ne.s32 %p1, %r1, 0;
  .pragma "nounroll";
  @%p1 bra $loop;
  st.global.f32 [%rd1], %f3;
  ret;""")
    found, function = of(text)
    loop = at(found, function, line_of(text, "ld.volatile"))
    assert loop in found.blocks[loop].follow
    (copy,) = found.copies[loop]
    assert copy.executions == 1
    assert {"LDG", "FFMA", "BRA"} <= set(opcodes(copy))
    assert not any(opcode.startswith("I2F") for opcode in opcodes(copy))
    moved = [each for each in found.out_of_place if each.ptx_line == line_of(text, "cvt.rn")]
    assert [each.opcode[:3] for each in moved] == ["I2F"]


def test_an_unrolled_loop_has_copies():
    """Of four iterations, of two, of one; what leads from one to the next is in none."""
    text = module("""  mov.f32 %f3, 0f00000000;
$loop:
  ld.global.f32 %f2, [%rd1];
  add.f32 %f3, %f2, %f3;
  add.s64 %rd1, %rd1, 4;
  add.s32 %r1, %r1, -1;
  setp.ne.s32 %p1, %r1, 0;
  @%p1 bra $loop;
  st.global.f32 [%rd1], %f3;
  ret;""")
    found, function = of(text)
    copies = found.copies[at(found, function, line_of(text, "ld.global.f32"))]
    assert len(copies) > 1
    assert [copy.executions for copy in copies] == sorted([copy.executions for copy in copies], reverse=True)
    assert copies[-1].executions == 1
    assert all(opcodes(copy).count("LDG") == copy.executions for copy in copies)


def test_what_follows_a_loop_is_not_in_it():
    """Triton's epilogue: ptxas gives its first block no line, nvdisasm repeats that of the branch back."""
    text = ptx(AMPERE)
    (entry, code), = listing(text, "sm_80").kernels.items()
    found = listing(text, "sm_80").placement(entry)
    packed = [each.address for each in code if each.opcode == "F2FP"]
    loop = {each.address for part, copies in zip(found.blocks, found.copies, strict=True) for copy in copies
            if found.blocks.index(part) in part.follow for each in copy.instructions}
    assert packed
    assert loop
    assert not loop & set(packed)


def test_what_became_guards_is_within_the_block_that_would_branch():
    text = module("""  mov.u32 %r2, %tid.x;
  setp.lt.s32 %p1, %r2, %r1;
  @!%p1 bra $join;
  st.global.u32 [%rd1], %r2;
$join:
  bar.sync 0;
  st.global.u32 [%rd1+4], %r2;
  ret;""")
    found, _ = of(text)
    assert [len(copies) for copies in found.copies] == [1, 0, 0]
    (copy,) = found.copies[0]
    stores = [each for each in copy.instructions if each.opcode == "STG"]
    assert [bool(each.guard) for each in stores] == [True, False]
    assert not found.out_of_place


WAIT = """  .shared .b64 bar;
  mov.u32 %r2, bar;
  mbarrier.init.shared.b64 [%r2], 1;
  bar.sync 0;
  add.s32 %r3, %r1, 1;
{}
  st.global.u32 [%rd1], %r3;
  ret;"""


def test_the_first_try_is_that_of_the_block_before_and_others_are_in_no_pass():
    """ptxas takes it out of the loop, and puts the loop behind the end."""
    text = module(WAIT.format("$wait:\n  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;\n"
                              "  @!%p1 bra $wait;"))
    found, function = of(text)
    wait = at(found, function, line_of(text, "try_wait"))
    assert found.waits == {wait}
    assert found.copies[wait] == ()
    tries = [each for each in found.copies[wait - 1][0].instructions if tried(each)]
    assert [each.ptx_line for each in tries] == [line_of(text, "try_wait")]
    assert sum(1 for i in found.retries for each in found.sass[i] if tried(each)) == 1


def test_a_wait_of_two_blocks_counts_once():
    """As CUTLASS writes it; ptxas leaves it as it is."""
    text = module(WAIT.format("$wait:\n  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r2], 0;\n"
                              "  @%p1 bra $done;\n  bra $wait;\n$done:"))
    found, function = of(text)
    wait = at(found, function, line_of(text, "try_wait"))
    assert found.waits == {wait, wait + 1}
    tries = [each for copies in found.copies for copy in copies for each in copy.instructions if tried(each)]
    assert [each.ptx_line for each in tries] == [line_of(text, "try_wait")]


def tried(each: TimedInstruction) -> bool: return name_of(each).startswith("SYNCS.PHASECHK")


def test_a_slow_path_is_in_no_pass():
    """A square root is a few instructions, and a function for what is not normal."""
    text = module("  ld.global.f32 %f1, [%rd1];\n  sqrt.rn.f32 %f1, %f1;\n  st.global.f32 [%rd1], %f1;\n"
                  "  ret;")
    found, _ = of(text)
    ((copy,),) = found.copies
    assert any(each.opcode == "CALL" for block in found.sass for each in block)
    assert opcodes(copy).count("MUFU") == 1
    assert "CALL" not in opcodes(copy)
    assert opcodes(copy)[-1] == "EXIT"


def test_what_a_branch_leaves_out_is_said():
    """A guard of some instructions becomes a branch around them."""
    text = module("  setp.eq.s32 %p1, %r1, 0;\n  @%p1 cp.async.bulk.wait_group.read 0;\n  bar.sync 0;\n"
                  "  ret;")
    found, _ = of(text)
    ((copy,),) = found.copies
    assert [each.opcode for each in copy.instructions if each.address in copy.skipped] == ["DEPBAR"]


def test_a_called_function_is_executed_where_it_is_called():
    text = module("""  ld.global.f32 %f1, [%rd1];
  call (%f2), twice, (%f1);
  st.global.f32 [%rd1+4], %f2;
  call (%f3), twice, (%f2);
  st.global.f32 [%rd1+8], %f3;
  ret;""", head=""".func (.reg .f32 out) twice(.reg .f32 x)
{
  .reg .f32 %f1;
  sin.approx.f32 %f1, x;
  cos.approx.f32 out, %f1;
  ret;
}
""")
    found, _ = of(text)
    ((copy,),) = found.copies
    work = [each for each in opcodes(copy) if each in ("LDG", "CALL", "MUFU", "RET", "STG", "EXIT")]
    call = ["CALL", "MUFU", "MUFU", "RET", "STG"]
    assert work == ["LDG", *call, *call, "EXIT"]
