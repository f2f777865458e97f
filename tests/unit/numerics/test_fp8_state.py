"""Delayed scaling beside Transformer Engine's rule, counters, and the rule of what stays; the scale of a
loss beside torch.amp.GradScaler's."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from tinygrad_nv import Tensor, TinyJit, dtypes
from tinygrad_nv.numerics import RECIPES, DelayedScaling, Float8BlockScaling, HighPrecision, LossScaling
from tinygrad_nv.numerics.fp8 import Fp8State, name_counters
from tinygrad_nv.numerics.recipes import LossScaler
from tinygrad_nv.train.optimizers import StateOptions, adamw

MOST = np.array([448, 448, 57344], np.float32)


def updated(how: DelayedScaling, history: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A step of transformer_engine/common/recipe/delayed_scaling.cu, in NumPy."""
    amax = history.max(0) if how.amax_compute_algo == "max" else history[0]
    with np.errstate(divide="ignore"): wanted = MOST * np.float32(2.0 ** -how.margin) / amax
    scale = np.where(np.isfinite(amax) & (amax > 0), wanted, scale).astype(np.float32)
    rolled = np.roll(history, -1, 0)
    rolled[0] = 0
    return rolled, scale


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [
    DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=1, margin=2),
    DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=-1)], ids=str)
def test_scales_are_those_of_transformer_engine(how: DelayedScaling):
    """12 steps of two micro-batches; the sixth is skipped, and is as if it had not been."""
    state, random = Fp8State(how, ("a", "b"), "CPU"), np.random.default_rng(0)
    history, scale = np.zeros((how.amax_history_len, 2, 3), np.float32), np.ones((2, 3), np.float32)
    seen = TinyJit(lambda a, b: Tensor.realize(*state.schedule_seen([a, b])))
    ended = TinyJit(lambda go: Tensor.realize(*state.schedule_step(go)))
    for number in range(12):
        goes = number != 5
        figures = np.abs(random.standard_normal((2, 2, 9))).astype(np.float32) * 10.0 ** (number % 4)
        figures[..., 3:] = random.integers(0, 1000, (2, 2, 6))
        if number == 3: figures[:, 1, :3] = 0
        if not goes: figures[1, 0, 2] = np.inf
        for micro in figures: seen(*(Tensor(each).realize() for each in micro))
        ended(Tensor([goes]).realize())
        if goes:
            history[0] = figures[..., :3].max(0)
            history, scale = updated(how, history, scale)
        assert state.history is not None
        assert state.scale is not None
        np.testing.assert_array_equal(state.history.numpy(), history)
        np.testing.assert_array_equal(state.scale.numpy(), scale)
        np.testing.assert_array_equal(state.last.numpy(), figures[..., 3:].sum((0, 1)).reshape(2, 3))


def test_counters_have_names():
    found = name_counters(np.arange(6.0).reshape(2, 3))
    assert found == {"fp8_clamped_activation": 0, "fp8_clamped_weight": 1, "fp8_clamped_gradient": 2,
                     "fp8_flushed_activation": 3, "fp8_flushed_weight": 4, "fp8_flushed_gradient": 5}


def test_blocks_have_no_state():
    state = Fp8State(Float8BlockScaling(), ("a",), "CPU")
    assert state.tensors() == {}
    assert (state.how.forward, state.how.backward, state.how.blocks) == ("e4m3", "e4m3", True)


def test_recipes():
    assert {name: each.weights for name, each in RECIPES.items()} == {
        "float32": dtypes.float32, "float16": dtypes.float16,
        **dict.fromkeys(("bfloat16", "bfloat16_sr", "fp8_delayed", "fp8_current", "fp8_block"),
                        dtypes.bfloat16)}
    assert str(RECIPES["bfloat16_sr"]) == "weights of bfloat16, rounded stochastically"
    assert "DelayedScaling hybrid" in str(RECIPES["fp8_delayed"])
    delayed = RECIPES["fp8_delayed"].fp8
    assert isinstance(delayed, DelayedScaling)
    assert (delayed.amax_history_len, delayed.amax_compute_algo, delayed.margin) == (1024, "max", 0)


@pytest.mark.parametrize(("name", "shape", "reason"), [
    ("lm_head", (512, 64), "logits"), ("model.layers.3.mlp.gate", (64, 64), "expert"),
    ("model.layers.3.mlp.experts.0.up_proj", (64, 64), "grouped"), ("model.norm", (64, 64), "statistics"),
    ("model.layers.0.mlp.down_proj", (64, 64), "excluded by model.layers.0.*"),
    ("model.layers.1.self_attn.o_proj", (64, 64), "excluded by *.o_proj"),
    ("model.layers.1.mlp.up_proj", (64, 40), "64 x 40"), ("model.layers.1.mlp.gate_proj", (64, 64), None),
    ("model.layers.10.mlp.down_proj", (64, 64), None)])
def test_what_stays_in_high_precision(name: str, shape: tuple[int, int], reason: str | None):
    found = HighPrecision(("model.layers.0.*", "*.o_proj")).why(name, shape)
    assert found is None if reason is None else reason in str(found)


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
