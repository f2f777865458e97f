"""Selective scans on the emulated GPU against the recurrence in float64: borders, empty sequences, pages that
are written in place, rows with gaps; the same bits by one thread a channel and by four."""
from __future__ import annotations

import dataclasses

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.reference_case import run
from tests.support.tile.scan_case import given_of, right, spec_of, table
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16 = dtypes.float32, dtypes.bfloat16
HOPPER, AMPERE = GPU("sm_90a", 3), GPU("sm_80", 3)
# (tokens of sequences, channels, states, dtype)
CASES = {"16 states": ((5, 0, 9, 1, 17, 12), 70, 16, BF16), "f32": ((6, 13), 33, 8, F32),
         "odd states": ((3, 8), 40, 5, BF16), "one state": ((1, 4, 0), 16, 1, F32)}


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", CASES)
def test_chunks(name: str, gpu: GPU):
    counts, channels, states, dtype = CASES[name]
    for seed in range(2):
        rows, pages = table(counts, seed)
        right(spec_of(rows, pages, channels, states, dtype, more=3), rows, gpu, seed)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda dtype: dtype.name)
def test_one_token_each(dtype: DType):
    rows = [(0, 1, -1, 0, -1, 0), (1, 1, 1, 0, -1, 4), (2, 0, -1, 0, -1, -1), (3, 1, 3, 0, -1, 3)]
    right(spec_of(rows, 5, 70, 16, dtype, single=True), rows, HOPPER)


def test_bits_of_a_sequence_alone_and_beside_others():
    """Few sequences have four threads a channel, many one."""
    alone, many = table((7,), 2), table((7,) + (1,) * 40, 2)
    first = spec_of(*alone, 96, 16, BF16)
    other = spec_of(*many, 96, 16, BF16)
    chosen = [TABLE.choose(spec, HOPPER) for spec in (first, other)]
    assert [each.columns for each in chosen] == [8, 32]
    given = given_of(other, many[0])
    own = given_of(first, alone[0])
    for name in ("x", "step", "b", "c"): own[name] = given[name][:own[name].numel()].clone()
    own["a"] = given["a"]
    own["states"] = given["states"][:own["states"].numel()].clone()
    made = [run(spec, schedule, HOPPER, x)["out"][:7]
            for spec, schedule, x in ((first, chosen[0], own), (other, chosen[1], given))]
    assert torch.equal(*made)


def test_too_many_states_are_refused():
    rows, pages = table((4,))
    spec = spec_of(rows, pages, 32, 65, F32)
    assert TABLE.choose(spec, HOPPER) is None
    assert "65 states of a channel, more than 64" in TABLE.why_not(spec, HOPPER)
    assert TABLE.choose(dataclasses.replace(spec, states=64), HOPPER) is not None
