"""What ptxas makes of grouped matmuls with wgmma: no spill, nothing serialised, a main loop of wgmmas and
barriers; and no bank conflict in it."""
from __future__ import annotations

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.grouped_case import given, launched
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedScaledWgmma, GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, HOPPER, S, EIGHTS = dtypes.bfloat16, GPU("sm_90a", 132), GroupedWgmma(), GroupedScaledWgmma()
ROWS = {"rows": 8192, "groups": 64}
SPECS = {
    "gate | up": GroupedGemmSpec(n=3072, k=4096, dtype=BF16, sources=1024, gather=8, activation="silu",
                                 **ROWS),
    "clamped": GroupedGemmSpec(n=5760, k=2880, dtype=BF16, sources=2048, gather=4, biased=True,
                               activation="swiglu_clamped", **ROWS),
    "down": GroupedGemmSpec(n=4096, k=1536, dtype=BF16, scatter=True, weighted=True, biased=True, **ROWS),
    "gradient of rows": TransposedGroupedSpec(n=1536, k=4096, dtype=BF16, **ROWS),
    "gate | up of 8 bits": ScaledGroupedGemmSpec(n=4096, k=7168, sources=1024, gather=8, activation="silu",
                                                 **ROWS),
    "down of 8 bits": ScaledGroupedGemmSpec(n=7168, k=2048, scatter=True, weighted=True, **ROWS)}
LEGAL = [(name, schedule) for name, spec in SPECS.items() for template in TABLE.templates("gpu", spec)
         for schedule in template.candidates(spec, HOPPER)
         if isinstance(schedule, GroupedWgmma) and not template.problems(spec, schedule, HOPPER)]
CHOSEN = [(name, schedule) for name, schedule in LEGAL if schedule == TABLE.choose(SPECS[name], HOPPER)]

# bytes that are stored and loaded, and the stack's, of a schedule that is not chosen
KNOWN_SPILLS = {("gate | up of 8 bits", EIGHTS.block(128, 128).k(128).warps(12).stages(6)): (4, 4, 8)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "schedule"), [
    pytest.param(*each, marks=[] if each in CHOSEN else pytest.mark.slow, id=f"{each[0]}, {each[1]}")
    for each in LEGAL])
def test_the_loop_neither_spills_nor_serialises(name: str, schedule: GroupedWgmma):
    """`assemble` raises where ptxas says that it serialised wgmmas."""
    spec = SPECS[name]
    made = TABLE.build(spec, schedule, HOPPER)
    found = assemble(made.ptx, "sm_90a")
    used = found.kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == \
        KNOWN_SPILLS.get((name, schedule), (0, 0, 0))
    loop = main_loop(functions(disassemble(found.cubin))[made.name])
    assert loop is not None
    subtiles = schedule.block_m // 64 // (1 if schedule.mode == "pingpong" else schedule.consumers)
    assert loop.tensor == 4 * subtiles
    assert not {"LDG", "STG", "LDL", "STL", "LDGSTS"} & set(loop.counts)
    if not spec.scaled: assert len(loop.instructions) <= 64
    else: assert loop.counts["FFMA"] == schedule.block_n // 2 * subtiles    # of each sum


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [
    S.block(128, 128).stages(3), S.block(128, 8).swap_operands().stages(3), EIGHTS.block(128, 128).stages(3),
    EIGHTS.block(128, 16).swap_operands().stages(3)], ids=str)
def test_no_bank_conflict_in_the_loop(schedule: GroupedWgmma):
    """Twice as many stages have as many conflicts: those of other steps."""
    lost = []
    for stages in (4, 8):
        k = stages * schedule.block_k
        spec = GroupedGemmSpec(3, 80, 144, k, BF16, 40, gather=2)
        if isinstance(schedule, GroupedScaledWgmma):
            spec = ScaledGroupedGemmSpec(3, 80, 144, k, sources=40, gather=2)
        made = TABLE.build(spec, schedule, GPU("sm_90a", 4))
        lost.append(sum(launched(made, spec, given(spec, [50, 0, 30]))[1].stats.bank_conflicts.values()))
    assert lost[0] == lost[1]



@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [
    GroupedGemmSpec(256, 32768, 4096, 7168, BF16, 4096, gather=8, activation="silu"),
    ScaledGroupedGemmSpec(256, 32768, 7168, 2048, scatter=True, weighted=True)], ids=["bf16", "e4m3"])
def test_what_is_legal_is_built(spec: GroupedGemmSpec):
    """Tables of many groups lie beside rings that take all of shared memory."""
    legal = [(template, schedule) for template in TABLE.templates("gpu", spec)
             for schedule in template.candidates(spec, HOPPER)
             if not template.problems(spec, schedule, HOPPER)]
    assert len(legal) > 10
    for template, schedule in legal: template.build(spec, schedule, HOPPER)
