"""The scale of a loss beside torch.amp.GradScaler's."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.numerics import LossScaling
from tinygrad_nv.numerics.loss_scaling import LossScaler
from tinygrad_nv.train.optimizers import StateOptions, adamw


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [LossScaling(growth_interval=3), LossScaling(2.0 ** 126, growth_interval=1),
                                 LossScaling(3.0, 1.7, 0.3, 2)], ids=str)
def test_scales_are_those_of_torch(how: LossScaling):
    """Step for step, of steps that overflow at random, to the largest number."""
    theirs = torch.amp.GradScaler("cpu", how.init_scale, how.growth_factor, how.backoff_factor,
                                  how.growth_interval)
    parameter = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([parameter], 0.0)
    theirs.scale(torch.ones(1))
    ours = LossScaler(how, "CPU")
    update = TinyJit(lambda go: Tensor.realize(*ours.schedule_update(go)))
    random = np.random.default_rng(0)
    for _ in range(40):
        overflows = random.random() < 0.25
        assert ours.scale.item() == theirs.get_scale()
        parameter.grad = torch.full((1,), float("inf") if overflows else 1.0)
        theirs.step(sgd)
        theirs.update()
        update(Tensor([not overflows]).realize())
    assert ours.growth_tracker.item() == theirs.state_dict()["_growth_tracker"]


def test_an_optimiser_takes_the_scale_out():
    """Steps of scaled gradients are those of plain ones; one that overflows changes the scale alone."""
    gradient = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
    def held() -> dict[str, Tensor]: return {"a.weight": Tensor.ones(8, 4).contiguous().realize()}
    plain, scaled = held(), held()
    one = adamw(plain, 1e-2, options=StateOptions(max_grad_norm=1.0))
    other = adamw(scaled, 1e-2, options=StateOptions(max_grad_norm=1.0, loss_scaling=LossScaling(8.0)))
    assert other.loss_scaler is not None
    assert {"loss_scale", "growth_tracker"} <= other.state_dict().keys()
    for _ in range(2):
        Tensor.realize(*one.schedule_step({"a.weight": Tensor(gradient)}))
        Tensor.realize(*other.schedule_step({"a.weight": Tensor(gradient) * other.loss_scaler.scale}))
        np.testing.assert_array_equal(plain["a.weight"].numpy(), scaled["a.weight"].numpy())
        assert one.grad_norm.item() == other.grad_norm.item()
    before = scaled["a.weight"].numpy()
    Tensor.realize(*other.schedule_step({"a.weight": Tensor(gradient * np.float32(np.inf))}))
    np.testing.assert_array_equal(scaled["a.weight"].numpy(), before)
    assert (other.loss_scaler.scale.item(), other.skipped.item(), other.steps.item()) == (4.0, 1, 2)
