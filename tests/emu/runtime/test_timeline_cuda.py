"""A timeline on DEV=CUDA, over the fake of the driver library: pairs of events that are held back."""
from __future__ import annotations

import numpy as np

from tests.support.runtime.on_cuda import cuda
from tinygrad_nv import Tensor, TinyJit, layer, timeline
from tinygrad_nv.runtime.observe import timeline as timelines


def test_replays_are_timed_kernel_by_kernel(monkeypatch):
    hold = timelines._hold
    monkeypatch.setattr(timelines, "_hold", lambda opened: hold(opened, 3))
    values = np.random.default_rng(0).integers(-3, 4, (3, 16, 32)).astype(np.float32)
    with cuda("PTX"):
        def step(x: Tensor) -> Tensor:
            with layer("one"): y = (x * 2 + 1).contiguous()
            with layer("two"): return (y.sum(-1) * 3).realize()
        jitted = TinyJit(step)
        with timeline() as t:
            for x in values:
                np.testing.assert_array_equal(jitted(Tensor(x).realize()).numpy(), (x * 2 + 1).sum(-1) * 3)
        kernels = [k for k in t.kernels if not k.is_copy]
        assert len(kernels) == 6
        assert [k.layer for k in kernels] == ["one", "two"] * 3
        assert {k.device for k in kernels} == {"CUDA"}
        assert t.notes["empty_pair_us"]["CUDA"] >= 0
        assert "times" not in t.notes
        again = jitted(Tensor(values[0]).realize()).numpy()
        np.testing.assert_array_equal(again, (values[0] * 2 + 1).sum(-1) * 3)
        del jitted
