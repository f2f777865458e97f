"""Attention of 8 bits with scales on the emulator: heads, bands, blocks of scales, rings, schedules; what
ptxas and the emulator count, and what is refused."""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import given as drawn
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tests.support.tile.attention_case import arguments, attention, launched, matrix, near, run
from tests.support.tile.flash_case import BF16, CAUSAL, F16, F32, W
from tests.support.tile.flash_fp8_case import SMALL8, attention8, close8
from tests.support.tile.resources_case import assert_overlapped, code_of
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.sass import loops
from tinygrad_nv.tile.attention.schedules import FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, RowScales
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.attention.wgmma.plan import TURNING, FlashWgmmaPlan
from tinygrad_nv.tile.expression import Constant, Load, Sum, tanh, where
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

NARROW = W.block(128, 32)
QUICK = (Phase.explicit, Phase.generate)  # a failing case as it is: to make it smaller takes minutes
BLOCKS = {"of all": (-1, -1, -1), "of heads": (0, 0, 0), "of blocks": (64, 64, 64), "of keys": (0, 32, 64),
          "of values": (16, 0, 32)}

# **** heads, bands, scales ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", [16, 32, 48, 64, 96, 128, 192, 256])
def test_heads(d: int):
    """The band is a window that begins and ends within blocks; 200 keys are 7 blocks."""
    close8(attention8(40, 200, d, (16, 32, 64), band=Band(-90, 3), start=100, lse=True), NARROW, d % 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (32, 256), (256, 160), (16, 48)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    close8(attention8(50, 150, d, d_v=d_v, band=CAUSAL, start=90, heads=2, lse=True), NARROW)


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_results(out: DType):
    close8(attention8(70, 130, 64, out=out, heads=2, group=2, lse=True))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("start", [0, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(None, 20), Band(-10, None), Band(5, 60),
                                  Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing: zeros, and l = −inf."""
    close8(attention8(140, 230, 32, (32, 32, 32), band=band, start=start, lse=True), NARROW, start % 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "seed"), [*(("of blocks", seed) for seed in range(4)), ("of all", 0),
                                            ("of heads", 1), ("of keys", 2), ("of values", 3)])
def test_blocks_of_scales(name: str, seed: int):
    """Of q, k and v; six blocks of two stages."""
    spec = attention8(140, 330, 48, BLOCKS[name], heads=2, group=1 + seed % 2, batch=1 + seed // 2,
                      band=CAUSAL, start=190, lse=True)
    schedule = (SMALL8, NARROW, NARROW.pingpong(), NARROW.stages(3))[seed]
    if not TABLE.problems(spec, schedule, GPU("sm_90a")): close8(spec, schedule, seed)
    else: close8(spec, NARROW, seed)


@pytest.mark.parametrize("name", ["of heads", "of blocks"])
def test_scales_and_numbers_can_take_each_others_place(name: str):
    """By powers of two: the bits are the same."""
    spec = attention8(100, 256, 64, BLOCKS[name], lse=True)
    given = arguments(spec)
    random = torch.Generator().manual_seed(1)
    for each in "qkv":
        given[each] = torch.randint(-8, 9, given[each].shape, generator=random).to(given[each].dtype)
        given[f"scale_{each}"].mul_(2.0)
    moved = dict(given)
    for each, power in (("q", 2.0), ("k", 0.25), ("v", 0.5)):
        moved[each] = (given[each].float() * power).to(given[each].dtype)
        moved[f"scale_{each}"] = given[f"scale_{each}"] / power
    made = TABLE.build(spec, SMALL8, GPU("sm_90a"))
    one, other = (run(made, spec, storages, "sm_90a") for storages in (given, moved))
    assert torch.equal(one[0], other[0])
    near(spec, given, one)


@pytest.mark.parametrize("name", ["of heads", "of blocks"])
def test_scales_of_nothing(name: str):
    """A block of zeros may have the scale 0: its scores are 0, its values add nothing."""
    spec = attention8(100, 256, 64, BLOCKS[name], band=CAUSAL, start=100, lse=True)
    given = arguments(spec)
    for each in "qkv": given[f"scale_{each}"][3:4] = 0.0
    near(spec, given, run(TABLE.build(spec, SMALL8, GPU("sm_90a")), spec, given, "sm_90a"))


SCALED = Sum() * 0.125
SCORES = {"soft-cap": tanh(SCALED * 0.05) * 20.0,
          "bias": SCALED + Load(0, F32, 201, 1, (2 * 140 * 201, 140 * 201, 0), 3),
          "mask": where(Load(0, dtypes.bool, 200, 1), SCALED, Constant(-math.inf))}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["of heads", "of blocks"])
@pytest.mark.parametrize("score", SCORES)
def test_scores(score: str, name: str):
    spec = attention8(140, 200, 64, BLOCKS[name], heads=2, band=CAUSAL, start=50, score=SCORES[score],
                      lse=True)
    close8(spec, seed=len(name) % 4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("scale", "name"), [(0.1, "of heads"), (8.0, "of blocks"), (1e8, "of heads"),
                                             (1000.0, "of blocks")])
def test_small_and_large_scores(scale: float, name: str):
    """Of small integers, whose sums wgmma has exactly."""
    spec = attention8(100, 330, 64, BLOCKS[name], score=Sum() * scale, lse=True)
    given, random = arguments(spec), torch.Generator().manual_seed(1)
    for each in "qk":
        given[each] = torch.randint(-8, 9, given[each].shape, generator=random).to(given[each].dtype)
    near(spec, given, run(TABLE.build(spec, SMALL8, GPU("sm_90a")), spec, given, "sm_90a"))


# **** exact ****

def test_a_row_that_sees_one_column_is_its_value():
    """Its weight is 2⁸, which e4m3 has."""
    spec = attention8(70, 170, 64, band=Band(0, 0), start=60, heads=2)
    given = arguments(spec)
    given["scale_v"].fill_(0.25)
    out, _ = run(TABLE.build(spec, SMALL8, GPU("sm_90a")), spec, given, "sm_90a")
    assert torch.equal(out, matrix(spec, given, "v")[..., 60:130, :].double() / 4)


def test_equal_scores_are_a_mean():
    """Of 256 small integers: nothing is rounded."""
    spec = attention8(64, 256, 48, (-1, -1, -1), out=F32, lse=True)
    given = arguments(spec)
    given["q"].zero_()
    random = torch.Generator().manual_seed(1)
    given["v"] = torch.randint(-8, 9, given["v"].shape, generator=random).to(given["v"].dtype)
    given["scale_v"].fill_(1.0)
    out, log = run(TABLE.build(spec, SMALL8, GPU("sm_90a")), spec, given, "sm_90a")
    assert torch.equal(out, matrix(spec, given, "v").double().mean(-2, keepdim=True).expand(out.shape))
    assert log is not None
    assert (log - math.log(256)).abs().max() < 1e-6


def test_a_rows_bits_do_not_depend_on_other_rows():
    spec = attention8(37, 270, 64, (0, 64, 64), heads=2, lse=True)
    given = arguments(spec, scale=2.0)
    alone = replace(spec, s_q=5)
    made = TABLE.build(alone, SMALL8, GPU("sm_90a"))
    few = run(made, alone, given | {"l": given["l"][:10].clone()}, "sm_90a")
    many = run(TABLE.build(spec, SMALL8, GPU("sm_90a")), spec, given, "sm_90a")
    assert torch.equal(few[0], many[0][..., :5, :])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_columns_that_no_row_sees_do_not_count(seed: int):
    """Keys and values beyond the band are NaN, within the last block too, in every tile of CTAs."""
    spec = attention8(150, 350, (32, 64, 96, 160)[seed], band=CAUSAL, start=150, heads=2)
    given = arguments(spec, seed)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": matrix(spec, spoilt, name)[..., 300:, :] = torch.nan
    near(spec, given, run(TABLE.build(spec, SMALL8, GPU("sm_90a", 3)), spec, spoilt, "sm_90a", seed))


# **** schedules ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", [
    NARROW, NARROW.stages(3).pingpong(), W.block(64, 128).warps(8), W.block(192, 96).warps(16).pingpong(),
    *(pytest.param(W.block(128, n), marks=pytest.mark.slow) for n in (128, 160, 192, 224))], ids=str)
def test_schedules(schedule: FlashWgmma):
    """At least `stages` + 2 blocks of narrow ones, fewer blocks than stages."""
    for blocks in (schedule.depth + 2 if schedule.block_n < 64 else 3, 1):
        s_kv = schedule.block_n * blocks - 5
        spec = attention8(200, s_kv, 48, d_v=32, band=CAUSAL, start=s_kv // 2, lse=True)
        close8(spec, schedule)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("band", "seed"), [*((CAUSAL, seed) for seed in range(4)), (FULL, 1),
                                            (Band(-50, 0), 2), (Band(None, -100), 3)], ids=str)
def test_persistent(band: Band, seed: int):
    """More tiles than multiprocessors, some of which may have no block: the bits of CTAs with a tile each."""
    spec = attention8(140, 140, 32, BLOCKS[list(BLOCKS)[seed]], band=band, heads=2, group=2, lse=True)
    given, schedule = arguments(spec, seed), NARROW.pingpong() if seed % 2 else NARROW
    one, other = (run(TABLE.build(spec, schedule, GPU("sm_90a", count)), spec, given, "sm_90a", seed)
                  for count in (1000, 3))
    assert torch.equal(one[0], other[0])
    near(spec, given, other)


@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 256), (129, 129), (200, 1), (200, 255)])
def test_extents_of_a_launch(s_q: int, s_kv: int):
    spec = attention8(200, 300, 64, (64, 64, 64), band=CAUSAL, start=120, heads=2, group=2, order="brh",
                      symbolic=("s_q", "s_kv", "start"), lse=True)
    close8(spec, seed=s_kv % 4, s_q=s_q, s_kv=s_kv, start=max(0, min(120, s_kv - s_q)))


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    """An attention with scales of blocks that divide by any block of columns below."""
    s_q, s_kv, d = draw(st.integers(1, 200)), draw(st.integers(1, 300)), 16 * draw(st.integers(1, 16))
    band = draw(st.sampled_from([FULL, CAUSAL, Band(-90, 0), Band(-60, 40)]))
    q, k, v = (draw(st.sampled_from([-1, 0, each])) for each in (32, 192, 192))
    scale, out = draw(st.sampled_from([0.25, 1.0])) / math.sqrt(d), draw(st.sampled_from([BF16, F16, F32]))
    return attention8(s_q, s_kv, d, (q, k, v), band=band, start=draw(st.integers(0, 100)), out=out,
                      batch=draw(st.integers(1, 2)), heads=2, group=draw(st.integers(1, 2)),
                      score=Sum() * scale, lse=draw(st.booleans()),
                      order=draw(st.sampled_from(["bhr", "brh"])))


@pytest.mark.slow
@settings(max_examples=6, deadline=None, phases=QUICK)
@drawn(specs(), st.sampled_from([32, 64, 96]), st.integers(1, 3), st.integers(2, 3), st.integers(0, 3))
def test_generated(spec: AttentionSpec, columns: int, consumers: int, stages: int, seed: int):
    schedule = W.block(64 * consumers, columns).warps(4 * consumers + 4).stages(stages)
    if TABLE.problems(spec, schedule, GPU("sm_90a")): schedule = W.block(64, 32).warps(8)
    close8(spec, schedule, seed, sm_count=3)


# **** what ptxas and the emulator count ****

LONG = 7392
# by heads, the most SASS instructions for an HGMMA of the loop without a mask. FlashAttention-3's tiles are
# larger, its sums of 14 bits from the first key to the last
LOOPS = {64: 75, 96: 66, 128: 61, 192: 32, 256: 28}
SPILLS = {"window": {"band": Band(-500, 0)}, "causal": {"band": CAUSAL},
          "soft-cap": {"band": Band(-500, 0), "score": tanh(Sum() * 0.0025) * 50.0}}


def chosen(d: int, **others: Any) -> tuple[AttentionSpec, FlashWgmma]:
    """A long attention, and its default schedule."""
    spec = attention8(LONG, LONG, d, **others)
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    return spec, schedule


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", LOOPS)
def test_main_loops_are_short_and_nothing_spills(d: int):
    schedule = chosen(d)[1]
    spec = attention8(LONG, 16 * schedule.block_n, d)
    code = code_of(TABLE.build(spec, schedule, GPU("sm_90a")), "sm_90a")
    products = d // 32 + schedule.block_n // 32 * len(FlashWgmmaPlan.of(spec, schedule).pieces)
    assert [loop.around for loop in loops(code) if loop.tensor == products] <= [LOOPS[d] * products]
    assert_overlapped(code, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("d", "name"), [
    (64, "window"), (96, "window"), (128, "window"), (128, "causal"), (192, "window"), (256, "window"),
    (64, "soft-cap"), (128, "soft-cap"), (256, "soft-cap")])
def test_no_default_spills(d: int, name: str):
    """Scales of blocks, grouped heads, extents of a launch, l, persistent CTAs: all that takes registers."""
    spec, schedule = chosen(d, block=(128, 128, 128), heads=2, group=2, lse=True,
                            symbolic=("s_q", "s_kv", "start"), **SPILLS[name])
    code = code_of(TABLE.build(spec, schedule, GPU("sm_90a")), "sm_90a")
    assert_overlapped(code, 2 if name == "causal" else 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", [32, 64, 96, 192])
def test_no_bank_conflicts(d: int):
    """Of values turned by ldmatrix and stmatrix, and of the result."""
    for columns in (128, 64, 32):
        spec = attention8(128, 2 * columns, d)
        made = TABLE.build(spec, W.block(128, columns), GPU("sm_90a"))
        _, report = launched(made, spec, arguments(spec), "sm_90a")
        assert report.findings == []
        assert report.stats.bank_conflicts == {}


def test_registers_are_within_the_pool():
    """Of 65536 registers, shared evenly by threads in steps of 8, before any warpgroup gives some away."""
    for consumers, (fewer, more) in TURNING.items():
        assert fewer + consumers * more <= 65536 // (128 * (consumers + 1)) // 8 * 8 * (consumers + 1)


# **** refused ****

def test_refused():
    spec = attention8(128, 256, 64, (8, 96, 64))
    found = TABLE.problems(spec, W.block(128, 64), GPU("sm_90a"))
    assert found == ["q: scales of 8 rows, not of whole times 16, a warp's rows",
                     "k: scales of 96 rows, not of whole times 64, a block of columns"]
    with pytest.raises(ScheduleError, match="cannot be"): TABLE.build(spec, SMALL8, GPU("sm_90a"))
    assert "block_n=48 is not a multiple of 32" in TABLE.problems(spec, W.block(128, 48), GPU("sm_90a"))[0]
    wide = attention8(128, 256, 256)
    assert ("64 scores + 16 fours of weights + 128 sums + 32 of a block = 240 registers"
            in " ".join(TABLE.problems(wide, W.block(128, 128), GPU("sm_90a"))))
    assert "of keys + 8192 B of values + 8192 B of them turned)" in " ".join(
        TABLE.problems(attention8(128, 256, 256, d_v=64), W.block(128, 128).stages(8), GPU("sm_90a")))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_other_architectures_have_none(arch: str):
    spec = attention8(128, 256, 64)
    assert ATTENTION.choose(spec, GPU(arch)) is None
    assert TABLE.problems(spec, SMALL8, GPU(arch)) == [f"wgmma needs sm_90a, the target is {arch}"]
    words = TABLE.problems(spec, FlashMma().block(64, 64).warps(4), GPU(arch))
    assert any("operands of e4m3 are of flash_wgmma, for sm_90a" in each for each in words)


def test_specs_that_cannot_be():
    spec = attention8(128, 256, 64)
    assert spec.scales is not None
    with pytest.raises(SpecError, match="e4m3 without scales"): replace(spec, scales=None)
    q, k, v = spec.scales
    with pytest.raises(SpecError, match="scales of 0 rows of q"):
        replace(spec, scales=(RowScales(0), k, v))
    with pytest.raises(SpecError, match="scales of v that differ between the query heads"):
        replace(spec, scales=(q, k, RowScales(batch=(0, 0, 1))))
    with pytest.raises(SpecError, match="bf16 with scales"): replace(attention(128, 256), scales=(q, k, v))
