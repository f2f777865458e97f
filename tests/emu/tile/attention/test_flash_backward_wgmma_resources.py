"""What ptxas and the emulator count of default schedules of the wgmma template of attention's backward pass,
and what the template refuses."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
from backward_case import arguments, backward, launched
from flash_backward_wgmma_case import BF16, CAUSAL, F32, HALVED, LOW, SMALL, WIDE, W
from overlap_case import assert_overlapped
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassembled, functions, loops
from tinygrad_nv.tile.attention.backward_wgmma.legality import MOST_BESIDE, MOST_HELD
from tinygrad_nv.tile.attention.backward_wgmma.plan import HALVED_REGISTERS, REGISTERS, BackwardWgmmaPlan
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LONG = 7424  # rows and keys
NAME = "flash_backward_wgmma"
# by heads, the most SASS instructions for a product m64n64k16 of the loop; triton_attention.py's kernels, one
# of dk and dv and one of dq, which have 7 products between them, by Triton 3.9 at their best 17 and 18 of 64,
# 12 and 10 of 128
LOOPS = {64: 16, 96: 12, 128: 10, 192: 12, 256: 10}
SCALED = Sum() * 0.125
SCORES: dict[str, Expression] = {
    "soft-cap": tanh(SCALED * 0.02) * 50.0,
    "alibi": SCALED + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625,
    "bias": SCALED + Load(0, BF16, LONG, 1, (0, LONG * LONG, 0)).cast(F32),
    "mask": where(Load(0, dtypes.bool, LONG, 1), SCALED, Constant(-math.inf)),
    "soft-cap and bias": tanh(SCALED * 0.02) * 50.0 + Load(0, F32, LONG, 1)}


def chosen(d: int, band: Band = FULL, score: Expression | None = None) -> BackwardWgmma:
    schedule = ATTENTION.choose(backward(LONG, LONG, d, band=band, score=score), GPU("sm_90a"))
    assert schedule is not None
    assert schedule.template == NAME
    return schedule


@pytest.mark.parametrize("d", LOOPS)
def test_main_loops_are_short_and_nothing_spills(d: int):
    assembly = assemble(TABLE.build(backward(LONG, LONG, d), chosen(d), GPU("sm_90a")).ptx, "sm_90a")
    found = assembly.kernels[NAME]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    code = functions(disassembled(assembly.cubin))[NAME]
    assert [loop.around <= LOOPS[d] * loop.units / 8 for loop in loops(code) if loop.tensor] == [True]
    assert_overlapped(code, 1)


@pytest.mark.parametrize(("d", "score"), [
    *((d, None) for d in LOOPS), *((128, score) for score in ("alibi", "bias", "mask")),
    (96, "soft-cap"), (64, "soft-cap and bias"), (128, "soft-cap and bias"), (256, "bias")])
def test_no_default_spills(d: int, score: str | None):
    """A window, grouped heads, extents of a launch, turns: all that takes registers."""
    made = None if score is None else SCORES[score]
    band = Band(-500, 0)
    spec = backward(LONG, LONG, d, band=band, score=made, heads=2, group=2, deterministic=True,
                    symbolic=("s_q", "s_kv", "start"))
    assembly = assemble(TABLE.build(spec, chosen(d, band, made), GPU("sm_90a")).ptx, "sm_90a")
    found = assembly.kernels[NAME]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert_overlapped(functions(disassembled(assembly.cubin))[NAME], 1)


@pytest.mark.parametrize(("schedule", "d", "d_v", "score"), [
    (WIDE, 64, 96, None), (LOW, 144, 96, None), (SMALL, 112, 96, None), (WIDE, 64, 64, "soft-cap"),
    (LOW, 96, 128, "soft-cap")], ids=str)
def test_the_most_that_is_held_fits(schedule: BackwardWgmma, d: int, d_v: int, score: str | None):
    spec = backward(LONG, LONG, d, d_v=d_v, band=Band(-500, 0), group=2, deterministic=True,
                    symbolic=("s_q", "s_kv", "start"), score=score and SCORES[score])
    plan = BackwardWgmmaPlan.of(spec, schedule)
    assert plan.held + plan.sums == (MOST_BESIDE if score else MOST_HELD)
    found = assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a").kernels[NAME]
    assert (found.spill_store_bytes, found.spill_load_bytes) == (0, 0)


@pytest.mark.parametrize(("d", "schedule"), [(64, WIDE), (96, LOW), (128, LOW), (80, LOW), (64, SMALL),
                                             (192, HALVED), (256, HALVED)], ids=str)
def test_no_bank_conflicts_and_all_of_memory_by_tma(d: int, schedule: BackwardWgmma):
    """But for l and delta, a row each for the lanes of a warp; and dq of halves, pairs of eight rows."""
    spec = backward(2 * schedule.block_m, 2 * schedule.block_n, d, band=CAUSAL)
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_90a")), spec, arguments(spec), "sm_90a")
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert set(report.stats.sectors_per_request.values()) == ({4.0, 8.0} if schedule == HALVED else {4.0})


def test_registers_are_within_the_pool():
    """Three warpgroups begin with 168 registers a thread each, and share those."""
    for fewer, more in (REGISTERS[2], HALVED_REGISTERS): assert fewer + 2 * more <= 3 * 168


# **** refused ****

REFUSED = {
    "wgmma needs sm_90a, the target is sm_80": (WIDE, {}, "sm_80"),
    "16 warps: producers and 1 or 2 consumers": (WIDE.warps(16), {}, "sm_90a"),
    "block_n=80 is not 2 consumers × 64 = 128 keys, nor 64 that they share": (W.block(64, 80), {}, "sm_90a"),
    "block_m=128 is not 64, of consumers that share their keys": (W.block(128, 64), {}, "sm_90a"),
    "block_m=80 is not 64, or 64 for each of 2 consumers": (W.block(80, 128), {}, "sm_90a"),
    "1 stages are not 2 to 8": (WIDE.stages(1), {}, "sm_90a"),
    "16384 B of keys + 16384 B of values + 65536 B of queries + 65536 B of gradients + 65536 B of ds + "
    "32768 B of dq + 4096 B of l and delta + 72 B of barriers = 266312 B": (WIDE.stages(4), {}, "sm_90a"),
    "128 registers of a block + 96 sums of dk and dv = 224 a thread, at most 208": (
        WIDE, {"d": 96}, "sm_90a"),
    "80 registers of a block + 128 sums of dk and dv = 208 a thread, at most 192 beside": (
        LOW, {"d": 128, "score": tanh(Sum())}, "sm_90a"),
    "q: row stride 132 B is not a multiple of 16 B: no TMA": (WIDE, {"gap": 2}, "sm_90a"),
    "dq: row stride 248 B is not a multiple of 16 B: no TMA": (WIDE, {"d": 62, "gap": 2}, "sm_90a"),
    "70000 key heads are above 65535": (WIDE, {"heads": 70000}, "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    schedule, extents, arch = REFUSED[words]
    spec = backward(128, 128, **{"d": 64, **extents})
    found = TABLE.problems(spec, schedule, GPU(arch))
    assert any(words in each for each in found), found
    with pytest.raises(ScheduleError, match="cannot be"): TABLE.build(spec, schedule, GPU(arch))


def test_what_other_templates_have():
    spec = backward(128, 128, 64)
    moved = replace(spec, grad=replace(spec.grad, offset=4))
    assert TABLE.problems(moved, WIDE, GPU("sm_90a")) == [
        "grad: offset 8 B is not a multiple of 16 B: no TMA"]
    capped = backward(128, 128, 64, score=SCORES["soft-cap"])
    dropped = replace(capped, forward=replace(capped.forward, kept=128))
    assert [words[:14] for words in TABLE.problems(dropped, WIDE, GPU("sm_90a"))] == ["dropout beside"]
    for one, template in ((moved, "flash_backward_mma"), (dropped, "flash_backward_mma"), (spec, NAME)):
        schedule = ATTENTION.choose(one, GPU("sm_90a"))
        assert schedule is not None
        assert schedule.template == template
