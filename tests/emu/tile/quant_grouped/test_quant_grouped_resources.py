"""Which templates of grouped matmuls with quantised matrices are chosen, and what ptxas and the emulator
count of them: no spill, instructions for each weight, no bank conflict in the main loop."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import DType

from tests.support.tile.quant_grouped_case import BF16, TYPES, reported, spec_of
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv, QuantGroupedMma, QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER, AMPERE = GPU("sm_90a", 132), GPU("sm_80", 108)
G, M, W = QuantGroupedGemv(), QuantGroupedMma(), QuantGroupedWgmma()


def layer(name: str, tokens: int, dtype: DType = BF16) -> tuple[QuantGroupedSpec, QuantGroupedSpec]:
    """Both matmuls of gpt-oss-120b: 4 of 128 experts of 2880 x 2880; of other formats of 3072 x 3072."""
    width = 2880 if name == "MXFP4" else 3072
    both = GroupedGemmSpec(128, 4 * tokens, 2 * width, width, dtype, tokens, 4, activation="swiglu_clamped",
                           biased=True)
    down = GroupedGemmSpec(128, 4 * tokens, width, width, dtype, scatter=True, weighted=True, biased=True)
    return spec_of(name, both), spec_of(name, down)


@pytest.mark.parametrize(("tokens", "gpu", "wanted"), [
    (1, HOPPER, "quant_grouped_gemv"), (64, HOPPER, "quant_grouped_mma"),
    (1024, HOPPER, "quant_grouped_wgmma"), (4096, AMPERE, "quant_grouped_mma")])
def test_chosen(tokens: int, gpu: GPU, wanted: str):
    found = TABLE.choose(layer("MXFP4", tokens)[0], gpu)
    assert TABLE.of(found).name == wanted
    assert TABLE.read("gpu", found.to_json()) == found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "MXFP4" else pytest.mark.slow)
                                  for name in TYPES])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_defaults_do_not_spill(name: str, tokens: int):
    for gpu in (HOPPER, AMPERE):
        for spec in layer(name, tokens):
            made = TABLE.build(spec, TABLE.choose(spec, gpu), gpu)
            found = assemble(made.ptx, gpu.arch).kernels[made.name]
            assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "weights", "most"), [
    (G.by(1).of(2, 1).warps(4), 128, 3.6), (M.block(16, 128).k(64).warps(1, 4).stages(4), 64, 4.8),
    (W.block(256, 48).k(128).warps(12).stages(5), 128, 3.8)], ids=str)
def test_instructions_for_each_weight(schedule: QuantGroupedGemv | QuantGroupedMma | QuantGroupedWgmma,
                                      weights: int, most: float):
    """Of gate and up of MXFP4: a thread of the gemv has 32 weights of each of four tiles, one of mma 32 of
    each half, one of wgmma 64. 8 weights take 7 shifts, 8 lop3 and 4 multiplications, and mma and wgmma scale
    them, 4 more. No wgmma waits for all before it."""
    made = TABLE.build(layer("MXFP4", 1)[0], schedule, HOPPER)
    loop = main_loop(functions(disassemble(assemble(made.ptx, HOPPER.arch).cubin))[made.name])
    assert loop is not None
    assert (loop.around - loop.tensor) / weights <= most
    left = [each.operands for each in loop.instructions if each.modifiers.startswith(".DEPBAR")]
    assert set(left) == ({"gsb0, 0x2"} if schedule.template == W.template else set())


def test_the_gemv_has_no_bank_conflict_before_sums_are_shared():
    spec = spec_of("MXFP4", GroupedGemmSpec(3, 20, 64, 512, BF16, 10, 2))
    report = reported(spec, G.by(8).of(2, 1).warps(4), HOPPER, [12, 0, 8])
    made = TABLE.build(spec, G.by(8).of(2, 1).warps(4), HOPPER)
    lines = made.ptx.splitlines()
    assert {lines[line - 1].split()[0] for line in report.stats.bank_conflicts} <= {"st.shared.b32"}


def test_defaults_have_parts_of_few_columns():
    """Columns that no tile divides, on both architectures."""
    one = GroupedGemmSpec(3, 40, 2 * 36, 96, BF16, 20, 2, activation="silu")
    for spec in (spec_of("MXFP4", one), spec_of("int8 channel", replace(one, rows=10, sources=5))):
        for gpu in (HOPPER, AMPERE): assert TABLE.choose(spec, gpu) is not None
