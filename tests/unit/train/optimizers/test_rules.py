"""Update rules over captured steps, held to torch.optim; Lion to the paper's formula in float64. State of
8 bits: the map, the nearest code, and steps beside those with state of 32 bits. Learning rates of steps,
against transformers' own."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import dtypes
from transformers import get_scheduler

from tests.support.train.optimizer_case import STEPS, decayed, gradients, near, numbers, ran, torch_ran
from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.train.optimizers import (
    SCHEDULES,
    Optimizer,
    ScheduleOptions,
    StateOptions,
    adafactor,
    adamw,
    lion,
    muon,
    schedule,
    sgd,
)
from tinygrad_nv.train.optimizers.state import BLOCK, BlockwiseSlot, dynamic_map

LR, DECAY = 3e-3, 0.1
CASES: dict[str, tuple[Callable[[Any], Optimizer], Callable[[Any], Iterable[torch.optim.Optimizer]]]] = {
    "adamw": (lambda held: adamw(held, LR, (0.9, 0.95), weight_decay=DECAY),
              lambda held: [torch.optim.AdamW(decayed(held, DECAY), LR, (0.9, 0.95))]),
    "adamw as torch has it": (lambda held: adamw(held, LR, weight_decay=0.0),
                              lambda held: [torch.optim.AdamW(held.values(), LR, weight_decay=0.0)]),
    "sgd": (lambda held: sgd(held, LR), lambda held: [torch.optim.SGD(held.values(), LR)]),
    "momentum": (lambda held: sgd(held, LR, 0.9, weight_decay=DECAY),
                 lambda held: [torch.optim.SGD(decayed(held, DECAY), LR, 0.9)]),
    "nesterov": (lambda held: sgd(held, LR, 0.9, True),
                 lambda held: [torch.optim.SGD(held.values(), LR, 0.9, nesterov=True)]),
    "adafactor": (lambda held: adafactor(held, 0.03, weight_decay=DECAY),
                  lambda held: [torch.optim.Adafactor(decayed(held, DECAY), 0.03)]),
}


@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str):
    ours, theirs = CASES[name]
    found, optimizer = ran(ours)
    # torch.optim.Adafactor takes its epsilon from the dtype: float64's is another
    wide = torch.float32 if name == "adafactor" else torch.float64
    exact, usual = (torch_ran(theirs, dtype=dtype) for dtype in (wide, torch.float32))
    if name == "adafactor":
        for key, true in exact.items(): np.testing.assert_allclose(found[key], true, rtol=2e-5, atol=2e-6)
    else: near(found, usual, exact)
    assert optimizer.steps.tolist() == [STEPS]


def test_a_learning_rate_that_changes():
    """Without another capture."""
    def lr(step: int) -> float: return LR * (1 + step) / STEPS

    def theirs(held: Any) -> Iterable[torch.optim.Optimizer]:
        made = torch.optim.AdamW(held.values(), LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: (1 + step) / STEPS)
        made.register_step_post_hook(lambda *_: schedule.step())
        return [made]
    found, _ = ran(lambda held: adamw(held, LR, weight_decay=0.0), lr=lr)
    near(found, *(torch_ran(theirs, dtype=dtype) for dtype in (torch.float32, torch.float64)))


def test_clipping_as_torch():
    found, optimizer = ran(lambda held: adamw(held, LR, weight_decay=0.0,
                                              options=StateOptions(max_grad_norm=1.0)))
    usual, exact = (torch_ran(CASES["adamw as torch has it"][1], dtype=dtype, clip=1.0)
                    for dtype in (torch.float32, torch.float64))
    near(found, usual, exact)
    norm = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in gradients(STEPS - 1).values()))
    assert norm > 2
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-6)


def test_lion():
    found, _ = ran(lambda held: lion(held, LR, (0.9, 0.99), weight_decay=DECAY))
    held = {name: x.astype(np.float64) for name, x in numbers(1).items()}
    moments = {name: 0 * x for name, x in held.items()}
    for i in range(STEPS):
        for name, g in gradients(i).items():
            decay = DECAY if name.startswith("layers") and g.ndim == 2 else 0
            direction = np.sign(0.9 * moments[name] + 0.1 * g)
            held[name] = held[name] * (1 - LR * decay) - LR * direction
            moments[name] = 0.99 * moments[name] + 0.01 * g
    for name, true in held.items(): np.testing.assert_allclose(found[name], true, rtol=0, atol=STEPS * 2e-7)


# **** Muon ****

def torch_muon(adjust: str) -> Callable[[Any], Iterable[torch.optim.Optimizer]]:
    def made(held: Any) -> Iterable[torch.optim.Optimizer]:
        hidden = [x for name, x in held.items() if name.startswith("layers") and x.ndim == 2]
        others = [x for name, x in held.items() if not any(x is one for one in hidden)]
        return [torch.optim.Muon(hidden, LR, weight_decay=DECAY, adjust_lr_fn=adjust),
                torch.optim.AdamW(others, LR, weight_decay=0.0)]
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_in_float32(adjust: Any, monkeypatch: pytest.MonkeyPatch):
    """Torch's own iteration, whose only rounding to bfloat16 is left out."""
    found, _ = ran(lambda held: muon(held, LR, weight_decay=DECAY, adjust_lr=adjust, dtype=dtypes.float32))
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    usual, exact = (torch_ran(torch_muon(adjust), dtype=dtype) for dtype in (torch.float32, torch.float64))
    near(found, usual, exact)


@pytest.mark.slow
def test_muon_in_bfloat16(monkeypatch: pytest.MonkeyPatch):
    """Of the matrices no further from float64, by the root of the mean square, than 1.5 times what torch
    is: the largest of so many errors is a matter of chance."""
    found, _ = ran(lambda held: muon(held, LR, weight_decay=DECAY, adjust_lr="original"))
    usual = torch_ran(torch_muon("original"), dtype=torch.float32)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    exact = torch_ran(torch_muon("original"))
    ours, theirs = (sum(np.square(x[name] - exact[name]).sum() for name in exact if "weight" in name)
                    for x in (found, usual))
    assert np.sqrt(ours) <= 1.5 * np.sqrt(theirs)


@pytest.mark.slow
def test_projections_are_orthogonalised_each_by_itself():
    """A stacked matrix moves as its projections would alone."""
    random = np.random.default_rng(3)
    whole, change = (random.standard_normal((40, 24)).astype(np.float32) for _ in range(2))
    rows = (24, 8, 8)

    def moved(weights: dict[str, np.ndarray], given: dict[str, np.ndarray], **more: Any) -> list[np.ndarray]:
        held = {name: Tensor(x).contiguous().realize() for name, x in weights.items()}
        optimizer = muon(held, LR, dtype=dtypes.float32, options=StateOptions(**more))
        Tensor.realize(*optimizer.schedule_step({name: Tensor(x) for name, x in given.items()}))
        return [x.numpy() for x in held.values()]
    (stacked,) = moved({"qkv": whole}, {"qkv": change}, rows={"qkv": rows})
    cut = np.cumsum(rows)[:-1]
    apart = moved(*({f"p{i}": x for i, x in enumerate(np.split(each, cut))} for each in (whole, change)))
    np.testing.assert_allclose(stacked, np.concatenate(apart), rtol=1e-5, atol=1e-7)
    (together,) = moved({"qkv": whole}, {"qkv": change})
    assert np.abs(together - stacked).max() > 1e-4


def test_the_map():
    """As the paper builds it: 0, 1, and for 7 sizes of ten 2ⁱ middles of equal spans, of both signs."""
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert signed[-1] == unsigned[-1] == 1
    assert [(len(set(x.tolist())), x.min() >= 0) for x in (signed, unsigned)] == [(256, False), (256, True)]
    assert sorted(-x for x in signed if x not in (0, 1)) == pytest.approx([x for x in signed
                                                                         if x not in (0, 1)])
    positive = signed[signed > 0]
    counts = [int(((positive > 10.0**e) & (positive <= 10.0**(e + 1))).sum()) for e in range(-7, 0)]
    assert counts == [1, 2, 4, 8, 16, 32, 64 + 1]
    assert positive[0] == pytest.approx(0.55e-6)


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code(signed: bool):
    random = np.random.default_rng(0)
    x = (random.standard_normal(1000) * np.exp(4 * random.standard_normal(1000))).astype(np.float32)
    if not signed: x = np.abs(x)
    slot = BlockwiseSlot.zeros((1000,), "CPU", signed)
    np.testing.assert_array_equal(slot.read().numpy(), np.zeros(1000))
    np.testing.assert_array_equal(slot.write(Tensor(x), None).numpy(), x)
    found, numbers = slot.read().numpy(), dynamic_map(signed).astype(np.float64)
    for first in range(0, 1000, BLOCK):
        block = x[first:first + BLOCK].astype(np.float64)
        scale = np.abs(block).max()
        best = np.abs(block[:, None] / scale - numbers).min(1) * scale
        off = np.abs(found[first:first + BLOCK] - block)
        assert (off <= best + 2e-7 * scale).all()
    assert slot.codes.nbytes() + slot.scales.nbytes() == 1000 + 4 * 4


def test_steps():
    """Weights move as with 32 bits but for a few percent; small parameters have 32 bits; a captured step."""
    random = np.random.default_rng(1)
    start, target = (random.standard_normal((64, 80)).astype(np.float32) for _ in range(2))
    moved = {}
    for bits in (8, 32):
        held = {"w.weight": Tensor(start).contiguous(), "b.bias": Tensor.zeros(8).contiguous()}
        Tensor.realize(*held.values())
        optimizer = adamw(held, 1e-2, weight_decay=0.0, options=StateOptions(bits=bits))
        goal = Tensor(target).realize()

        @TinyJit
        def step(held: dict = held, optimizer: object = optimizer, goal: Tensor = goal) -> Tensor:
            optimizer.zero_grad()
            loss = ((held["w.weight"] - goal).square().sum() + held["b.bias"].sum()).backward()
            return loss.realize(*optimizer.schedule_step())
        for _ in range(25): step()
        moved[bits] = held["w.weight"].numpy() - start
        if bits == 8:
            names = optimizer.state_dict()
            assert {f"state.w.weight.exp_avg.{part}" for part in ("codes", "scales")} <= names.keys()
            assert "state.b.bias.exp_avg" in names
            assert optimizer.state.nbytes < 2.1 * 64 * 80 + 200
    off = np.linalg.norm(moved[8] - moved[32]) / np.linalg.norm(moved[32])
    assert 0 < off < 0.05, off


@pytest.mark.slow
def test_a_poisoned_gradient_changes_nothing():
    held = {"w.weight": Tensor.ones(64, 80).contiguous().realize()}
    optimizer = adamw(held, 1e-2, options=StateOptions(bits=8))
    for poison in (1.0, np.nan):
        before = [x.numpy().tobytes() for key, x in optimizer.state_dict().items() if key != "skipped"]
        Tensor.realize(*optimizer.schedule_step({"w.weight": Tensor.full((64, 80), poison)}))
    assert before == [x.numpy().tobytes() for key, x in optimizer.state_dict().items() if key != "skipped"]


LAST = 40


def theirs(name: str, warmup: int, **more: Any) -> list[float]:
    """Transformers' factors: the learning rate is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    made = get_scheduler(name, optimizer, warmup, LAST, more or None)
    found = []
    for _ in range(LAST + 3):
        found.append(made.get_last_lr()[0])
        optimizer.step()
        made.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("name", "options", "more"), [
    ("constant", {}, {}), ("constant_with_warmup", {}, {}), ("linear", {}, {}), ("cosine", {}, {}),
    ("cosine", {"num_cycles": 1.5}, {"num_cycles": 1.5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, {"min_lr_rate": 0.1}),
    ("warmup_stable_decay", {"decay_steps": 9}, {"num_decay_steps": 9}),
    ("warmup_stable_decay", {"decay_steps": 9, "decay_type": "1-sqrt", "warmup_type": "cosine",
                             "min_lr_rate": 0.2},
     {"num_decay_steps": 9, "decay_type": "1-sqrt", "warmup_type": "cosine", "min_lr_ratio": 0.2}),
    ("warmup_stable_decay", {"decay_steps": 9, "decay_type": "linear", "warmup_type": "1-sqrt"},
     {"num_decay_steps": 9, "decay_type": "linear", "warmup_type": "1-sqrt"})])
def test_as_transformers(name: str, warmup: int, options: dict[str, Any], more: dict[str, Any]):
    made = schedule(name, LAST, warmup, ScheduleOptions(**options))
    assert [made(step) for step in range(LAST + 3)] == pytest.approx(theirs(name, warmup, **more), abs=1e-15)


def test_every_schedule_is_compared():
    assert set(SCHEDULES) == {"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr",
                              "warmup_stable_decay"}
