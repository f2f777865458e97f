"""The sampler's filters against transformers' logits processors, its draws against the exact distribution;
seed and position decide the draw."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes
from transformers import generation

import tinygrad_nv
from tinygrad_nv.engine.sampling import (
    Filters,
    Knobs,
    SamplingParams,
    filtered,
    next_token,
    request_numbers,
)
from tinygrad_nv.patterns.sampling import gumbel_of, noisy, ordered_bits, threshold

V = 300


def logits_of(seed: int, scale: float = 3.0, size: int = V) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def knobs_for(params: SamplingParams) -> Knobs:
    values, key, _ = request_numbers(params)
    return Knobs(Tensor(values, dtype=dtypes.float32), Tensor(key, dtype=dtypes.uint32))


def draw(logits: np.ndarray, params: SamplingParams, position: int = 0, seen: tuple[int, ...] = ()) -> int:
    mask = np.zeros(len(logits), np.bool_)
    mask[list(seen)] = True
    knobs = knobs_for(params)
    return int(next_token(Tensor(logits), params.filters, knobs, Tensor(mask), Tensor([position])).item())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2, unique=True))
def test_ordered_bits_keep_the_order_of_floats(pair: list[float]):
    a, b = (int(k) for k in ordered_bits(Tensor(np.array(pair, np.float32))).numpy())
    assert (a < b) == (pair[0] < pair[1]) or pair[0] == pair[1]


@pytest.mark.parametrize("k", [1, 2, 50, V])
def test_threshold_keeps_exactly_the_k_largest(k: int):
    x = logits_of(1)
    keys = ordered_bits(Tensor(x))
    kept = (keys >= threshold(keys, Tensor.ones(V), Tensor([float(k)]))).numpy()
    assert set(np.flatnonzero(kept)) == set(np.argsort(-x)[:k])


@pytest.mark.parametrize("low", [0, 1 << 31, (1 << 32) - 300])
def test_threshold_resolves_the_last_bit(low: int):
    keys = low + np.random.default_rng(0).permutation(300).astype(np.uint32)
    for k in (1, 5, 100, 299):
        assert threshold(Tensor(keys), Tensor.ones(300), Tensor([float(k)])).item() == low + 300 - k


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
def test_threshold_keeps_the_smallest_nucleus(p: float):
    x = logits_of(2)
    keys = ordered_bits(Tensor(x))
    kept = (keys >= threshold(keys, Tensor(x).softmax(-1), Tensor([p]))).numpy()
    order = np.argsort(-x)
    mass = np.cumsum(torch.tensor(x, dtype=torch.float64).softmax(-1).numpy()[order])
    assert set(np.flatnonzero(kept)) == set(order[:int(np.searchsorted(mass, p)) + 1])


CASES = [SamplingParams(temperature=0.7, top_k=20), SamplingParams(temperature=1.3, top_p=0.8),
         SamplingParams(min_p=0.05), SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
         SamplingParams(repetition_penalty=1.5, top_k=5), SamplingParams(),
         SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=0.8)]
SIZES = (7, 128, 129, 1001, 2048)


def filters_of(params: SamplingParams) -> str:
    return "-".join(name for name, used in vars(params.filters).items() if used)


def their_filtered(logits: np.ndarray, params: SamplingParams, seen: tuple[int, ...]) -> np.ndarray:
    """transformers' logits after its processors, in the order of its `generate`."""
    ids, scores = torch.tensor([seen]), torch.tensor(logits)[None]
    steps: list[generation.LogitsProcessor] = [generation.TemperatureLogitsWarper(params.temperature)]
    if params.repetition_penalty != 1:
        steps.insert(0, generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.top_k: steps.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1: steps.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p: steps.append(generation.MinPLogitsWarper(params.min_p))
    for step in steps: scores = step(ids, scores)
    return scores[0].numpy()


@pytest.mark.parametrize("params", CASES, ids=filters_of)
def test_the_filtered_logits_are_those_of_transformers(params: SamplingParams):
    """30 random vectors of 5 sizes: the same tokens are left, with the same values. No sum of probabilities
    is within 1e-5 of top_p, and no probability of min_p, so rounding decides nothing."""
    knobs = knobs_for(params)
    for size in SIZES:
        run = TinyJit(lambda x, mask: filtered(x, params.filters, knobs, mask).realize())
        mask = np.zeros(size, np.bool_)
        seen = (0, size // 2, size - 1)
        mask[list(seen)] = True
        for seed in range(6):
            x = logits_of(seed, size=size)
            ours = run(Tensor(x).realize(), Tensor(mask).realize()).numpy()
            np.testing.assert_allclose(ours, their_filtered(x, params, seen), rtol=1e-6)


@pytest.mark.parametrize("params", CASES, ids=filters_of)
def test_draws_have_the_distribution_of_the_filtered_logits(params: SamplingParams):
    """3,000 positions: every token within 5 standard errors, and none that is filtered out."""
    x, seen, draws = logits_of(3, 1.5, 40), (1, 5, 9), 3000
    mask = np.zeros(len(x), np.bool_)
    mask[list(seen)] = True
    logits, knobs, marks = Tensor(x).realize(), knobs_for(replace(params, seed=11)), Tensor(mask).realize()

    @TinyJit
    def step(position: UOp) -> Tensor:
        return next_token(logits, params.filters, knobs, marks, Tensor(position).reshape(1)).realize()
    position = Variable("position", 0, draws)
    drawn = [step(position.bind(i)).item() for i in range(draws)]
    exact = torch.tensor(their_filtered(x, params, seen)).double().softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=len(x)) / draws
    assert not counts[exact == 0].any()
    # 5 / draws: tokens too rare for a normal law
    assert (np.abs(counts - exact) <= 5 * np.sqrt(exact * (1 - exact) / draws) + 5 / draws).all()


def test_no_noise_is_infinite_and_its_law_is_gumbels():
    """An infinite noise would choose a token whatever its probability."""
    ends = gumbel_of(Tensor([0, 0x1FF, 0xFFFFFE00, 0xFFFFFFFF], dtype=dtypes.uint32)).numpy()
    exact = -np.log(-np.log(np.array([2.0 ** -24, 1 - 2.0 ** -24])))
    np.testing.assert_allclose(ends, exact.repeat(2), rtol=1e-5)
    drawn = noisy(Tensor.zeros(1 << 16), Tensor([3, 4], dtype=dtypes.uint32), Tensor([5]))
    noise = np.sort(drawn.numpy().astype(float))
    law = np.exp(-np.exp(-noise))
    # Kolmogorov-Smirnov, beyond which 1 in 10⁶ samples would be
    assert np.abs(law - (np.arange(len(law)) + 0.5) / len(law)).max() < 2.7 / np.sqrt(len(law))


@pytest.mark.parametrize("target", [1.0, 1.5])
def test_a_target_that_rounding_leaves_out_of_reach_keeps_every_token(target: float):
    keys = ordered_bits(Tensor(logits_of(5)))
    assert threshold(keys, Tensor.full((V,), 0.999 / V), Tensor([target])).item() == 0


def test_ties_at_the_threshold_are_all_kept():
    keys = ordered_bits(Tensor([1.0, 2, 2, 2, -1]))
    kept = keys >= threshold(keys, Tensor.ones(5), Tensor([2.0]))
    assert kept.tolist() == [False, True, True, True, False]


def test_a_threshold_is_found_where_the_keys_are():
    keys = Tensor(np.arange(40, dtype=np.uint32), device="PYTHON")
    found = threshold(keys, Tensor.ones_like(keys).cast(dtypes.float32), Tensor([3.0], device="PYTHON"))
    assert (found.device, found.item()) == ("PYTHON", 37)


def test_a_nucleus_takes_few_kernels():
    keys, weights = Tensor.empty(128_256, dtype=dtypes.uint32), Tensor.empty(128_256)
    assert len(tinygrad_nv.explain(threshold(keys, weights, Tensor.empty(1))).kernels) <= 20


def test_greedy_takes_the_largest_logit_and_no_noise():
    x = logits_of(4)
    params = [SamplingParams(temperature=0, seed=s, top_k=3, top_p=0.5) for s in range(3)]
    assert {draw(x, p) for p in params} == {int(x.argmax())}
    assert SamplingParams(temperature=0, top_k=3, top_p=0.5).filters == Filters()


def test_a_seed_repeats_itself_and_differs_by_position_and_seed():
    x = np.zeros(V, np.float32)
    a = [draw(x, SamplingParams(seed=1 << 40), i) for i in range(6)]
    assert a == [draw(x, SamplingParams(seed=1 << 40), i) for i in range(6)]
    assert a != [draw(x, SamplingParams(seed=(1 << 40) + 1), i) for i in range(6)]
    assert a != [draw(x, SamplingParams(seed=0), i) for i in range(6)], "the high word of a seed counts"
    assert len(set(a)) > 1


def test_a_penalty_of_two_halves_positive_and_doubles_negative_logits():
    x = np.array([4.0, 3.0, -1.0, -1.5], np.float32)
    assert draw(x, SamplingParams(temperature=0, repetition_penalty=2), seen=(0,)) == 1
    y = np.array([-1.0, -1.5], np.float32)
    assert draw(y, SamplingParams(temperature=0, repetition_penalty=2), seen=(0,)) == 1


def test_fresh_seeds_differ():
    assert request_numbers(SamplingParams())[2] != request_numbers(SamplingParams())[2]
