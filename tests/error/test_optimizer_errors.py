"""What an optimiser refuses, in words."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv import Tensor
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.optimizers import (
    ParameterGroup,
    ScheduleOptions,
    StateOptions,
    WeightAverage,
    adafactor,
    adamw,
    lion,
    muon,
    schedule,
    sgd,
)


def held(dtype: Any = dtypes.float32) -> dict[str, Tensor]:
    return {"a.weight": Tensor.zeros(4, 4, dtype=dtype).contiguous(), "a.bias": Tensor.zeros(4).contiguous()}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: adamw({}), "an optimizer without parameters"),
    (lambda: adamw(held(), -1.0), "learning rate -1.0"),
    (lambda: adamw(held(), betas=(0.9, 1.0)), r"betas \(0.9, 1.0\)"),
    (lambda: lion(held(), betas=(-0.1, 0.9)), "betas"),
    (lambda: adamw(held(dtypes.int32)), "a.weight of int"),
    (lambda: adamw(held(dtypes.float16), options=StateOptions(master=False)),
     "a.weight of half without master weights|a.weight of float16 without master weights"),
    (lambda: adamw(held(), groups=[ParameterGroup(("a.weight",))]), "a.bias in no parameter group"),
    (lambda: adamw(held(), groups=[ParameterGroup(("b",))]), "a parameter group with 'b'"),
    (lambda: adamw(held(), groups=[ParameterGroup(("a.bias",)), ParameterGroup(("a.bias", "a.weight"))]),
     "a.bias in two parameter groups"),
    (lambda: adamw(held(), weight_decay=-0.1), "weight decay -0.1"),
    (lambda: adamw(held(), options=StateOptions(rows={"b": (1,)})), "rows of 'b'"),
    (lambda: muon(held(), options=StateOptions(rows={"a.weight": (1, 2)})), "rows 1, 2 of a.weight"),
    (lambda: StateOptions(max_grad_norm=0.0), "max_grad_norm 0.0"),
    (lambda: StateOptions(bits=4), "state of 4 bits"),
    (lambda: StateOptions(bits=8, paged=True), "paged state of 8 bits"),
    (lambda: StateOptions(seed=-1), "seed -1"),
    (lambda: sgd(held(), momentum=-1.0), "momentum -1.0"),
    (lambda: sgd(held(), nesterov=True), "nesterov without momentum"),
    (lambda: adafactor(held(), beta2_decay=0.1), "beta2_decay 0.1"),
    (lambda: adafactor(held(), d=0.5), "d 0.5"),
    (lambda: muon(held(), ns_steps=0), "0 steps of Newton-Schulz"),
    (lambda: muon(held(), adjust_lr="none"), "adjust_lr 'none'"),
    (lambda: muon(held(), dtype=dtypes.float16), "Newton-Schulz in"),
    (lambda: WeightAverage(held(), 1.0), "a decay of 1.0"),
    (lambda: schedule("cosin", 10), "lr_scheduler_type 'cosin'"),
    (lambda: schedule("linear", 0), "0 warm-up steps of 0"),
    (lambda: schedule("cosine_with_min_lr", 9, 0, ScheduleOptions(min_lr_rate=2)), "min_lr_rate 2"),
    (lambda: schedule("warmup_stable_decay", 9, 5, ScheduleOptions(decay_steps=5)),
     "5 steps of warm-up and 5 of decay in 9"),
    (lambda: schedule("warmup_stable_decay", 9, 0, ScheduleOptions(decay_type="sqrt")), "a curve 'sqrt'"),
])
def test_words(make: Callable[[], Any], words: str):
    with pytest.raises(ConfigError, match=words): make()
