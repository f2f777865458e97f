"""What all rules share: groups, state by name, steps that are skipped, precision, sums, averages."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import dtypes

from tests.support.train.optimizer_case import gradients, numbers, parameters, ran
from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.errors import ConfigError, WeightError
from tinygrad_nv.train.optimizers import (
    OPTIMIZERS,
    GradientSums,
    Optimizer,
    ParameterGroup,
    StateOptions,
    WeightAverage,
    adamw,
    decay_groups,
    decays,
    sgd,
)
from tinygrad_nv.train.optimizers.optimizer import round_to

BF16 = dtypes.bfloat16


def stepped(optimizer: Optimizer, first: int, count: int) -> None:
    for i in range(first, first + count):
        Tensor.realize(*optimizer.schedule_step({name: Tensor(x) for name, x in gradients(i).items()}))


def test_what_decays():
    held = parameters()
    assert [name for name in held if decays(name, held[name])] == ["layers.0.up.weight",
                                                                   "layers.0.down.weight"]
    assert [group.weight_decay for group in decay_groups(held, 0.1)] == [0.1, 0.0]


def test_a_group_with_a_learning_rate_of_its_own():
    held = parameters()
    names = list(held)
    groups = [ParameterGroup(tuple(names[:2]), lr_scale=0.0), ParameterGroup(tuple(names[2:]))]
    stepped(sgd(held, 0.1, groups=groups), 0, 1)
    before, given = numbers(1), gradients(0)
    for name in names[:2]: np.testing.assert_array_equal(held[name].numpy(), before[name])
    for name in names[2:]:
        np.testing.assert_allclose(held[name].numpy(), before[name] - 0.1 * given[name], rtol=1e-6, atol=1e-7)


# **** state ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_a_resumed_run_has_the_same_bits(name: str, dtype: Any):
    def make() -> tuple[dict[str, Tensor], Optimizer]:
        held = parameters(dtype=dtype)
        return held, OPTIMIZERS[name](held, 1e-2, options=StateOptions(master=name != "lion"))
    whole, straight = make()
    stepped(straight, 0, 4)
    first, before = make()
    stepped(before, 0, 2)
    saved = {key: Tensor(x.numpy()) if x.dtype != BF16 else x for key, x in before.state_dict().items()}
    weights = {key: x.clone().realize() for key, x in first.items()}
    second, after = make()
    after.load_state_dict(saved)
    Tensor.realize(*(second[key].assign(x) for key, x in weights.items()))
    stepped(after, 2, 2)
    for key, x in whole.items(): np.testing.assert_array_equal(second[key].float().numpy(), x.float().numpy())
    for key, x in straight.state_dict().items():
        np.testing.assert_array_equal(after.state_dict()[key].numpy(), x.numpy(), err_msg=key)


def test_names_of_the_state():
    optimizer = adamw(parameters(dtype=BF16), 1e-3)
    found = optimizer.state_dict()
    for slot in ("exp_avg", "exp_avg_sq", "fp32_master"):
        assert found[f"state.layers.0.up.weight.{slot}"].shape == (33, 20)
    assert {"step", "skipped", "seed", "lr"} <= found.keys()
    count = sum(x.size for x in numbers(1).values())
    assert optimizer.state.nbytes == 12 * count + 16
    assert "state.layers.0.up.weight.fp32_master" not in adamw(parameters(), 1e-3).state_dict()


def test_a_state_that_does_not_fit():
    optimizer = adamw(parameters(), 1e-3)
    given = optimizer.state_dict()
    with pytest.raises(WeightError, match=r"without state\.embed_tokens.weight.exp_avg "):
        optimizer.load_state_dict({key: x for key, x in given.items()
                                   if key != "state.embed_tokens.weight.exp_avg"})
    with pytest.raises(WeightError, match="step is float"):
        optimizer.load_state_dict({**given, "step": Tensor([1.0])})


# **** numbers that are not finite ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_a_poisoned_gradient_changes_nothing(wrong: float):
    held = parameters()
    optimizer = adamw(held, 1e-2, options=StateOptions(max_grad_norm=1.0))

    @TinyJit
    def step(*given: Tensor) -> None:
        Tensor.realize(*optimizer.schedule_step(dict(zip(held, given, strict=True))))

    def given(i: int, poison: bool) -> list[Tensor]:
        made = gradients(i)
        if poison: made["layers.0.up.bias"][7] = wrong
        return [Tensor(x).realize() for x in made.values()]

    def everything() -> list[bytes]:
        kept = {key: x for key, x in optimizer.state_dict().items() if key != "skipped"}
        return [x.numpy().tobytes() for x in (*held.values(), *kept.values())]
    for i in range(3): step(*given(i, False))
    before = everything()
    step(*given(3, True))
    assert everything() == before
    assert (optimizer.steps.item(), optimizer.skipped.item()) == (3, 1)
    assert not np.isfinite(optimizer.grad_norm.item())
    step(*given(4, False))
    assert everything() != before
    assert (optimizer.steps.item(), optimizer.skipped.item()) == (4, 1)


def test_a_loss_scale_is_taken_out():
    def moved(scale: float) -> list[np.ndarray]:
        held = parameters()
        optimizer = adamw(held, 1e-2, options=StateOptions(max_grad_norm=1.0))
        given = {name: Tensor(x * np.float32(scale)) for name, x in gradients(0).items()}
        Tensor.realize(*optimizer.schedule_step(given, Tensor([1 / scale])))
        return [x.numpy() for x in (*held.values(), optimizer.grad_norm)]
    for a, b in zip(moved(1.0), moved(1024.0), strict=True): np.testing.assert_array_equal(a, b)


# **** 16 bits ****

@pytest.mark.slow
def test_master_weights_move_where_bfloat16_would_not():
    found, optimizer = ran(lambda held: sgd(held, 1e-4), 20, dtype=BF16)
    master = {name: optimizer.state.parameters[name].master for name in found}
    assert all(x is not None for x in master.values())
    for name, x in numbers(1).items():
        start = Tensor(x).cast(BF16).float().numpy()
        want = start - 1e-4 * sum(gradients(i)[name].astype(np.float64) for i in range(20))
        there = master[name]
        assert there is not None
        np.testing.assert_allclose(there.numpy(), want, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found[name], there.cast(BF16).float().numpy())


def test_stochastic_rounding_is_right_on_average():
    """Of 1 + x ulp: up in x of all cases; the same bits for the same seed and step."""
    count = 1 << 14
    seed, step = Tensor([5, 7], dtype=dtypes.uint32), Tensor([3], dtype=dtypes.int32)
    for part in (0.0, 0.1, 0.5, 0.9):
        x = Tensor.full((count,), 1 + part / 128)
        made = round_to(x, seed, step, 2).float().numpy()
        assert set(made.tolist()) <= {1.0, 1 + 2**-7}
        up = (made > 1).mean()
        assert abs(up - part) < 5 * np.sqrt(part * (1 - part) / count) + 2**-16, part
        np.testing.assert_array_equal(made, round_to(x, seed, step, 2).float().numpy())
    others = [round_to(x, seed, step + 1, 2), round_to(x, seed, step, 3), round_to(x, seed + 1, step, 2)]
    assert all((other.float().numpy() != made).any() for other in others)


def test_rounding_keeps_what_is_no_number():
    seed, step = Tensor([5, 7], dtype=dtypes.uint32), Tensor([3], dtype=dtypes.int32)
    x = Tensor([np.inf, -np.inf, np.nan, 0.0, -1.0, 3.0])
    np.testing.assert_array_equal(round_to(x, seed, step, 0).float().numpy(), x.numpy())


@pytest.mark.slow
def test_bfloat16_without_master_weights_moves_on_average():
    """By steps below half an ulp."""
    x = Tensor.full((1 << 14,), 1.0, dtype=BF16).contiguous().realize()
    optimizer = sgd({"x": x}, 2.0**-12, options=StateOptions(master=False, seed=9))
    for _ in range(8): Tensor.realize(*optimizer.schedule_step({"x": Tensor.full(x.shape, -1.0)}))
    assert optimizer.state.nbytes == 16
    assert x.float().mean().item() == pytest.approx(1 + 8 * 2.0**-12, abs=3e-4)


# **** sums and averages ****

@pytest.mark.slow
def test_sums_over_micro_batches():
    """Two micro-batches are one step with their mean, twice."""
    held = parameters()
    optimizer, sums = sgd(held, 0.1, momentum=0.9), GradientSums(held)
    for start in (0, 2):
        for i in (start, start + 1):
            for name, x in gradients(i).items(): held[name].grad = Tensor(x)
            Tensor.realize(*sums.schedule_add(0.5))
            assert all(x.grad is None for x in held.values())
        Tensor.realize(*optimizer.schedule_step(sums.gradients), *sums.schedule_zero())
        assert all(not x.numpy().any() for x in sums.gradients.values())
    plain = parameters()
    other = sgd(plain, 0.1, momentum=0.9)
    for start in (0, 2):
        mean = {name: (x + gradients(start + 1)[name]) / 2 for name, x in gradients(start).items()}
        Tensor.realize(*other.schedule_step({name: Tensor(x) for name, x in mean.items()}))
    for name, x in plain.items():
        np.testing.assert_allclose(held[name].numpy(), x.numpy(), rtol=1e-6, atol=1e-7)


def test_an_average_of_weights():
    held = parameters(dtype=BF16)
    average = WeightAverage(held, 0.75)
    optimizer = sgd(held, 0.1)
    want = {name: x.float().numpy().astype(np.float64) for name, x in held.items()}
    for i in range(3):
        stepped(optimizer, i, 1)
        Tensor.realize(*average.schedule_update())
        for name, x in held.items(): want[name] += 0.25 * (x.float().numpy() - want[name])
    for name, x in want.items():
        np.testing.assert_allclose(average.tensors[name].numpy(), x, rtol=1e-6, atol=1e-6)


# **** training ****

def test_a_loss_is_minimised():
    """The calls of a training step: backward, step, zero_grad."""
    held = {"w": Tensor(numbers(1)["layers.0.up.weight"]).contiguous().realize()}
    optimizer = adamw(held, 0.05, weight_decay=0.0)

    @TinyJit
    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (held["w"] - 3).square().mean().backward()
        return loss.realize(*optimizer.schedule_step())
    losses = [step().item() for _ in range(120)]
    assert losses[-1] < losses[0] / 20
    assert optimizer.params == [held["w"]]


def test_a_parameter_without_a_gradient():
    held = parameters()
    with pytest.raises(ConfigError, match=r"layers\.0\.up.weight has no gradient"): adamw(held, 1e-3).step()
