"""CTAs that wait for others on a GPU that has room for few of the grid: each waits for such alone as started
before it, so that the grid ends, with the bits that it has where all run at once."""
from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.tile import backward_case, gemm_case
from tests.support.tile.backward_case import backward
from tests.support.tile.flash_backward_case import WIDE, mma
from tests.support.tile.flash_case import CAUSAL
from tests.support.tile.gemm_case import product, reference
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

STREAMED = Wgmma().block(128, 72).stages(3).stream_k()
STEPS = 2_000_000  # warp instructions, after which what locks up ends; the longest grid here has 0.2 million
THREE = backward(150, 300, 64, band=CAUSAL, start=200, deterministic=True)  # CTAs that add to a block of dq
TURNS = {"wgmma": (TABLE.build(THREE, WIDE, GPU("sm_90a")), "sm_90a"),
         "mma": (TABLE.build(THREE, mma(32, 128, 8), GPU("sm_80")), "sm_80")}


def few(monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    """So many CTAs run at a time in what follows."""
    for case in (gemm_case, backward_case):
        monkeypatch.setattr(case, "Emulator", partial(Emulator, resident=resident, step_limit=STEPS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ctas", [5, 9, 16])
@pytest.mark.parametrize("resident", [1, 2])
def test_stream_k(ctas: int, resident: int, monkeypatch: pytest.MonkeyPatch):
    """4 tiles of 11 stages: CTAs with the end of one and the beginning of another, and tiles of five CTAs."""
    few(monkeypatch, resident)
    spec = product(200, 130, 64 * 11)
    given, made = gemm_case.arguments(spec, resident), TABLE.build(spec, STREAMED, GPU("sm_90a", ctas))
    assert torch.equal(gemm_case.run(made, spec, given, "sm_90a", resident), reference(spec, given))


def test_stream_k_has_the_same_bits_however_many_run(monkeypatch: pytest.MonkeyPatch):
    spec = product(128, 72, 64 * 21)
    given = gemm_case.arguments(spec, integers=False)
    made, found = TABLE.build(spec, STREAMED, GPU("sm_90a", 7)), []
    for resident in (1, 2, 4, 7):
        few(monkeypatch, resident)
        found.append(gemm_case.run(made, spec, given, "sm_90a", resident))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TURNS)
def test_backward_passes_in_turns(name: str, monkeypatch: pytest.MonkeyPatch):
    made, arch = TURNS[name]
    assert isinstance(made, BackwardKernel)
    assert made.grid[0] == 3
    given, found = backward_case.arguments(THREE), []
    for resident in (1, 2, 3):
        few(monkeypatch, resident)
        found.append(backward_case.run(made, THREE, given, arch, resident))
    for each in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], each, strict=True))
