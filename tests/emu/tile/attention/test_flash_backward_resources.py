"""What every default schedule of attention's backward pass must keep to: registers, shared memory, no spill,
no bank conflict in the loop; loops that do little but multiply, no longer than Triton's; and what is refused.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tinygrad.dtype import dtypes

from tests.support.ptx import triton_attention, triton_case
from tests.support.tile.backward_case import arguments, backward, launched
from tests.support.tile.flash_backward_case import (
    HALVED,
    LOW,
    MMA,
    SMALL,
    WIDE,
    BackwardSchedule,
    W,
    arch_of,
    built,
    mma,
)
from tests.support.tile.flash_case import CAUSAL, F32
from tests.support.tile.resources_case import around, assert_overlapped, code_of, fitting, scores
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, loops
from tinygrad_nv.tile.attention import templates
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.backward_wgmma.plan import (
    HALVED_REGISTERS,
    MOST_BESIDE,
    MOST_HELD,
    REGISTERS,
    BackwardWgmmaPlan,
)
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma
from tinygrad_nv.tile.attention.spec import SYMBOLS, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Sum, tanh
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TILES = [(d, mma(*tile)) for d, tiles in templates.BACKWARD_MMA.items() for tile in tiles]
LONG = 7424  # rows and keys
SCORES, LONG_SCORES = scores(512, 0.1), scores(LONG, 0.125)
# by heads, the most SASS instructions for a product m64n64k16 of the loop; triton_attention.py's kernels, one
# of dk and dv and one of dq, which have 7 products between them, by Triton 3.9 at their best 17 and 18 of 64,
# 12 and 10 of 128
LOOPS = {64: 16, 96: 12, 128: 10, 192: 12, 256: 10}


def chosen(spec: BackwardSpec, arch: str) -> BackwardSchedule:
    """The default: by wgmma where there is any."""
    found = ATTENTION.choose(spec, GPU(arch))
    assert isinstance(found, BackwardMma | BackwardWgmma)
    assert arch_of(found) == arch
    return found


def counted(spec: BackwardSpec, schedule: BackwardSchedule) -> Stats:
    """Counters of a launch without findings."""
    _, report = launched(built(spec, schedule), spec, arguments(spec), arch_of(schedule))
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


# **** spills ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_default_schedules_keep_to_their_resources(d: int, schedule: BackwardMma):
    """The causal kernel has all code, in the full one the loop is a single block of instructions. The newer
    architectures take turns."""
    causal = backward(1024, 1024, d, heads=2, group=4, band=CAUSAL)
    for spec, arch in ((causal, "sm_80"), (backward(1024, 1024, d), "sm_80"),
                       (causal, ("sm_89", "sm_90a")[TILES.index((d, schedule)) % 2])):
        if not TABLE.problems(spec, schedule, GPU(arch)): fitting(built(spec, schedule, arch), arch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", LOOPS)
def test_windows_and_turns_do_not_spill(d: int):
    """Each alone; both and extents of a launch."""
    window = backward(512, 512, d, heads=2, group=2, band=Band(-200, 0))
    every = replace(window, forward=replace(window.forward, symbolic=SYMBOLS), deterministic=True)
    for spec in (window, backward(512, 512, d, band=CAUSAL, deterministic=True), every):
        fitting(built(spec, chosen(spec, "sm_80")), "sm_80")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mask", "bias", "soft-cap", "soft-cap and bias", "ALiBi by head"])
def test_scores_do_not_spill(name: str):
    for d in (64, 128, 256):
        spec = backward(512, 512, d, heads=2, group=2, band=CAUSAL, score=SCORES[name])
        fitting(built(spec, chosen(spec, "sm_80")), "sm_80")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "score"), [
    *((d, None) for d in LOOPS), *((128, score) for score in ("ALiBi", "bias of heads", "mask")),
    (96, "soft-cap"), (64, "soft-cap and bias"), (128, "soft-cap and bias"), (256, "bias of heads")])
def test_no_default_of_wgmma_spills(d: int, score: str | None):
    """A window, grouped heads, extents of a launch, turns: all that takes registers."""
    plain = backward(LONG, LONG, d, band=Band(-500, 0), score=score and LONG_SCORES[score])
    spec = backward(LONG, LONG, d, band=Band(-500, 0), score=plain.forward.score, heads=2, group=2,
                    deterministic=True, symbolic=SYMBOLS)
    assert_overlapped(code_of(built(spec, chosen(plain, "sm_90a")), "sm_90a"), 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "d", "d_v", "score"), [
    (WIDE, 64, 96, None), (LOW, 144, 96, None), (SMALL, 112, 96, None), (WIDE, 64, 64, "soft-cap"),
    (LOW, 96, 128, "soft-cap")], ids=str)
def test_the_most_that_is_held_fits(schedule: BackwardWgmma, d: int, d_v: int, score: str | None):
    spec = backward(LONG, LONG, d, d_v=d_v, band=Band(-500, 0), group=2, deterministic=True,
                    symbolic=SYMBOLS, score=score and LONG_SCORES[score])
    plan = BackwardWgmmaPlan.of(spec, schedule)
    assert plan.live_registers + plan.sums == (MOST_BESIDE if score else MOST_HELD)
    fitting(built(spec, schedule), "sm_90a")


def test_registers_are_within_the_pool():
    """Three warpgroups begin with 168 registers a thread each, and share those."""
    for fewer, more in (REGISTERS[2], HALVED_REGISTERS): assert fewer + 2 * more <= 3 * 168


# **** memory ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "schedule"), [
    *TILES, (80, mma(*templates.BACKWARD_FEW[0])), (40, mma(*templates.BACKWARD_FEW[1]))], ids=str)
def test_loops_lose_no_pass(d: int, schedule: BackwardMma):
    """Two blocks of rows more: what they cost. dq is added where it lies."""
    few, many = (counted(backward(schedule.block_m * count, schedule.block_n, d), schedule)
                 for count in (4, 6))
    assert sum(many.bank_conflicts.values()) == sum(few.bank_conflicts.values())
    rows = 2 * schedule.block_m
    assert many.asynchronous_bytes - few.asynchronous_bytes == 2 * rows * d * 2
    steps = -(-d // 16) * 16
    assert many.tensor_flops - few.tensor_flops == 5 * 2 * rows * schedule.block_n * steps


@pytest.mark.parametrize(("d", "schedule"), [(64, WIDE), (96, LOW), (128, LOW), (80, LOW), (64, SMALL),
                                             (192, HALVED), (256, HALVED)], ids=str)
def test_no_bank_conflicts_and_all_of_memory_by_tma(d: int, schedule: BackwardWgmma):
    """But for l and delta, a row each for the lanes of a warp; and dq of halves, pairs of eight rows."""
    stats = counted(backward(2 * schedule.block_m, 2 * schedule.block_n, d, band=CAUSAL), schedule)
    assert stats.bank_conflicts == {}
    assert set(stats.sectors_per_request.values()) == ({4.0, 8.0} if schedule == HALVED else {4.0})


# **** defaults ****

@pytest.mark.parametrize("d", [8, 64, 80, 128, 144, 200, 256])
@pytest.mark.parametrize("arch", SMEM_BYTES)
def test_there_is_a_default(arch: str, d: int):
    """But for the widest heads on the architecture with the least shared memory."""
    for keys in (1, 16, 40, 100, 4096):
        spec = backward(4096, keys, d, symbolic=SYMBOLS, band=Band(-500, 0))
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert (schedule is None) == (arch == "sm_89" and d == 256)
        if isinstance(schedule, BackwardMma): assert schedule.block_n < 2 * max(keys, 32)
        if isinstance(schedule, BackwardWgmma): assert schedule.block_n < 64 + keys


# **** loops ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", LOOPS)
def test_main_loops_of_wgmma_are_short(d: int):
    spec = backward(LONG, LONG, d)
    code = code_of(built(spec, chosen(spec, "sm_90a")), "sm_90a")
    assert [loop.around <= LOOPS[d] * loop.units / 8 for loop in loops(code) if loop.tensor] == [True]
    assert_overlapped(code, 1)
    assert {each.opcode for each in code} & set(TENSOR) == {"HGMMA"}


def triton_work(kernel: Any, names: tuple[str, ...], d: int, warps: int) -> float:
    """Instructions of a Triton kernel's loop for each product that it makes."""
    types = dict.fromkeys(("q", "k", "v", "dout"), "*bf16") | dict.fromkeys(("lse", "delta", *names), "*fp32")
    types = {name: types.get(name, "i32" if name == "S" else "fp32") for name in kernel.arg_names[:-4]}
    constants = {"D": d, "BM": 64, "BN": 64, "CAUSAL": False}
    made = triton_case.compile(kernel, types | dict.fromkeys(constants, "constexpr"), constants, 80,
                               tuple(name for name, kind in types.items() if kind[0] == "*" or name == "S"),
                               num_warps=warps, num_stages=2)
    return around(made.ptx, made.entry)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", [64, 128])
def test_loops_are_no_longer_than_those_of_triton(d: int):
    """Triton's two kernels make seven products where ours makes five: all are counted."""
    spec = backward(4096, 4096, d)
    made = built(spec, chosen(spec, "sm_80"))
    theirs = min(4 * triton_work(triton_attention.dkdv_kernel, ("dk", "dv"), d, warps)
                 + 3 * triton_work(triton_attention.dq_kernel, ("dq",), d, warps) for warps in (4, 8))
    assert 5 * around(made.ptx, made.name) <= theirs


def test_only_tensor_cores_multiply():
    schedule = mma(*templates.BACKWARD_MMA[128][0])
    code = code_of(built(backward(1024, 1024, 128, band=CAUSAL), schedule), "sm_80")
    assert {each.opcode for each in code} & set(TENSOR) == {"HMMA"}


# **** refused ****

REFUSED: dict[str, tuple[BackwardSchedule, dict[str, Any], str]] = {
    "3 warps of keys are not 1, 2, 4 or 8": (mma(64, 64, 3), {}, "sm_80"),
    "block_m=48 is not 16, 32, 64, 128": (mma(48, 64, 4), {}, "sm_80"),
    "(64 + 64 + 2 × 128) / 32 lanes / 1 that share them = 384 sums a thread, at most 192": (
        mma(128, 128, 4), {}, "sm_80"),
    "block_m=128 is above 64 threads, one for each row": (mma(128, 32, 2), {}, "sm_80"),
    "9 stages are not 2 to 8": (mma(64, 64, 4, stages=9), {}, "sm_80"),
    "of shared memory, sm_80 has 166912": (mma(64, 128, 8, stages=8), {}, "sm_80"),
    "d=12 is not a multiple of 8": (MMA, {"d": 12}, "sm_80"),
    "rows of q are aligned to 2 B, cp.async copies 4 and more": (MMA, {"d": 16, "gap": 1}, "sm_80"),
    "the derivative of sum": (MMA, {"d": 16, "score": Sum().cast(dtypes.int32).cast(F32)}, "sm_80"),
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
    "70000 key heads are above 65535": (WIDE, {"heads": 70000}, "sm_90a"),
    "70000 key heads are above 65535, a grid's": (MMA, {"heads": 70000}, "sm_80"),
    "the derivative of sum.s32": (WIDE, {"score": Sum().cast(dtypes.int32).cast(F32)}, "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    schedule, changed, arch = REFUSED[words]
    size = 64 if isinstance(schedule, BackwardMma) else 128
    spec = backward(size, size, **{"d": 64, **changed})
    found = TABLE.problems(spec, schedule, GPU(arch))
    assert any(words in each for each in found), found
    with pytest.raises(ScheduleError, match="cannot be") as raised: TABLE.build(spec, schedule, GPU(arch))
    assert words in str(raised.value)


def test_what_other_templates_have():
    spec = backward(128, 128, 64)
    moved = replace(spec, grad=replace(spec.grad, offset=4))
    assert TABLE.problems(moved, WIDE, GPU("sm_90a")) == [
        "grad: offset 8 B is not a multiple of 16 B: no TMA"]
    capped = backward(128, 128, 64, score=LONG_SCORES["soft-cap"])
    dropped = replace(capped, forward=replace(capped.forward, kept=128))
    assert [words[:14] for words in TABLE.problems(dropped, WIDE, GPU("sm_90a"))] == ["dropout beside"]
    for one, template in ((moved, BackwardMma), (dropped, BackwardMma), (spec, BackwardWgmma)):
        assert isinstance(ATTENTION.choose(one, GPU("sm_90a")), template)
