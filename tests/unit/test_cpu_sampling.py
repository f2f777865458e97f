"""The sampler's kernels on the CPU against their bodies, bit by bit, and the tokens that come of them."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import gumbel as noise
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu import threshold as selection
from tinygrad_nv.cpu.machine import machine
from tinygrad_nv.engine.sampling import Knobs, SamplingParams, next_token, request_numbers
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.sampling import largest, noisy
from tinygrad_nv.runtime.cpu_program import load
from tinygrad_nv.tile.sampling import LANES, FilterSpec, GumbelSpec

LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with Context(DEV="CPU"): yield


def ordered(x: np.ndarray) -> np.ndarray:
    """float32 as uint32 in the same order."""
    bits = x.view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def mass(keys: np.ndarray, weights: np.ndarray, least: int) -> np.float32:
    """Σ weights[keys ≥ least], in the order of the spec."""
    rows = -(-len(keys) // LANES)
    kept = np.pad(np.where(keys >= least, weights, np.float32(0)), (0, rows * LANES - len(keys)))
    lanes = np.zeros(LANES, np.float32)
    for row in kept.reshape(LANES, rows).T: lanes += row
    total = np.float32(0)
    for lane in lanes: total += lane
    return total


def selected(keys: np.ndarray, weights: np.ndarray, target: np.float32) -> int:
    """The largest t of which the mass reaches the target, 0 if there is none; t is a key then."""
    return max((int(key) for key in keys if mass(keys, weights, key) >= target), default=0)


@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("size", [5, 300])
def test_a_filter_is_exact_where_a_sum_is_nearly_the_target(level: isa.ISA, size: int):
    x = RNG(size).standard_normal(size).astype(np.float32)
    x[:3] = x[3]
    x[size // 3:size // 2] = -np.inf
    x[4] = -0.0
    keys = ordered(x)
    weights = RNG(1).random(size).astype(np.float32)
    weights[size // 2:] *= RNG(2).integers(0, 2, size - size // 2)
    target = replace(machine(), isa=level)
    for counted in (False, True):
        spec = FilterSpec(size, 1, counted)
        kernel = load(selection.build(spec, selection.default(spec, target)))
        given = np.ones(size, np.float32) if counted else weights
        for key in keys[:8]:
            near = mass(keys, given, key)
            for goal in (near, np.nextafter(near, np.float32(1e9)), np.nextafter(near, np.float32(0))):
                out, work = np.full(size + 3, 77, np.float32), np.full(2 * LANES * spec.rows, 77, np.uint32)
                knobs = np.array([np.nan, goal, np.nan], np.float32)
                kernel(out, work, x, *[given] * (not counted), knobs)
                kept = np.where(keys >= selected(keys, given, goal), x, np.float32(-np.inf))
                np.testing.assert_array_equal(out[:size].view(np.uint32), kept.view(np.uint32))
                assert (out[size:] == 77).all()


@pytest.mark.parametrize("size", [129, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2048, 32000))])
def test_kernels_have_the_bits_of_their_bodies(size: int):
    x = Tensor((RNG(size).standard_normal(size) * 3).astype(np.float32)).realize()
    weights = x.softmax(-1).realize()
    seed, position = Tensor([3, 1 << 31], dtype=dtypes.uint32).realize(), Tensor([77]).realize()
    goals = [Tensor([5, goal], dtype=dtypes.float32).realize()
             for goal in (0.1, 0.9, 1.0, size / 2, size + 1.0)]

    def results() -> list[np.ndarray]:
        made = [largest(x, weights, goal, 1) for goal in goals[:3]]
        made += [largest(x, None, goal, 1) for goal in goals[3:]]
        return [each.bitcast(dtypes.uint32).numpy() for each in (*made, noisy(x, seed, position))]
    assert [k.template for k in explain(largest(x, None, goals[0], 1)).kernels] == ["threshold"]
    assert [k.template for k in explain(noisy(x, seed, position)).kernels] == ["gumbel"]
    ours = results()
    with disabled(): theirs = results()
    for a, b in zip(ours, theirs, strict=True): np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_noise_does_not_depend_on_parts(level: isa.ISA):
    spec, logits = GumbelSpec(1001), RNG(0).standard_normal(1001).astype(np.float32)
    given = logits, np.array([5, 6], np.uint32), np.array([9], np.int32)
    made = []
    for parts, order in ((1, None), (2, (1, 0)), (5, (4, 1, 0, 3, 2))):
        schedule = replace(noise.default(spec, replace(machine(), isa=level)), parts=parts)
        out = np.full(1003, 77, np.float32)
        load(noise.build(spec, schedule))(out, *given, order=order)
        made.append(out)
    assert (made[0][1001:] == 77).all()
    assert np.isfinite(made[0]).all()
    for other in made[1:]: np.testing.assert_array_equal(made[0], other)


ALL = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
FEW = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.1, top_k=30),
       pytest.param(ALL, marks=pytest.mark.slow)]


@pytest.mark.parametrize("params", FEW, ids=["greedy", "top_k", "all"])
def test_tokens_of_a_seed_are_those_of_the_bodies(params: SamplingParams):
    size = 129
    logits = Tensor((RNG(0).standard_normal(size) * 2).astype(np.float32)).realize()
    seen = Tensor(np.arange(size) % 7 == 0).realize()

    def drawn() -> list[int]:
        tokens = []
        for seed in range(12):
            values, key, _ = request_numbers(replace(params, seed=seed))
            knobs = Knobs(Tensor(values, dtype=dtypes.float32), Tensor(key, dtype=dtypes.uint32))
            tokens.append(int(next_token(logits, params.filters, knobs, seen, Tensor([seed])).item()))
        return tokens
    ours = drawn()
    with disabled(): assert drawn() == ours
    assert params.temperature == 0 or len(set(ours)) > 3


def test_a_sampler_is_few_kernels():
    knobs = Knobs(Tensor.empty(5), Tensor.empty(2, dtype=dtypes.uint32))
    logits, seen = Tensor.empty(129).realize(), Tensor.empty(129, dtype=dtypes.bool).realize()
    position = Tensor.empty(1, dtype=dtypes.int32).realize()

    def kernels(params: SamplingParams) -> list[str]:
        made = explain(next_token(logits, params.filters, knobs, seen, position)).kernels
        return [k.template or "tinygrad" for k in made]
    assert kernels(SamplingParams(temperature=0.0)) == ["norm"]
    nucleus = ["tinygrad", "norm", "threshold", "gumbel", "norm"]
    assert kernels(SamplingParams(temperature=0.7, top_p=0.95)) == nucleus
    assert len(kernels(ALL)) <= 9


def test_nothing_to_choose_from_is_refused():
    for made in (lambda: FilterSpec(0, 1), lambda: GumbelSpec(0)):
        with pytest.raises(SpecError, match="one or more"): made()
