"""Short causal convolutions over sequences with windows in pages, on the emulated GPU, checks on, and on this
processor: against the convolution in float64, token by token."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.reference_case import UNIT, Given, require_same_bits, run, storages
from tests.support.tile.sequences_case import (
    PAGES,
    ROWS,
    SINGLE,
    TOKENS,
    Row,
    follow,
    read_inputs,
    require_reference,
    tokens_of,
)
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.causal_conv.spec import CausalConvSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
TARGETS = (GPU("sm_80", 108), GPU("sm_90a", 132), host())


def spec_of(rows: tuple[Row, ...], channels: int = 40, taps: int = 4, dtype: Any = F32,
            **more: Any) -> CausalConvSpec:
    """Channels of a wider projection."""
    tokens = len(rows) if rows is SINGLE else TOKENS
    return CausalConvSpec(tokens, len(rows), channels, taps, PAGES, dtype, channels + 8, 8,
                          single=rows is SINGLE, **more)


def given_of(spec: CausalConvSpec, rows: tuple[Row, ...]) -> Given:
    return storages(spec) | {"sequences": torch.tensor(rows, dtype=torch.int32).flatten()}


def convolve(spec: CausalConvSpec, given: Given, rows: tuple[Row, ...]) -> tuple[np.ndarray, np.ndarray]:
    """out and windows in float64."""
    x, out = read_inputs(spec, given), np.zeros((spec.tokens, spec.channels))

    def step(window: np.ndarray, t: int) -> np.ndarray:
        columns = np.concatenate([window, x["x"][t:t + 1]])
        made = (columns * x["weight"].T).sum(0) + x.get("bias", 0.0)
        out[t] = made / (1 + np.exp(-made)) if spec.silu else made
        return columns[1:]
    return out, follow(rows, x["windows"], step)


# programs that have other chunks run while the window is replaced from which the first tokens read
IN_PLACE: tuple[Row, ...] = ((0, 61, 3, 48, 6, 3),)
SPECS = {
    "in place": (IN_PLACE, {"silu": True}), "more taps than a chunk has tokens": (IN_PLACE, {"taps": 19}),
    "4 taps": (ROWS, {"silu": True}), "2 taps": (ROWS, {"taps": 2, "bias": True}),
    "3 taps, bf16": (ROWS, {"taps": 3, "dtype": BF16, "silu": True, "bias": True}),
    "f16, odd": (ROWS, {"channels": 13, "dtype": F16}),
    "one token each": (SINGLE, {"silu": True}), "one token each, bf16": (SINGLE, {"taps": 3, "dtype": BF16})}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS, ids=lambda one: one.instructions)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str, target: GPU | CPU):
    rows, more = SPECS[name]
    spec = spec_of(rows, **more)
    given, schedule = given_of(spec, rows), TABLE.choose(spec, target)
    got = run(spec, schedule, target, given)
    out, windows = convolve(spec, given, rows)
    tokens = tokens_of(rows)
    # five products and sums of size 4, and silu's exponential
    np.testing.assert_allclose(got["out"].numpy()[tokens], out[tokens], rtol=UNIT[spec.dtype], atol=8e-6)
    assert np.array_equal(got["windows"].numpy(), windows)
    require_same_bits(spec, schedule, target, given, got)


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_is_the_convolution(name: str):
    rows, more = SPECS[name]
    spec = spec_of(rows, **more)
    given = given_of(spec, rows)
    require_reference(spec, given, rows, *convolve(spec, given, rows))


def test_specs_that_cannot_be():
    with pytest.raises(SpecError, match="1 taps"): spec_of(ROWS, taps=1)
    with pytest.raises(SpecError, match="channels=0"): spec_of(ROWS, channels=0)
