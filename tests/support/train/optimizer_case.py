"""Optimisers beside torch's on the same gradients.

Protocol. `ran(make, steps)` takes captured steps of an optimiser of ours over `parameters()`;
`torch_ran(make, steps, dtype)` does the same with one of torch's. `near(found, torch32,
torch64)` holds ours against torch in float64: no weight may be further off than C times the furthest of torch
in float32, and ULPS of its own size.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.train.optimizers import Optimizer

SHAPES = {"layers.0.up.weight": (33, 20), "layers.0.down.weight": (20, 36), "layers.0.norm.weight": (20,),
          "layers.0.up.bias": (33,), "embed_tokens.weight": (40, 20)}
STEPS, C, ULPS = 25, 2.0, 4 * 2.0**-24
Weights = dict[str, np.ndarray]
Make = Callable[[dict[str, Tensor]], Optimizer]
TorchMake = Callable[[dict[str, torch.Tensor]], Iterable[torch.optim.Optimizer]]


def numbers(seed: int, scale: float = 1.0) -> Weights:
    """Normal numbers of each parameter, float32."""
    random = np.random.default_rng(seed)
    return {name: (scale * random.standard_normal(shape)).astype(np.float32)
            for name, shape in SHAPES.items()}


def gradients(step: int) -> Weights:
    """The gradients of a step, of sizes from step to step that differ."""
    return numbers(100 + step, 0.1 * (1 + step % 3))


def parameters(device: str = "CPU", dtype: Any = None) -> dict[str, Tensor]:
    """Parameters on a device."""
    made = {name: Tensor(x, device=device) for name, x in numbers(1).items()}
    made = {name: (x if dtype is None else x.cast(dtype)).contiguous() for name, x in made.items()}
    Tensor.realize(*made.values())
    return made


def ran(make: Make, steps: int = STEPS, lr: Callable[[int], float] | None = None, device: str = "CPU",
        dtype: Any = None) -> tuple[Weights, Optimizer]:
    """Weights after captured steps, and the optimiser."""
    held = parameters(device, dtype)
    optimizer = make(held)

    @TinyJit
    def step(*given: Tensor) -> None:
        Tensor.realize(*optimizer.schedule_step(dict(zip(held, given, strict=True))))
    for i in range(steps):
        if lr is not None: optimizer.set_lr(lr(i))
        step(*(Tensor(x, device=device).realize() for x in gradients(i).values()))
    return {name: x.float().numpy() for name, x in held.items()}, optimizer


def torch_ran(make: TorchMake, steps: int = STEPS, dtype: torch.dtype = torch.float64,
              clip: float | None = None) -> Weights:
    """Weights after torch's steps in a dtype."""
    held = {name: torch.nn.Parameter(torch.from_numpy(x).to(dtype)) for name, x in numbers(1).items()}
    optimizers = list(make(held))
    for i in range(steps):
        for name, x in gradients(i).items(): held[name].grad = torch.from_numpy(x).to(dtype)
        if clip is not None: torch.nn.utils.clip_grad_norm_(held.values(), clip)
        for each in optimizers: each.step()
    return {name: x.detach().double().numpy() for name, x in held.items()}


def near(found: Weights, usual: Weights, exact: Weights, c: float = C) -> None:
    """Asserts the bound."""
    error = max(np.abs(usual[name] - exact[name]).max() for name in exact)
    for name, true in exact.items():
        off = np.abs(found[name].astype(np.float64) - true) - c * error - ULPS * np.abs(true)
        assert off.max() <= 0, f"{name}: {off.max():g} above the bound; torch in float32 is {error:g} off"


def decayed(held: dict[str, torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Torch's groups as `decay_groups` has them, written down by hand."""
    return [{"params": [x for name, x in held.items() if name.startswith("layers") and x.ndim == 2],
             "weight_decay": weight_decay},
            {"params": [x for name, x in held.items() if not name.startswith("layers") or x.ndim == 1],
             "weight_decay": 0.0}]
