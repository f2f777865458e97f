"""Sinks of the flash templates, on the emulator against float64: of all sizes; rows that see nothing else."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad import dtypes

from bench.lib.specs import attention as attention_of
from bench.lib.specs import with_fp8_scales
from tests.support.tile.attention_case import arguments, attention, near
from tests.support.tile.flash_case import CAUSAL, F32, FMA, MMA, WGMMA, FlashSchedule, close, launch
from tinygrad_nv.errors import SpecError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.expression import Expression, Sum, tanh
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SCHEDULES = [MMA, WGMMA, FMA]
SIZES = (0.5, -torch.inf, 1e30, -1e30, 30.0, -1.0)


def spec_of(schedule: FlashSchedule, band: Band = CAUSAL, score: Expression | None = None) -> AttentionSpec:
    """Three heads of two key heads; 70 rows that stand behind 10 keys."""
    kind = F32 if schedule is FMA else dtypes.bfloat16
    made = attention(70, 80, 32, kind, heads=2, group=3, band=band, score=score, start=10, lse=True)
    return replace(made, sinks=(0, 3, 1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sinks_are_near(schedule: FlashSchedule):
    """With l, too."""
    close(spec_of(schedule), schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_sinks_of_any_size(schedule: FlashSchedule):
    """−∞ is none, and large ones leave nothing."""
    spec = spec_of(schedule)
    given = arguments(spec)
    given["sinks"].copy_(torch.tensor(SIZES))
    out, l = launch(spec, schedule, given)
    near(spec, given, (out, l))
    assert not out[0, 0, 2].any()
    none = replace(spec, sinks=None)
    rest = {name: each for name, each in given.items() if name != "sinks"}
    assert torch.equal(launch(none, schedule, rest)[0][0, 0, 1], out[0, 0, 1])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rows_that_see_only_a_sink(schedule: FlashSchedule):
    """Are zeros, and their l is the sink."""
    spec = spec_of(schedule, Band(-90, -60))
    given = arguments(spec)
    out, l = launch(spec, schedule, given)
    near(spec, given, (out, l))
    assert l is not None
    sinks = given["sinks"].view(1, 2, 3).double()
    assert torch.allclose(l[..., 0], sinks, rtol=1e-6)
    assert not out[..., 0, :].any()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_sinks_beside_evaluated_scores(schedule: FlashSchedule, scale: float):
    close(spec_of(schedule, score=tanh(Sum() * 0.05) * 20.0), schedule, scale=scale)


def test_sinks_of_8_bits_are_refused():
    with pytest.raises(SpecError, match="sinks of e4m3 operands"):
        replace(with_fp8_scales(attention_of(70, 130, 64), 32), sinks=(0, 1, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("d", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_default_schedules_do_not_spill(d: int, arch: str):
    """As gpt-oss has them, with a window and without."""
    for band in (CAUSAL, Band(-127, 0)):
        spec = attention_of(4096, 4096, d, batch=2, heads=8, group=8, band=band, lse=True, sinks=(0, 8, 1))
        kernel = TABLE.build(spec, TABLE.choose(spec, GPU(arch)), GPU(arch))
        resources = assemble(kernel.ptx, arch).kernels[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
