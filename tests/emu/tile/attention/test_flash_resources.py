"""What every default schedule of attention must keep to: registers, shared memory, no spill, no bank conflict
and full sectors in the loop; loops that do little but multiply, no longer than Triton's; and what is refused.
"""
from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ptx import triton_attention, triton_case
from tests.support.tile.attention_case import arguments, attention, launched
from tests.support.tile.flash_case import BF16, CAUSAL, F32, WGMMA, FlashSchedule, W, built, fma, mma
from tests.support.tile.resources_case import around, assert_overlapped, code_of, fitting, scores
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, loops
from tinygrad_nv.tile.attention import templates
from tinygrad_nv.tile.attention.schedules import FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.attention.wgmma.plan import MOST_HELD, FlashWgmmaPlan
from tinygrad_nv.tile.attention.wgmma.plan import REGISTERS as OF_WARPGROUPS
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HEADS = {64: (64, 40), 128: (128, 96), 192: (192, 136), 256: (256, 200)}  # of each row of the table of mma
TILES: list[tuple[int, FlashMma | FlashFma]] = [
    *[(d, mma(*tile)) for most, heads in HEADS.items()
      for d, tiles in zip(heads, (templates.MMA[most], templates.MMA[most][:1]), strict=True)
      for tile in tiles],
    *[(128, mma(*tile)) for tile in templates.FEW],
    *[(d, fma(*tile)) for d, tiles in templates.FMA.items() for tile in tiles],
    *[(d, fma(*tile)) for tile, d in zip(templates.FEW_FMA, (96, 96, 128, 192, 128, 256, 256), strict=True)]]
DEFAULTS = [*(mma(*tile) for tiles in (*templates.MMA.values(), templates.FEW) for tile in tiles),
            *(fma(*tile) for tiles in (*templates.FMA.values(), templates.FEW_FMA) for tile in tiles)]
LONG = 7392  # rows and keys
SCORES = scores(LONG, 0.125)


def dtype_of(schedule: FlashSchedule): return F32 if isinstance(schedule, FlashFma) else BF16


def chosen(spec: AttentionSpec, arch: str) -> FlashSchedule:
    found = ATTENTION.choose(spec, GPU(arch))
    assert isinstance(found, FlashMma | FlashFma | FlashWgmma)
    return found


def counted(spec: AttentionSpec, schedule: FlashSchedule) -> Stats:
    """Counters of a launch without findings."""
    arch = "sm_80" if isinstance(schedule, FlashMma) else "sm_90a"
    _, report = launched(built(spec, schedule, arch), spec, arguments(spec), arch)
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


# **** spills ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_default_schedules_keep_to_their_resources(d: int, schedule: FlashMma | FlashFma):
    """The causal kernel has all code; in the full one of mma the loop is a single block of instructions,
    which ptxas schedules more freely. The architectures that have room take turns; sm_80 has all of mma."""
    causal = attention(1024, 1024, d, dtype_of(schedule), band=CAUSAL, lse=True)
    turn = TILES.index((d, schedule))
    if isinstance(schedule, FlashMma):
        newer = ("sm_89", "sm_90a")[turn % 2]
        cases = [(causal, "sm_80"), (attention(1024, 1024, d), "sm_80"), (causal, newer)]
    else:
        archs = [arch for arch in SMEM_BYTES if not TABLE.problems(causal, schedule, GPU(arch))]
        cases = [(causal, archs[turn % len(archs)])]
    for spec, arch in cases:
        if not TABLE.problems(spec, schedule, GPU(arch)): fitting(built(spec, schedule, arch), arch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["mma", "fma"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_do_not_spill(name: str, dtype):
    for d in (64, 128, 256):
        spec = attention(512, 512, d, dtype, heads=2, group=2, band=CAUSAL, score=SCORES[name], lse=True)
        fitting(built(spec, chosen(spec, "sm_80")), "sm_80")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "score", "few"), [
    *((d, None, False) for d in (64, 96, 128, 192, 256)), *((128, score, False) for score in SCORES),
    (64, "ALiBi", False), *((d, "soft-cap and bias", False) for d in (64, 192, 256)),
    (128, "soft-cap and bias", True)])
def test_no_default_of_wgmma_spills(d: int, score: str | None, few: bool):
    """A window, grouped heads, extents of a launch, l: all that takes registers."""
    made = None if score is None else SCORES[score]
    plain = attention(64 if few else LONG, LONG, d, band=Band(-500, 0), score=made)
    spec = attention(64 if few else LONG, LONG, d, band=Band(-500, 0), score=made, heads=2, group=2,
                     lse=True, symbolic=("s_q", "s_kv", "start"))
    assert_overlapped(code_of(built(spec, chosen(plain, "sm_90a")), "sm_90a"), 3)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "d"), [(W.block(64, 256).warps(8), 64), (W.block(128, 240), 64),
                                             (W.block(128, 192), 128), (W.block(192, 128).warps(16), 64),
                                             (W.block(192, 80).warps(16), 128)], ids=str)
def test_the_most_that_is_held_fits(schedule: FlashWgmma, d: int):
    spec = attention(LONG, LONG, d, band=Band(-500, 0), lse=True, symbolic=("s_q", "s_kv", "start"))
    assert FlashWgmmaPlan.of(spec, schedule).live_registers >= MOST_HELD[schedule.consumers] - 4
    fitting(built(spec, schedule), "sm_90a")


def test_registers_are_within_the_pool():
    """Of 65536 registers, a warpgroup of 128 threads can have 512 a thread, shared by all warpgroups."""
    for consumers, (fewer, more) in OF_WARPGROUPS.items():
        assert fewer + consumers * more <= 512


# **** memory ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_loops_lose_no_pass_and_fill_sectors(d: int, schedule: FlashMma | FlashFma):
    """Two blocks of columns more: what they cost. Heads of an odd number of 8 elements straddle sectors."""
    blocks, dtype = schedule.depth + 2, dtype_of(schedule)
    few, many = (counted(attention(schedule.block_m, schedule.block_n * count, d, dtype), schedule)
                 for count in (blocks, blocks + 2))
    assert sum(many.bank_conflicts.values()) == sum(few.bank_conflicts.values())
    asked = many.asynchronous_bytes - few.asynchronous_bytes
    assert asked == 2 * schedule.block_n * 2 * d * dtype.itemsize
    touched = many.l2_bytes - few.l2_bytes
    assert touched == asked if d * dtype.itemsize % 32 == 0 else touched <= 2 * asked
    if dtype == F32: assert sum(many.bank_conflicts.values()) == 0
    else:
        flops = 2 * schedule.block_m * 2 * schedule.block_n * 2 * (-(-d // 16) * 16)
        assert many.tensor_flops - few.tensor_flops == flops


@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", [20, 36, 72, 96])
def test_heads_of_other_widths_lose_no_pass(d: int):
    for schedule in (fma(64, 32, 2), fma(16, 32, 1, 4)):
        stats = counted(attention(64, 100, d, F32, band=CAUSAL, start=30), schedule)
        assert sum(stats.bank_conflicts.values()) == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_no_bank_conflicts_and_all_of_memory_by_tma(d: int):
    """But for l: a sector for the eight rows of each request."""
    schedule = chosen(attention(LONG, LONG, d, band=CAUSAL), "sm_90a")
    spec = attention(schedule.block_m, 5 * schedule.block_n, d, band=CAUSAL, start=4 * schedule.block_n,
                     lse=True)
    stats = counted(spec, schedule)
    assert stats.bank_conflicts == {}
    assert list(stats.sectors_per_request.values()) == [1.0, 1.0]


# **** defaults ****

@pytest.mark.parametrize(("d", "dtype"), [*((d, BF16) for d in (8, 64, 80, 128, 192, 256)),
                                          *((d, F32) for d in (1, 64, 80, 128, 192, 256))], ids=str)
@pytest.mark.parametrize("arch", SMEM_BYTES)
def test_there_is_a_default(arch: str, d: int, dtype):
    """For any number of rows; the gates above are about what runs. In float32 warps share the keys of few."""
    for rows in (1, 16, 17, 40, 100, 4096):
        spec = attention(rows, 4096, d, dtype, symbolic=("s_q", "s_kv", "start"), band=Band(-500, 0),
                         lse=True)
        schedule = chosen(spec, arch)
        if isinstance(schedule, FlashWgmma): continue
        assert schedule in DEFAULTS
        assert schedule.block_m < 2 * max(rows, 16)
        if isinstance(schedule, FlashFma) and rows <= 16: assert schedule.warps_n > 1


# **** loops ****

# by heads, the most SASS instructions for an HGMMA of the loop without a mask; triton_attention.py's kernels
# of 128 rows and 8 warps, by Triton 3.9, have 44 of 64, 36 (32 with 64 columns) of 128, 24 of 256
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "most"), [(64, 34), (96, 30), (128, 29), (192, 22), (256, 17)])
def test_main_loops_of_wgmma_are_short(d: int, most: int):
    schedule = chosen(attention(LONG, LONG, d), "sm_90a")
    assert isinstance(schedule, FlashWgmma)
    code = code_of(built(attention(LONG, 16 * schedule.block_n, d), schedule), "sm_90a")
    matmuls = -(-d // 16) + schedule.block_n // 16
    assert [loop.around for loop in loops(code) if loop.tensor == matmuls] <= [most * matmuls]
    assert_overlapped(code, 1)


def triton_loop(d: int, schedule: FlashMma, causal: bool) -> float:
    """Instructions around the loop of Triton's kernel for each product of 16 × 8 × 16."""
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"lse": "*fp32", "S": "i32", "scale": "fp32"}
    constants = {"D": d, "BM": schedule.block_m, "BN": schedule.block_n, "CAUSAL": causal, "SPLIT": False}
    made = triton_case.compile(triton_attention.forward_kernel, types | dict.fromkeys(constants, "constexpr"),
                               constants, 80, ("q", "k", "v", "out", "lse", "S"),
                               num_warps=schedule.warps_m, num_stages=schedule.depth)
    return around(made.ptx, made.entry)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_loops_are_no_longer_than_those_of_triton(d: int, band: Band):
    """Both compiled here by the same ptxas, with the same blocks, warps and stages."""
    spec = attention(4096, 4096, d, band=band)
    schedule = chosen(spec, "sm_80")
    assert isinstance(schedule, FlashMma)
    assert around(built(spec, schedule).ptx, "flash_mma") <= triton_loop(d, schedule, not band.full)


def test_only_tensor_cores_multiply():
    code = code_of(built(attention(1024, 1024, 128, band=CAUSAL), mma(*templates.MMA[128][0])), "sm_80")
    assert {each.opcode for each in code} & set(TENSOR) == {"HMMA"}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", [64, 96])
def test_loops_of_fma_multiply_and_add(d: int):
    """Seven of eight instructions of both products are FFMA, and no other unit multiplies."""
    spec = attention(4096, 4096, d, F32, band=CAUSAL)
    code = code_of(built(spec, chosen(spec, "sm_90a"), "sm_90a"), "sm_90a")
    inner = [loop.counts for loop in loops(code) if loop.counts["FFMA"] >= 256 and not loop.counts["BAR"]]
    assert len(inner) >= 2
    for counts in inner: assert counts["FFMA"] >= 0.87 * counts.total()
    assert not {each.opcode for each in code} & set(TENSOR)


# **** refused ****

OF_FMA, NEGATIVE = {"dtype": F32}, {"score": Sum() * -1.0}
REFUSED: dict[str, tuple[FlashSchedule, dict[str, object], str]] = {
    "block_m=40 is not a multiple of 2 warps × 16 = 32": (mma(40, 32, 2), {}, "sm_80"),
    "block_n=24 is not 16, 32, 64, 128": (mma(32, 24, 2), {}, "sm_80"),
    "3 warps are not 1, 2, 4, 8 or 16": (mma(48, 32, 3), {}, "sm_80"),
    "10 stages are not 2 to 8": (mma(32, 32, 2, 10), {}, "sm_80"),
    "32 rows of a warp × (256 + 128) / 32 lanes = 384 sums a thread, at most 192": (
        mma(128, 128, 4), {"d": 256}, "sm_80"),
    "8 stages × 65536 B and q are 557056 B of shared memory, sm_80 has 166912": (
        mma(64, 64, 4, 8), {"d": 256}, "sm_80"),
    "d=12 is not a multiple of 8": (mma(32, 32, 2), {"d": 12}, "sm_80"),
    "operands of f32 are of flash_fma": (mma(32, 32, 2), OF_FMA, "sm_80"),
    "rows of k are aligned to 2 B, cp.async copies 4 and more": (mma(32, 32, 2), {"gap": 1}, "sm_80"),
    "70000 heads are above 65535, a grid's": (mma(32, 32, 2), {"heads": 70000}, "sm_80"),
    "operands of bf16 are not float32": (fma(32, 32, 2), {}, "sm_89"),
    "48 is not a power of two": (fma(48, 32, 1), OF_FMA, "sm_89"),
    "2 warps × 16 = 32 or more": (fma(16, 32, 2), OF_FMA, "sm_89"),
    "3 x 1 warps are not 1, 2": (fma(64, 32, 3), OF_FMA, "sm_89"),
    "block_n=32 of 8 warps": (fma(16, 32, 1, 8), OF_FMA, "sm_89"),
    "9 stages are not 2 to 8": (fma(16, 32, 1, 4, 9), OF_FMA, "sm_89"),
    "272 sums a thread, at most 152": (fma(32, 64, 1, 4), OF_FMA | {"d": 256}, "sm_89"),
    "133120 B of shared memory, sm_89 has 101376": (fma(64, 64, 4), OF_FMA | {"d_v": 128}, "sm_89"),
    "wgmma needs sm_90a, the target is sm_80": (WGMMA, {}, "sm_80"),
    "20 warps: a producer": (WGMMA.warps(20), {}, "sm_90a"),
    "ping-pong with 1 consumer: 8 warps - 4": (W.block(64, 64).warps(8).pingpong(), {}, "sm_90a"),
    "block_m=64 is not 2 consumers × 64 = 128 rows": (W.block(64, 64), {}, "sm_90a"),
    "block_n=72 is not a multiple of 16 up to 256": (W.block(128, 72), {}, "sm_90a"),
    "1 stages are not 2 to 8": (WGMMA.stages(1), {}, "sm_90a"),
    "32768 B of queries + 4 stages × (16384 B of keys + 32768 B of values) + 65536 B of the result + "
    "144 B of barriers = 295056 B of shared memory": (WGMMA.stages(4), {"d": 128, "d_v": 256}, "sm_90a"),
    "80 scores + 40 pairs of weights + 32 sums = 152 registers a thread, at most 128 with 3 consumers": (
        W.block(192, 160).warps(16), {}, "sm_90a"),
    "block_n=128 beside (sum * -1), which is evaluated in registers: at most 112": (
        W.block(128, 128), NEGATIVE, "sm_90a"),
    "at most 92 with 3 consumers beside (sum * -1)": (W.block(192, 96).warps(16), NEGATIVE, "sm_90a"),
    "q: row stride 132 B is not a multiple of 16 B: no TMA": (WGMMA, {"gap": 2}, "sm_90a"),
    "70000 heads are above 65535": (WGMMA, {"heads": 70000}, "sm_90a")}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    schedule, changed, arch = REFUSED[words]
    spec = attention(128, 128, **{"d": 64, **changed})  # type: ignore[arg-type]
    found = TABLE.problems(spec, schedule, GPU(arch))
    assert any(words in each for each in found), found
    with pytest.raises(ScheduleError, match="cannot be") as raised: TABLE.build(spec, schedule, GPU(arch))
    assert words in str(raised.value)


def test_offsets_that_tma_cannot_have():
    spec = attention(128, 128, 64)
    assert TABLE.problems(replace(spec, k=replace(spec.k, offset=4)), WGMMA, GPU("sm_90a")) == [
        "k: offset 8 B is not a multiple of 16 B: no TMA"]
