"""The sampler against plain NumPy and transformers' logits processors; a seed decides the draw, nothing
else does."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, dtypes
from transformers import generation

from tinygrad_nv.engine.sampling import (
    Filters,
    Knobs,
    SamplingParams,
    gumbel,
    next_token,
    ordered_bits,
    request_numbers,
    threshold,
)

V = 300


def logits_of(seed: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * scale).astype(np.float32)


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
         SamplingParams(repetition_penalty=1.5, top_k=5), SamplingParams()]


@pytest.mark.parametrize("params", CASES, ids=lambda p: "-".join(k for k, v in vars(p.filters).items() if v))
def test_the_distribution_is_that_of_transformers(params: SamplingParams):
    """20,000 draws against the exact distribution: every token within 5 standard errors; the sampler's own
    choice is the maximum of transformers' filtered logits and our noise."""
    params, x, seen, draws = replace(params, seed=11), logits_of(3), (1, 5, 9), 20_000
    ids, scores = torch.tensor([seen]), torch.tensor(x)[None]
    if params.repetition_penalty != 1:
        scores = generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = generation.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k: scores = generation.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1: scores = generation.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p: scores = generation.MinPLogitsWarper(params.min_p)(ids, scores)
    exact = scores.double().softmax(-1)[0].numpy()
    # the sampler's own filtered logits, then its own noise for many positions at once
    knobs, mask = knobs_for(params), np.zeros(V, np.bool_)
    mask[list(seen)] = True
    noise = np.stack([gumbel(knobs.seed, Tensor([i]), V).numpy() for i in range(3)])
    singles = [draw(x, params, i, seen) for i in range(3)]
    kept = np.where(exact > 0, np.log(np.maximum(exact, 1e-300)), -np.inf)
    assert singles == [int(np.argmax(kept + n)) for n in noise]
    many = gumbel_block(knobs.seed, draws)
    counts = np.bincount(np.argmax(kept + many, -1), minlength=V) / draws
    # 5 / draws: tokens too rare for a normal law
    assert (np.abs(counts - exact) <= 5 * np.sqrt(exact * (1 - exact) / draws) + 5 / draws).all()


def gumbel_block(seed: Tensor, draws: int) -> np.ndarray:
    """Noise of positions 0 … draws − 1, (draws, V), in one kernel: position and index are one 64-bit
    counter."""
    positions = Tensor.arange(draws, dtype=dtypes.uint32).reshape(draws, 1)
    positions = positions.expand(draws, V).cast(dtypes.uint64)
    counter = (positions << 32) | Tensor.arange(V, dtype=dtypes.uint32).reshape(1, V).cast(dtypes.uint64)
    key = (seed[1:2].cast(dtypes.uint64) << 32) | seed[0:1].cast(dtypes.uint64)
    bits = counter.threefry(key.reshape(1, 1).expand(draws, V)).cast(dtypes.uint32)
    return -np.log(-np.log((bits.numpy() >> 8).astype(np.float64) * 2.0 ** -24 + 2.0 ** -25))


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
