"""A decode step over a paged cache in plain tinygrad, as the tests of graph pools run it."""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinygrad_nv import Device, Tensor, dtypes
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.emulated import driver as emulated
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

PAGES, PAGE, WIDTH, VOCAB, HELD = 8, 2, 8, 16, 2    # pages, slots of one, its width, tokens, pages of a row
SCRAP = PAGES                                       # the page after the last
PAD_TOKEN = 0

INPUTS = {"tokens": Input((), dtypes.int32, PAD_TOKEN), "tables": Input((HELD,), dtypes.int32, SCRAP),
          "lengths": Input((), dtypes.int32, 0)}


class Paged:
    """Embeds a token, puts its key where the row's length says, attends to the row's pages. State is integers
    in float32, so that what is not attended to shows as another value, not as rounding."""

    def __init__(self, device: str, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        def state(*shape: int) -> Tensor:
            values = random.integers(-3, 4, shape).astype(np.float32)
            return Tensor(values, device=device).realize()
        self.embedding, self.weight = state(VOCAB, WIDTH), state(WIDTH, WIDTH)
        self.cache = state(PAGES + 1, PAGE, WIDTH)

    def __call__(self, tokens: Tensor, tables: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        key = (self.embedding[tokens] @ self.weight).contiguous()
        page = tables.gather(1, (lengths // PAGE).reshape(-1, 1)).reshape(-1)
        self.cache[page, lengths % PAGE] = key
        self.cache.realize()
        seen = self.cache[tables].reshape(tables.shape[0], HELD * PAGE, WIDTH)
        masked = Tensor.arange(HELD * PAGE).reshape(1, -1) > lengths.reshape(-1, 1)
        scores = masked.where(-1e9, (seen * key.reshape(-1, 1, WIDTH)).sum(-1) * 0.125).contiguous()
        mixed = (scores.softmax(-1).contiguous().reshape(-1, HELD * PAGE, 1)
                 * masked.reshape(-1, HELD * PAGE, 1).where(0, seen)).sum(1)
        return {"mixed": mixed, "next": scores.argmax(-1).cast(dtypes.int32)}


def batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Rows that share no page."""
    random = np.random.default_rng(seed)
    return {"tokens": random.integers(1, VOCAB, rows).astype(np.int32),
            "tables": random.permutation(PAGES)[:rows * HELD].reshape(rows, HELD).astype(np.int32),
            "lengths": random.integers(0, HELD * PAGE, rows).astype(np.int32)}


def padded(given: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """As many rows as the size has."""
    made = {}
    for name, value in given.items():
        made[name] = np.full((size, *value.shape[1:]), INPUTS[name].pad, value.dtype)
        made[name][:len(value)] = value
    return made


def eager(step: Any, given: dict[str, np.ndarray], size: int, device: str) -> dict[str, np.ndarray]:
    """What the step gives without a pool on rows filled up to `size`, cut to those that are alive."""
    rows = len(next(iter(given.values())))
    tensors = {name: Tensor(value, device=device).realize() for name, value in padded(given, size).items()}
    return {name: out.numpy()[:rows] for name, out in step(**tensors).items()}


def same(found: dict[str, Tensor], wanted: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    for name, value in wanted.items(): np.testing.assert_array_equal(found[name].numpy(), value)


_numbers = itertools.count(100)    # no number that a test names


def device(make: Callable[[str, bool], EmulatedDriver] = EmulatedDriver, arch: str = "sm_90a") -> NVDevice:
    """A device of tinygrad over a driver of its own, open for good under a name of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "EmulatedDriver", make)
        patch.setenv("EMU_ARCH", arch)
        opened = Device[f"EMU:{next(_numbers)}"]
    assert isinstance(opened, NVDevice)
    return opened


def pool_of(step: Any, sizes: tuple[int, ...] = (1, 2, 4), **more: Any) -> GraphPool:
    """A pool of the paged step."""
    return GraphPool(step, INPUTS, sizes, **more)
