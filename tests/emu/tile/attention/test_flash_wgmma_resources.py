"""What ptxas and the emulator count of default schedules of the wgmma template of attention, and what the
template refuses."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
from attention_case import arguments, attention, launched
from flash_wgmma_case import BF16, CAUSAL, F32, SMALL, W
from overlap_case import assert_overlapped
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassembled, functions, loops
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.attention.wgmma.legality import MOST_HELD
from tinygrad_nv.tile.attention.wgmma.plan import REGISTERS, FlashWgmmaPlan
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LONG = 7392  # rows and keys
# by heads, the most SASS instructions for an HGMMA of the loop without a mask; triton_attention.py's kernels
# of 128 rows and 8 warps, by Triton 3.9, have 44 of 64, 36 (32 with 64 columns) of 128, 24 of 256
LOOPS = {64: 34, 96: 30, 128: 29, 192: 22, 256: 17}
SCALED = Sum() * 0.125
SCORES = {
    "soft-cap": tanh(SCALED * 0.02) * 50.0,
    "alibi": SCALED + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625,
    "bias": SCALED + Load(0, BF16, LONG, 1, (0, LONG * LONG, 0)).cast(F32),
    "mask": where(Load(0, dtypes.bool, LONG, 1), SCALED, Constant(-math.inf)),
    "soft-cap and bias": tanh(SCALED * 0.02) * 50.0 + Load(0, F32, LONG, 1)}


def chosen(d: int, band: Band = FULL, score: Expression | None = None, few: bool = False) -> FlashWgmma:
    spec = attention(64 if few else LONG, LONG, d, band=band, score=score)
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    assert schedule.template == "flash_wgmma"
    return schedule


@pytest.mark.parametrize("d", LOOPS)
def test_main_loops_are_short_and_nothing_spills(d: int):
    schedule = chosen(d)
    spec = attention(LONG, 16 * schedule.block_n, d)
    made = TABLE.build(spec, schedule, GPU("sm_90a"))
    assembly = assemble(made.ptx, "sm_90a")  # raises where ptxas serialised anything
    found = assembly.kernels["flash_wgmma"]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    code = functions(disassembled(assembly.cubin))["flash_wgmma"]
    products = -(-d // 16) + schedule.block_n // 16
    assert [loop.around for loop in loops(code) if loop.tensor == products] <= [LOOPS[d] * products]
    assert_overlapped(code, 1)


@pytest.mark.parametrize(("d", "score", "few"), [
    *((d, None, False) for d in LOOPS), *((128, score, False) for score in SCORES), (64, "alibi", False),
    *((d, "soft-cap and bias", False) for d in (64, 192, 256)), (128, "soft-cap and bias", True)])
def test_no_default_spills(d: int, score: str | None, few: bool):
    """A window, grouped heads, extents of a launch, l: all that takes registers."""
    made = None if score is None else SCORES[score]
    band = Band(-500, 0)
    spec = attention(64 if few else LONG, LONG, d, band=band, score=made, heads=2, group=2, lse=True,
                     symbolic=("s_q", "s_kv", "start"))
    assembly = assemble(TABLE.build(spec, chosen(d, band, made, few), GPU("sm_90a")).ptx, "sm_90a")
    found = assembly.kernels["flash_wgmma"]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert_overlapped(functions(disassembled(assembly.cubin))["flash_wgmma"], 3)


@pytest.mark.parametrize(("schedule", "d"), [(W.block(64, 256).warps(8), 64), (W.block(128, 240), 64),
                                             (W.block(128, 192), 128), (W.block(192, 128).warps(16), 64),
                                             (W.block(192, 80).warps(16), 128)], ids=str)
def test_the_most_that_is_held_fits(schedule: FlashWgmma, d: int):
    spec = attention(LONG, LONG, d, band=Band(-500, 0), lse=True, symbolic=("s_q", "s_kv", "start"))
    assert FlashWgmmaPlan.of(spec, schedule).held >= MOST_HELD[schedule.consumers] - 4
    found = assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a").kernels["flash_wgmma"]
    assert (found.spill_store_bytes, found.spill_load_bytes) == (0, 0)


@pytest.mark.parametrize("d", [*LOOPS, 80])
def test_no_bank_conflicts_and_all_of_memory_by_tma(d: int):
    """But for l: a sector for the eight rows of each request."""
    schedule = chosen(d, CAUSAL)
    spec = attention(schedule.block_m, 5 * schedule.block_n, d, band=CAUSAL, start=4 * schedule.block_n,
                     lse=True)
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_90a")), spec, arguments(spec), "sm_90a")
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert list(report.stats.sectors_per_request.values()) == [1.0, 1.0]


def test_registers_are_within_the_pool():
    """Of 65536 registers, a warpgroup of 128 threads can have 512 a thread, shared by all warpgroups."""
    for consumers, (fewer, more) in REGISTERS.items():
        assert fewer + consumers * more <= 512


# **** refused ****

REFUSED = {
    "wgmma needs sm_90a, the target is sm_80": (SMALL, {}, "sm_80"),
    "20 warps: a producer": (SMALL.warps(20), {}, "sm_90a"),
    "ping-pong with 1 consumer: 8 warps - 4": (W.block(64, 64).warps(8).pingpong(), {}, "sm_90a"),
    "block_m=64 is not 2 consumers × 64 = 128 rows": (W.block(64, 64), {}, "sm_90a"),
    "block_n=72 is not a multiple of 16 up to 256": (W.block(128, 72), {}, "sm_90a"),
    "1 stages are not 2 to 8": (SMALL.stages(1), {}, "sm_90a"),
    "32768 B of queries + 4 stages × (16384 B of keys + 32768 B of values) + 65536 B of the result + "
    "144 B of barriers = 295056 B of shared memory": (SMALL.stages(4), {"d": 128, "d_v": 256}, "sm_90a"),
    "80 scores + 40 pairs of weights + 32 sums = 152 registers a thread, at most 128 with 3 consumers": (
        W.block(192, 160).warps(16), {}, "sm_90a"),
    "block_n=128 beside (sum * -1), which is evaluated in registers: at most 112": (
        W.block(128, 128), {"score": Sum() * -1.0}, "sm_90a"),
    "at most 92 with 3 consumers beside (sum * -1)": (W.block(192, 96).warps(16), {"score": Sum() * -1.0},
                                                      "sm_90a"),
    "q: row stride 132 B is not a multiple of 16 B: no TMA": (SMALL, {"gap": 2}, "sm_90a"),
    "70000 heads are above 65535": (SMALL, {"heads": 70000}, "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    schedule, extents, arch = REFUSED[words]
    spec = attention(128, 128, **{"d": 64, **extents})
    found = TABLE.problems(spec, schedule, GPU(arch))
    assert any(words in each for each in found), found
    with pytest.raises(ScheduleError, match="cannot be"): TABLE.build(spec, schedule, GPU(arch))


def test_offsets_that_tma_cannot_have():
    spec = attention(128, 128, 64)
    assert TABLE.problems(replace(spec, k=replace(spec.k, offset=4)), SMALL, GPU("sm_90a")) == [
        "k: offset 8 B is not a multiple of 16 B: no TMA"]
