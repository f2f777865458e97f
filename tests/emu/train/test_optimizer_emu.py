"""Steps on the emulated GPU: one launch for all parameters, paged state, the same weights as on the CPU."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.train.optimizer_case import gradients, numbers, parameters, ran
from tinygrad_nv import Tensor, explain
from tinygrad_nv.train.optimizers import StateOptions, adamw, lion


def test_one_launch():
    held = parameters("EMU")
    optimizer = adamw(held, 1e-2, options=StateOptions(max_grad_norm=1.0))
    given = {name: Tensor(x, device="EMU").realize() for name, x in gradients(0).items()}
    shown = explain(*optimizer.schedule_step(given))
    assert [kernel.template for kernel in shown.kernels].count("optimizer") == 2    # the norm, the update


@pytest.mark.sampled(1)
@pytest.mark.parametrize("paged", [False, True])
def test_as_on_the_cpu(paged: bool):
    options = StateOptions(max_grad_norm=1.0, paged=paged)
    found, optimizer = ran(lambda held: adamw(held, 1e-2, options=options), 4, device="EMU")
    wanted, _ = ran(lambda held: adamw(held, 1e-2, options=options), 4)
    for name, x in wanted.items(): np.testing.assert_allclose(found[name], x, rtol=2e-6, atol=2e-6)
    assert all((np.abs(found[name] - x) > 1e-3).any() for name, x in numbers(1).items())
    states = [x for name, x in optimizer.state_dict().items() if "exp_avg" in name]
    assert {x.device for x in states} == {"CPU" if paged else "EMU"}


@pytest.mark.slow
def test_paged_lion():
    found, _ = ran(lambda held: lion(held, 1e-2, options=StateOptions(paged=True)), 3, device="EMU")
    wanted, _ = ran(lambda held: lion(held, 1e-2), 3)
    for name, x in wanted.items(): np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-6)
