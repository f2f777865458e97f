"""Attention within documents on the emulated GPU, forward and backward, against float64; and that blocks
between documents are skipped."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Device, Tensor, dtypes

from tests.support.patterns.documents_case import Documents
from tinygrad_nv import explain
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec

HOPPER, AMPERE = "EMU:90", "EMU:80"
UNIT = 2.0**-8      # of bfloat16
C = 2.0             # units of the largest: the result is rounded to one, and so are p and ds
# documents within blocks and beyond them, of one token, many tiny ones, padding in the middle of a block
LENGTHS = [[70, 1, 1, 120], [5] * 30, [], [193]]
CASES: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "softcap and window": {"softcap": 2.0, "window": 40}}


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both GPUs, as which they were opened first."""
    for name, arch in ((AMPERE, "sm_80"), (HOPPER, "sm_90a")):
        monkeypatch.setenv("EMU_ARCH", arch)
        assert Device[name] is not None


def checked(case: Documents, device: str, templates: set[str], **how: Any) -> None:
    """Results and gradients, by kernels of these templates."""
    made = case.ours(device, **how)
    records = [each for each in explain(*made).kernels if "flash" in (each.template or "")]
    assert {each.template for each in records} == templates
    for each in records:
        assert isinstance(each.spec, (AttentionSpec, BackwardSpec))
        assert (each.spec if isinstance(each.spec, AttentionSpec) else each.spec.forward).documents
    Tensor.realize(*made)
    for got, exact in zip(made, case.plain(torch.float64, **how), strict=True):
        mine, wanted = got.float().numpy(), exact.numpy()
        if mine.ndim == 1: wanted = wanted.sum((0, 2, 3))
        assert np.abs(mine - wanted).max() <= C * UNIT * np.abs(wanted).max()
    for got in made[:4]:
        if case.lengths[2:3] == [[]]: assert not got.float().numpy()[2].any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_hopper(how: dict[str, Any], sinks: bool) -> None:
    """flash_wgmma and its backward pass; the last block of 193 tokens has one."""
    case = Documents.of(LENGTHS, 193, 2, 1, 64, dtypes.bfloat16, sinks)
    checked(case, HOPPER, {"flash_wgmma", "flash_backward_wgmma"}, **how)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_ampere(how: dict[str, Any]) -> None:
    """flash_mma and its backward pass."""
    case = Documents.of(LENGTHS, 193, 2, 1, 32, dtypes.bfloat16)
    checked(case, AMPERE, {"flash_mma", "flash_backward_mma"}, **how)


def test_turns_count_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an order of sums the backward pass skips nothing, and ends."""
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    case = Documents.of([[70, 60]], 130, 1, 1, 64, dtypes.bfloat16)
    checked(case, HOPPER, {"flash_wgmma", "flash_backward_wgmma"})


def test_float32() -> None:
    """flash_fma; the gradient is the reference implementation's."""
    case = Documents.of([[70, 60, 1]], 140, 2, 1, 32)
    (made, *_), (exact, *_) = case.ours(HOPPER), case.plain(torch.float64)
    record, = (each for each in explain(made).kernels if "flash" in (each.template or ""))
    assert record.template == "flash_fma"
    assert (torch.from_numpy(made.numpy()).double() - exact).abs().max() < 1e-5


@pytest.mark.slow
def test_blocks_of_other_documents_are_skipped() -> None:
    """NaN in a document that shares no block with another is not multiplied by 0: no bit of that differs."""
    case = Documents.of([[256, 128, 128]], 512, 1, 1, 64, dtypes.bfloat16)
    spoilt = [x.clone() for x in case.arrays]
    for x in spoilt: x[:, :, :256] = torch.nan
    clean, dirty = (each.ours(HOPPER) for each in (case, replace(case, arrays=tuple(spoilt))))
    Tensor.realize(*clean, *dirty)
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(*(x.float().numpy()[:, :, 384:] for x in (one, other)))
