"""Learning rates of steps, against transformers' own."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from tinygrad_nv.train.optimizers import SCHEDULES, ScheduleOptions, schedule

STEPS = 40


def theirs(name: str, warmup: int, **more: Any) -> list[float]:
    """Transformers' factors: the learning rate is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    made = get_scheduler(name, optimizer, warmup, STEPS, more or None)
    found = []
    for _ in range(STEPS + 3):
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
    made = schedule(name, STEPS, warmup, ScheduleOptions(**options))
    assert [made(step) for step in range(STEPS + 3)] == pytest.approx(theirs(name, warmup, **more), abs=1e-15)


def test_every_schedule_is_compared():
    assert set(SCHEDULES) == {"constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr",
                              "warmup_stable_decay"}
