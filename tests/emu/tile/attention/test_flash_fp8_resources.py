"""What ptxas and the emulator count of attention of 8 bits, and what is refused."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.tile.attention_case import arguments, attention, launched
from tests.support.tile.flash_case import CAUSAL, W
from tests.support.tile.flash_fp8_case import SMALL8, attention8
from tests.support.tile.resources_case import assert_overlapped, code_of
from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.ptx.sass import loops
from tinygrad_nv.tile.attention.schedules import FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band, RowScales
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.attention.wgmma.plan import TURNING, FlashWgmmaPlan
from tinygrad_nv.tile.expression import Sum, tanh
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

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
