"""Dropout in the backward passes of attention: the elements that the forward pass dropped."""
from __future__ import annotations

from dataclasses import replace

import pytest
from backward_case import backward
from flash_backward_mma_case import BF16, CAUSAL, F16, F32, close, scheduled
from flash_backward_wgmma_case import LOW, WIDE
from flash_backward_wgmma_case import SMALL as FEW
from flash_backward_wgmma_case import close as close_wgmma

from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.expression import Load, Sum, tanh
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


@pytest.mark.parametrize("schedule", [scheduled(32, 32, 2), scheduled(64, 64, 4), scheduled(32, 32, 1),
                                      scheduled(64, 128, 8, 3), scheduled(64, 64, 4).warps(4, 2)], ids=str)
def test_schedules(schedule: Schedule):
    """16 or 32 keys of a warp, several blocks of both."""
    close(backward(150, 140, 32, heads=2, group=2, kept=150), schedule, seed=schedule.block_n % 4)


@pytest.mark.parametrize("seed", range(4))
def test_everything_else_goes_with_it(seed: int):
    close(backward(100, 130, 64, F16, band=Band(-70, 3), start=20, heads=3, kept=200, out=F32), seed=seed)
    close(backward(70, 90, 32, BF16, band=CAUSAL, symbolic=("s_q", "s_kv", "start"), start=60, kept=77),
          arch="sm_90a", seed=seed, s_q=50, s_kv=66, start=5 * seed)


def test_scores():
    scaled = Sum() * 0.1
    for score in (tanh(scaled) * 3.0, scaled + Load(0, F32, 90, 1), scaled * -1.0):
        close(backward(70, 90, 32, score=score, kept=100, deterministic=score == scaled * -1.0))


@pytest.mark.parametrize("schedule", [WIDE, LOW, FEW], ids=str)
def test_wgmma(schedule: Schedule):
    close_wgmma(backward(150, 140, 64, heads=2, group=2, kept=150), schedule, seed=1)
    close_wgmma(backward(100, 130, 48, F16, band=Band(-70, 3), start=20, kept=200, out=F32), schedule, seed=2)
    close_wgmma(backward(70, 90, 64, BF16, band=CAUSAL, symbolic=("s_q", "s_kv", "start"), start=60, kept=77,
                         score=Sum() * -0.1), schedule, seed=3, s_q=50, s_kv=66, start=15)


def test_what_wgmma_does_not_drop():
    spec = backward(70, 90, 64, score=tanh(Sum() * 0.1), kept=100)
    assert any("whose derivative differs" in words for words in TABLE.problems(spec, LOW, GPU("sm_90a")))
    assert not TABLE.problems(replace(spec, forward=replace(spec.forward, kept=256)), LOW, GPU("sm_90a"))
