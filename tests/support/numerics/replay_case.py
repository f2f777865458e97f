"""Functions that tests record, which a replay finds by their names."""
from __future__ import annotations

import random

import numpy as np
from tinygrad import Tensor, TinyJit

from tinygrad_nv import layer

WEIGHT = np.random.default_rng(7).standard_normal((64, 48)).astype(np.float32)
held = {"weight": Tensor(WEIGHT).realize()}


def step(x: Tensor, scale: float = 1.0) -> Tensor:
    """Two layers."""
    with layer("blocks.0"): h = (x @ held["weight"]).relu().contiguous()
    with layer("blocks.1"): return (h * scale).softmax()


def drawn(count: int) -> dict[str, object]:
    """By all generators."""
    return {"tinygrad": Tensor.rand(count) * 1, "numpy": Tensor(np.random.rand(count)) + 0,
            "python": Tensor([random.random() for _ in range(count)]) + 0}


@TinyJit
def captured(x: Tensor) -> Tensor: return ((x @ held["weight"]).relu() + 1).realize()


def counted(count: int) -> int:
    """No Tensor."""
    return int(Tensor.arange(count).sum().item())


calls = [0]


def forgetful(x: Tensor) -> Tensor:
    """Another kernel at each call."""
    calls[0] += 1
    return x.exp() if calls[0] % 2 else x.log()
