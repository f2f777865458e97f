"""Placement and movement: each is kept, or refused in words."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Device
from tinygrad import Tensor as Plain

from tinygrad_nv import explain, timeline
from tinygrad_nv.errors import EffectError
from tinygrad_nv.language import *


@kernel(grid=lambda N: (cdiv(N, 64),))
def doubled(x: KTile["N", f32], out: OTile["N", f32]):
    rows = tile.block(tile.program_id(0) * 64, 64)
    out[rows] = x[rows] * 2


@kernel(grid=lambda N: (cdiv(N, 64),), schedule=Schedule(stages=1))
def columns(x: KTile["M", "N", f32], out: OTile["N", f32]):
    at = tile.block(tile.program_id(0) * 64, 64)
    total = tile.zeros((64,), f32)
    for rows in tile.range_m(x.shape, 16): total += tile.sum(x[rows, at], 0)
    out[at] = total


def test_device() -> None:
    """Tensors are made there, and those of elsewhere are refused by name."""
    here = Plain.ones(100).contiguous().realize()
    with device("EMU") as name:
        assert name == "EMU"
        x = Plain.ones(100).contiguous().realize()
        assert x.device == "EMU"
        np.testing.assert_array_equal(doubled(x).numpy(), np.full(100, 2, np.float32))
        with pytest.raises(EffectError, match=r"kernel doubled in device\(EMU\): x is on CPU"): doubled(here)
    assert Plain.ones(1).device == Device.DEFAULT
    with pytest.raises(EffectError, match=r"device\('DISK"), device("DISK:/tmp/x"): pass


def test_prefetch_into_smem() -> None:
    """A load in a loop can be ahead; one that is not, or a schedule of one stage, cannot."""
    x = Plain.ones(64, 70).contiguous().realize()
    with prefetch(x, into="smem", overlap="compute"):
        np.testing.assert_array_equal(columns(x).numpy(), np.full(70, 64, np.float32))
        with pytest.raises(EffectError, match="does not load it in a loop"): doubled(x.reshape(-1))
    on_gpu = x.to("EMU").realize()
    with prefetch(on_gpu, into="smem"):
        with pytest.raises(EffectError, match="has a schedule of 1 stage"): columns(on_gpu)
        made = columns.with_schedule(Schedule(stages=2))(on_gpu)
        np.testing.assert_array_equal(made.numpy(), np.full(70, 64, np.float32))


def test_prefetch_elsewhere() -> None:
    x = Plain.ones(64).contiguous().realize()
    words = r'prefetch\(into="l2"\) of tensors on CPU'
    with pytest.raises(EffectError, match=words), prefetch(x, into="l2"): pass
    with pytest.raises(EffectError, match="into='tape'"), prefetch(x, into="tape"): pass
    with pytest.raises(EffectError, match="a int to be moved"), prefetch(3): pass
    with device("EMU"), prefetch(x, into="hbm", overlap=None):
        assert x.device == "EMU"
        with prefetch(x, into="l2"): made = doubled(x).numpy()
        np.testing.assert_array_equal(made, np.full(64, 2, np.float32))
    assert offload(x).device == "CPU"


def test_explain_and_the_timeline_say_so() -> None:
    x = Plain.ones(64, 70).contiguous().realize()
    with timeline() as seen, device("EMU"), prefetch(x, into="hbm"), prefetch(x, into="smem"), \
            prefetch(x, into="l2"):
        made = columns.with_schedule(Schedule(stages=3))(x)
        why = explain(made).kernels[0].reason
        made.realize()
        offload(made).realize()
    assert why.endswith("x comes to smem 3 stages ahead; x is kept in L2")
    assert [(each.is_copy, each.name.partition(",")[2] or each.reason) for each in seen.kernels] == [
        (True, " EMU <- CPU"), (False, why), (True, " CPU <- EMU")]


def test_donate() -> None:
    """The kernel writes into the memory that is given; without it into its own."""
    x, out = Plain.arange(64).float().contiguous().realize(), Plain.zeros(64).contiguous().realize()
    doubled(x, out).realize()
    assert not out.numpy().any()
    made = doubled(x, donate(out))
    np.testing.assert_array_equal(made.numpy(), np.arange(64, dtype=np.float32) * 2)
    np.testing.assert_array_equal(out.numpy(), np.arange(64, dtype=np.float32) * 2)
    with pytest.raises(Exception, match="donate for x, which it does not write"): doubled(donate(x))
