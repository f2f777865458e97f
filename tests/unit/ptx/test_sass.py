"""Loops in listings of SASS made by hand, and in one that ptxas and the disassembler make."""
from __future__ import annotations

import pytest

from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.sass import SASSInstruction, disassemble, disassembler, functions, loops, main_loop


def listing(*lines: str) -> list[SASSInstruction]:
    """Instructions 16 bytes apart; a line that ends in a colon is a label."""
    made, address = [], 0
    for line in lines:
        if line.endswith(":"):
            made.append(line)
            continue
        made.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return functions("\n".join(made))[""]


LOOP = listing("MOV R1, c[0x0][0x28]", ".L_x_0:", "LDSM.16.M88.4 R4, [R2]",
               "HMMA.16816.F32.BF16 R8, R4.reuse, R6, R8", "HMMA.16816.F32.BF16 R12, R4, R6, R12",
               "IADD3 R2, R2, 0x20, RZ", "ISETP.GE.AND P0, PT, R2, R3, PT", "@!P0 BRA `(.L_x_0)", "EXIT")


def test_a_loop_is_what_lies_between_a_label_and_the_branch_back():
    loop = main_loop(LOOP)
    assert loop is not None
    assert [each.opcode for each in loop.instructions] == ["LDSM", "HMMA", "HMMA", "IADD3", "ISETP", "BRA"]
    assert (loop.tensor, loop.units, loop.around) == (2, 2.0, 6)
    assert loop.counts == {"LDSM": 1, "HMMA": 2, "IADD3": 1, "ISETP": 1, "BRA": 1}


def test_branches_to_addresses_are_those_to_labels():
    """cuobjdump prints addresses, and a comment with the encoding after each line."""
    text = """
                Function : gemm
        .headerflags    @"EF_CUDA_SM80"
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;  /* 0x00000a00ff017624 */
                                                                            /* 0x000fc400078e00ff */
        /*0010*/                   HMMA.16816.F32 R8, R4, R6, R8 ;          /* 0x00000000ff017624 */
        /*0020*/              @!P0 BRA 0x10 ;                               /* 0x00000000ff017624 */
        /*0030*/                   EXIT ;                                   /* 0x000000000000794d */
        /*0040*/                   BRA 0x40;                                /* 0xfffffff000007947 */
    """
    code = functions(text)["gemm"]
    assert [each.address for each in code] == [0, 16, 32, 48, 64]
    loop = main_loop(code)
    assert loop is not None
    assert [each.opcode for each in loop.instructions] == ["HMMA", "BRA"]


def test_a_call_of_what_never_returns_is_a_branch():
    """So ptxas leaves a loop of a large kernel: what follows is no part of an iteration."""
    code = listing(".L_x_0:", "HMMA.16816.F32 R8, R4, R6, R8", "@P3 CALL.REL.NOINC `(.L_x_1)",
                   "BRA `(.L_x_0)", ".L_x_1:", "STG.E [R2], R8", "EXIT")
    assert [each.opcode for each in code] == ["HMMA", "BRA", "BRA", "STG", "EXIT"]
    loop = main_loop(code)
    assert loop is not None
    assert [each.opcode for each in loop.instructions] == ["HMMA", "BRA", "BRA"]
    kept = listing("CALL.REL.NOINC `(.L_x_1)", "EXIT", ".L_x_1:", "MUFU.RCP R8, R8", "RET.REL.NODEC R4 0x0")
    assert kept[0].opcode == "CALL"


def test_a_function_is_named_by_its_section():
    text = '\t.section\t.text.first,"ax",@progbits\n /*0000*/ EXIT ;\n' \
           '\t.section\t.text.second,"ax",@progbits\n /*0000*/ NOP ;\n /*0010*/ EXIT ;\n'
    assert {name: len(code) for name, code in functions(text).items()} == {"first": 1, "second": 2}


SPIN = listing(".L_x_8:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x34000], R153", "@!P0 BRA `(.L_x_6)",
               ".L_x_9:", "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR36], R24",
               "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR36], R24, gsb0", "@P1 BRA `(.L_x_8)", "EXIT", ".L_x_6:",
               "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR8+0x34000], R153", "@!P0 BRA `(.L_x_6)",
               "BRA `(.L_x_9)")


def test_a_wait_that_spins_after_the_end_belongs_to_the_loop_but_not_to_the_way_around():
    loop = main_loop(SPIN)
    assert loop is not None
    assert len(loop.instructions) == 8
    assert loop.around == 5
    assert (loop.tensor, loop.units) == (2, 64.0)


def test_what_only_waits_is_a_loop_of_its_own():
    assert [(len(loop.instructions), loop.tensor) for loop in loops(SPIN)] == [(8, 2), (2, 0)]


def test_the_innermost_loop_with_products_is_the_main_one():
    """A loop over tiles around it has products too; a loop without any is not it."""
    code = listing(".L_x_0:", "MOV R1, R2", ".L_x_1:", "HMMA.16816.F32 R8, R4, R6, R8", "@P0 BRA `(.L_x_1)",
                   ".L_x_2:", "STG.E [R2.64], R8", "@P1 BRA `(.L_x_2)", "@P2 BRA `(.L_x_0)", "EXIT")
    loop = main_loop(code)
    assert loop is not None
    assert [each.opcode for each in loop.instructions] == ["HMMA", "BRA"]
    assert [len(each.instructions) for each in loops(code)] == [6, 2, 2]


def test_the_way_around_does_all_the_products():
    """A tile's end inside the loop is passed by; a branch around the products is not taken."""
    code = listing(".L_x_0:", "@P1 BRA `(.L_x_1)", "IMMA.16832.S8.S8 R8, R4.ROW, R6.COL, R8", ".L_x_1:",
                   "@P0 BRA `(.L_x_2)", "STG.E [R2.64], R8", "STG.E [R2.64+0x10], R8", ".L_x_2:",
                   "@P2 BRA `(.L_x_0)", "EXIT")
    loop = main_loop(code)
    assert loop is not None
    assert (len(loop.instructions), loop.around, loop.units) == (6, 4, 2.0)


def test_between_several_the_one_with_more_work_is_main():
    code = listing(".L_x_0:", "HMMA.1688.F32.TF32 R8, R4, R6, R8", "@P0 BRA `(.L_x_0)", ".L_x_1:",
                   "HMMA.16816.F32 R8, R4, R6, R8", "@P0 BRA `(.L_x_1)", "EXIT")
    loop = main_loop(code)
    assert loop is not None
    assert (loop.instructions[0].modifiers, loop.units) == (".16816.F32", 1.0)


@pytest.mark.parametrize("first", [True, False])
def test_of_loops_that_multiply_as_much_the_shorter_is_the_main_one(first: bool):
    """The other masks what it adds up."""
    plain = (".L_x_0:", "HMMA.16816.F32 R8, R4, R6, R8", "@P0 BRA `(.L_x_0)")
    masked = (".L_x_1:", "FSEL R6, R6, RZ, P1", "HMMA.16816.F32 R8, R4, R6, R8", "@P0 BRA `(.L_x_1)")
    loop = main_loop(listing(*(plain + masked if first else masked + plain), "EXIT"))
    assert loop is not None
    assert loop.around == 2


def test_code_without_products_has_no_main_loop():
    assert main_loop(listing(".L_x_0:", "NOP", "@P0 BRA `(.L_x_0)", "EXIT")) is None
    assert main_loop(listing("HMMA.16816.F32 R8, R4, R6, R8", "EXIT")) is None
    assert loops([]) == []


def test_a_trap_behind_the_end_is_no_part_of_anything():
    """ptxas ends functions with a branch to itself that nothing reaches."""
    assert loops(listing("EXIT", ".L_x_0:", "BRA `(.L_x_0)")) == []


@pytest.mark.parametrize("branch", ["BRA P0, `(.L_x_1)", "BRA.DIV UR4, `(.L_x_1)", "@P0 BRA `(.L_x_1)"])
def test_branches_with_a_condition_may_not_be_taken(branch: str):
    code = listing(".L_x_0:", branch, "HMMA.16816.F32 R8, R4, R6, R8", ".L_x_1:", "@P1 BRA `(.L_x_0)", "EXIT")
    loop = main_loop(code)
    assert loop is not None
    assert loop.around == 3


def test_threads_that_parted_meet_where_bssy_says():
    """BSYNC goes to the end of its region, also when that is not the next instruction."""
    code = listing(".L_x_0:", "BSSY B0, `(.L_x_2)", "@P0 BRA `(.L_x_1)", "HMMA.16816.F32 R8, R4, R6, R8",
                   "BSYNC B0", "EXIT", ".L_x_1:", "NOP", "BSYNC B0", ".L_x_2:", "@P1 BRA `(.L_x_0)", "EXIT")
    loop = main_loop(code)
    assert loop is not None
    assert " ".join(each.opcode for each in loop.instructions) == "BSSY BRA HMMA BSYNC NOP BSYNC BRA"
    assert loop.around == 5


@pytest.mark.parametrize(("text", "flops"), [
    ("HMMA.16816.F32.BF16 R8, R4, R6, R8", 4096), ("HMMA.1688.F32.TF32 R8, R4, R6, R8", 2048),
    ("IMMA.16832.S8.S8.SAT R8, R4.ROW, R6.COL, R8", 8192), ("QMMA.16832.F32.E4M3.E4M3 R8, R4, R6, R8", 8192),
    ("IMMA.8816.S8.S8 R8, R4.ROW, R6.COL, R8", 2048), ("HGMMA.64x8x16.F32.BF16 R8, gdesc[UR4], R8", 4096),
    ("QGMMA.64x128x32.F32.E4M3.E4M3 R8, gdesc[UR4], R8", 2 * 64 * 128 * 32 // 4), ("FFMA R1, R2, R3, R4", 0)])
def test_operations_of_a_warp_follow_from_the_shape(text: str, flops: int):
    assert listing(text)[0].tensor_flops == flops


def test_guards_are_no_part_of_the_opcode():
    """Predicates of a thread, of a warp, and the one that is always true."""
    code = listing("@!P0 BRA 0x0", "@UP2 UMOV UR4, URZ", "@!PT LDS RZ, [RZ]", "PRMT R1, R2, 0x10, R3")
    found = [(each.guard, each.opcode) for each in code]
    assert found == [("@!P0", "BRA"), ("@UP2", "UMOV"), ("@!PT", "LDS"), ("", "PRMT")]


def test_a_loop_of_the_builder_is_found_in_its_cubin():
    """Eight products an iteration, of which ptxas makes one HMMA each; the loop is not unrolled."""
    assert disassembler() is not None
    k = Kernel("products", arch="sm_80", threads=32)
    out, steps = k.pointer("out"), k.param("steps", "s32")
    sums, left = [k.regs("f32", 4, 0.0) for _ in range(8)], k.regs("b32", 4, 0)
    with k.loop(0, steps):
        for cell in sums: k.mma("m16n8k16", "f32.bf16.bf16.f32", cell, left, left[:2], cell)
        left[0] += 1
    for i, cell in enumerate(sums): k.st("global", "f32", (out + k.tid.x.to("u64") * 128).at(16 * i), cell)
    code = functions(disassemble(assemble(k.ptx(), "sm_80").cubin))["products"]
    loop = main_loop(code)
    assert loop is not None
    assert loop.tensor % 8 == 0
    assert loop.units == loop.tensor
    assert loop.around == len(loop.instructions) < len(code)
