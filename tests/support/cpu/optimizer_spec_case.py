"""Specs of updates and of sums of squares, and storages with numbers that a step has."""
from __future__ import annotations

from typing import Any

import torch
from tinygrad import dtypes

from tests.support.tile.reference_case import storages
from tinygrad_nv.tile.optimizer.spec import CHUNK, AdamWSpec, SquaresSpec

BF16, F16 = dtypes.bfloat16, dtypes.float16
COUNTS = (3, 2 * CHUNK + 37, 64, CHUNK)
ADAMW: dict[str, Any] = {"counts": COUNTS, "groups": (1, 0, 0, 1), "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
SPECS: dict[str, AdamWSpec | SquaresSpec] = {
    "f32": AdamWSpec(**ADAMW), "f32, gradients bf16": AdamWSpec(**ADAMW, grad=BF16),
    "bf16 with masters": AdamWSpec(**ADAMW, dtype=BF16, grad=BF16),
    "f16 with masters": AdamWSpec(**ADAMW, dtype=F16),
    "squares": SquaresSpec(COUNTS), "squares bf16": SquaresSpec(COUNTS, BF16),
    "one element": AdamWSpec((1,), (0,), 0.9, 0.999, 1e-8)}


def given_of(spec: AdamWSpec | SquaresSpec) -> dict[str, torch.Tensor]:
    """Random numbers; second moments are not negative, and control is that of a tenth step."""
    given = storages(spec, seed=4)
    for name, x in given.items():
        if name[0] == "v": x.abs_()
    if "control" in given:
        given["control"][:3] = torch.tensor([1.0, 0.5, (1 - 0.95**10)**-0.5])
        for i in range(3, len(given["control"]), 2):
            given["control"][i:i + 2] = torch.tensor([0.99, 0.01 * i])
    return given
