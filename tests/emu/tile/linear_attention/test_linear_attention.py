"""Linear attention over sequences with states in pages, on the emulated GPU, checks on, and on this
processor: against the recurrence in float64, token by token; long sequences, chunks of any cut, and the
reference."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.reference_case import Given, require_same_bits, run, storages, view
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
from tinygrad_nv.tile.linear_attention.spec import Heads, LinearAttentionSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
TARGETS = (GPU("sm_80", 108), GPU("sm_90a", 132), host())
# a float32 sum of a chunk, of at most 64 + 64 terms of size 1, and what ex2.approx leaves; half a unit of the
# last place of 16-bit results
CLOSE, HALF = 2e-5, {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}


def spec_of(rows: tuple[Row, ...], dtype: Any = F32, heads: int = 2, key_heads: int = 1, d_k: int = 16,
            d_v: int = 24, **more: Any) -> LinearAttentionSpec:
    """Tokens of one projection q | k | v."""
    tokens = TOKENS if rows is ROWS else len(rows)
    width = 2 * key_heads * d_k + heads * d_v
    q, k, v = (Heads(dtype, width, d, at) for d, at in ((d_k, 0), (d_k, key_heads * d_k),
                                                        (d_v, 2 * key_heads * d_k)))
    return LinearAttentionSpec(tokens, len(rows), heads, key_heads, d_k, d_v, PAGES, q, k, v, 0.25,
                               single=rows is SINGLE, **more)


def given_of(spec: LinearAttentionSpec, rows: tuple[Row, ...], seed: int = 0) -> Given:
    """Decays below 0, rates of 0 to 1, keys of length 1 at most."""
    made = storages(spec, seed)
    random = torch.Generator().manual_seed(seed)
    made["decay"] = -0.3 * made["decay"].abs()
    if spec.delta: made["beta"] = torch.rand(made["beta"].shape, generator=random)
    keys = view(made["k"], next(each for each in TABLE.arguments(spec) if each.name == "k").places[0])
    keys /= keys.float().square().sum(-1, keepdim=True).sqrt().to(keys.dtype)
    made["sequences"] = torch.tensor(rows, dtype=torch.int32).flatten()
    return made


def recurrence(spec: LinearAttentionSpec, given: Given,
               rows: tuple[Row, ...]) -> tuple[np.ndarray, np.ndarray]:
    """out and states in float64."""
    x, shared = read_inputs(spec, given), spec.heads // spec.key_heads
    out = np.zeros((spec.tokens, spec.heads, spec.d_v))

    def step(state: np.ndarray, t: int) -> np.ndarray:
        made = state.copy()
        for h in range(spec.heads):
            key, query, left = x["k"][t, h // shared], x["q"][t, h // shared], np.exp(x["decay"][t, h])
            made[h] *= left[:, None] if spec.channels else left
            value = x["v"][t, h]
            if spec.delta: value = x["beta"][t, h] * (value - key @ made[h])
            made[h] += np.outer(key, value)
            out[t, h] = spec.scale * (query @ made[h])
        return made
    return out, follow(rows, x["states"], step)


def require_close(spec: LinearAttentionSpec, given: Given, rows: tuple[Row, ...],
                  got: dict[str, torch.Tensor], bound: float = CLOSE) -> None:
    """Results of tokens, and pages, those that no sequence has too."""
    out, states = recurrence(spec, given, rows)
    tokens = tokens_of(rows)
    half = HALF[spec.v.dtype]
    np.testing.assert_allclose(got["out"].numpy()[tokens], out[tokens], rtol=half, atol=bound * (1 + half))
    np.testing.assert_allclose(got["states"].numpy(), states, rtol=bound, atol=bound)


SPECS = {
    "delta rule": (ROWS, {}), "sums": (ROWS, {"delta": False, "heads": 4, "key_heads": 2}),
    "bf16": (ROWS, {"dtype": BF16}), "f16, odd": (ROWS, {"dtype": F16, "d_k": 20, "d_v": 7, "heads": 1}),
    "one token each": (SINGLE, {}), "one token each, bf16 sums": (SINGLE, {"dtype": BF16, "delta": False}),
    "one token each, channels": (SINGLE, {"channels": True, "key_heads": 2}),
    "channels": (ROWS, {"channels": True}),
    "channels of sums, odd": (ROWS, {"channels": True, "delta": False, "dtype": BF16, "d_k": 20, "d_v": 7})}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS, ids=lambda one: one.instructions)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str, target: GPU | CPU):
    rows, more = SPECS[name]
    spec = spec_of(rows, **more)
    given, schedule = given_of(spec, rows), TABLE.choose(spec, target)
    got = run(spec, schedule, target, given)
    require_close(spec, given, rows, got)
    require_same_bits(spec, schedule, target, given, got)


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_is_the_recurrence(name: str):
    rows, more = SPECS[name]
    spec = spec_of(rows, **more)
    given = given_of(spec, rows)
    require_reference(spec, given, rows, *recurrence(spec, given, rows), error=1e-12)


@pytest.mark.parametrize("delta", [True, False])
def test_thousands_of_tokens_do_not_drift(delta: bool):
    count = 4096
    spec = replace(spec_of(ROWS, heads=1, d_k=32, d_v=32, delta=delta), tokens=count, sequences=1)
    rows = ((0, count, -1, 0, -1, 0),)
    given = given_of(spec, rows)
    given["decay"] *= 0.01      # a token is remembered for hundreds
    got = run(spec, TABLE.choose(spec, host()), host(), given)
    # without the delta rule a state is a sum of hundreds of tokens
    require_close(spec, given, rows, got, bound=1e-4)


def test_decays_of_channels_that_leave_nothing():
    """Sums of them over a chunk are far below the logarithm of any float."""
    spec = spec_of(ROWS, channels=True)
    given = given_of(spec, ROWS)
    given["decay"] *= 1 + 500 * (torch.arange(given["decay"].numel()) % 3)
    require_close(spec, given, ROWS, run(spec, TABLE.choose(spec, host()), host(), given))


def test_a_sequence_in_parts_is_the_sequence():
    spec = spec_of(ROWS)
    whole = given_of(spec, ((0, 60, -1, 0, -1, 0),) + SINGLE[3:] * 4)
    want = run(spec, TABLE.choose(spec, host()), host(), whole)
    parts: tuple[Row, ...] = ((0, 23, -1, 0, -1, 0),) + SINGLE[3:] * 4
    given = whole | {"sequences": torch.tensor(parts, dtype=torch.int32).flatten()}
    first = run(spec, TABLE.choose(spec, host()), host(), given)
    rest: tuple[Row, ...] = ((23, 37, 0, 0, -1, 0),) + SINGLE[3:] * 4
    given |= {"states": first["states"].float().flatten(),
              "sequences": torch.tensor(rest, dtype=torch.int32).flatten()}
    second = run(spec, TABLE.choose(spec, host()), host(), given)
    np.testing.assert_allclose(second["out"][23:60], want["out"][23:60], atol=CLOSE)
    np.testing.assert_allclose(second["states"][0], want["states"][0], atol=CLOSE)


@pytest.mark.parametrize(("fields", "words"), [
    ({"heads": 3, "key_heads": 2}, "3 heads with 2 of keys"), ({"d_v": 0}, "d_v=0"),
    ({"single": True}, "64 tokens of 5 sequences")])
def test_specs_that_cannot_be(fields: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words): replace(spec_of(ROWS), **fields)
