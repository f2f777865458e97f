"""The sampler's filters against transformers' logits processors, its draws against the exact distribution;
seed and position determine the sample."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes

import tinygrad_nv
from tests.support.engine.sampler_case import Case, V, logits_of, their_filtered
from tinygrad_nv.engine.sampling import Filters, SamplingParams, fresh_seed
from tinygrad_nv.engine.worker.sampler import next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState
from tinygrad_nv.tile.sampling.reference import gumbel_of, noisy, order_bits, threshold
from tinygrad_nv.tile.sampling.spec import NUMBERS, Number


def draw(logits: np.ndarray, params: SamplingParams, position: int = 0, seen: tuple[int, ...] = ()) -> int:
    return Case([params], len(logits), seen).tokens(logits[None], position)[0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2, unique=True))
def test_ordered_bits_keep_the_order_of_floats(pair: list[float]):
    a, b = (int(k) for k in order_bits(Tensor(np.array(pair, np.float32))).numpy())
    assert (a < b) == (pair[0] < pair[1]) or pair[0] == pair[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 2, 50, V])
def test_threshold_keeps_exactly_the_k_largest(k: int):
    x = np.stack([logits_of(1), logits_of(2)])
    keys = order_bits(Tensor(x))
    kept = (keys >= threshold(keys, Tensor.ones(2, V), Tensor([[float(k)], [3.0]]))).numpy()
    for row, logits, count in zip(kept, x, (k, 3), strict=True):
        assert set(np.flatnonzero(row)) == set(np.argsort(-logits)[:count])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("low", [0, 1 << 31, (1 << 32) - 300])
def test_threshold_resolves_the_last_bit(low: int):
    keys = low + np.random.default_rng(0).permutation(300).astype(np.uint32)
    for k in (1, 5, 100, 299):
        found = threshold(Tensor(keys[None]), Tensor.ones(1, 300), Tensor([[float(k)]]))
        assert found.item() == low + 300 - k


@pytest.mark.sampled(2)
@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
def test_threshold_keeps_the_smallest_nucleus(p: float):
    x = logits_of(2)
    keys = order_bits(Tensor(x[None]))
    kept = (keys >= threshold(keys, Tensor(x[None]).softmax(-1), Tensor([[p]]))).numpy()
    order = np.argsort(-x)
    mass = np.cumsum(torch.tensor(x, dtype=torch.float64).softmax(-1).numpy()[order])
    assert set(np.flatnonzero(kept)) == set(order[:int(np.searchsorted(mass, p)) + 1])


CASES = [SamplingParams(temperature=0.7, top_k=20), SamplingParams(temperature=1.3, top_p=0.8),
         SamplingParams(min_p=0.05), SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.02),
         SamplingParams(repetition_penalty=1.5, top_k=5), SamplingParams(),
         SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=0.8)]
MORE = [SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2, top_k=30),
        SamplingParams(frequency_penalty=-1.5), SamplingParams(temperature=0, presence_penalty=2.0),
        SamplingParams(logit_bias={0: 5.0, 3: -100.0}, presence_penalty=-0.5, top_p=0.9)]
SIZES = (7, 129, 1001)
# tokens that the sampler gives for `logits_of(s)` with seed 5 + s · 2^33 at position 100 · s, for each case
BEFORE = [[270, 273, 231, 9, 70, 143, 170, 49, 57, 23, 180, 247],
          [270, 273, 231, 124, 70, 143, 170, 49, 241, 166, 180, 247],
          [270, 273, 231, 9, 70, 182, 170, 49, 284, 23, 180, 247],
          [270, 273, 231, 9, 70, 210, 170, 49, 57, 23, 180, 247],
          [270, 183, 291, 109, 15, 182, 149, 49, 163, 23, 295, 90],
          [270, 273, 231, 124, 70, 143, 170, 49, 241, 166, 180, 247],
          [219, 273, 231, 9, 266, 220, 170, 103, 57, 13, 180, 117]]


def filters_of(params: SamplingParams) -> str:
    return "-".join(name for name, used in vars(params.filters).items() if used)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[filters_of(each) for each in CASES])
def test_rows_have_the_tokens_that_they_had_alone(number: int):
    xs = [logits_of(s) for s in range(12)]
    tokens = []
    for s, x in enumerate(xs[:4]):
        seen = (0, 150, 299, int(x.argmax()))
        tokens.append(draw(x, replace(CASES[number], seed=5 + (s << 33)), 100 * s, seen))
    assert tokens == BEFORE[number][:4]
    slots, rows = SamplerState(12, V), Tensor(np.arange(12, dtype=np.int32))
    for s, x in enumerate(xs):
        slots.start_slot(s, CASES[number], 5 + (s << 33), (0, 150, 299, int(x.argmax())))
    made = next_tokens(Tensor(np.stack(xs)), CASES[number].filters, slots, rows, 100 * rows)
    assert made.tolist() == BEFORE[number]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", CASES + MORE, ids=filters_of)
def test_the_filtered_logits_are_those_of_transformers(params: SamplingParams):
    """18 random rows of 3 sizes: the same tokens are left, with the same values. No sum of probabilities
    is within 1e-5 of top_p, and no probability of min_p, so rounding decides nothing."""
    for size in SIZES:
        seen, said = (0, size // 2, size - 1), (1, 5, 5, 0, 5)
        x = np.stack([logits_of(seed, size=size) for seed in range(6)])
        ours = Case([params] * 6, size, seen, said).apply_filters(x)
        theirs = np.stack([their_filtered(row, params, seen, said) for row in x])
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", CASES + MORE[:2], ids=filters_of)
def test_draws_have_the_distribution_of_the_filtered_logits(params: SamplingParams):
    """3,000 positions: every token within 5 standard errors, and none that is filtered out."""
    x, seen, said, draws, R = logits_of(3, 1.5, 40), (1, 5, 9), (2, 3, 3), 3000, 50
    case = Case([replace(params, seed=11)] * R, len(x), seen, said)
    logits = Tensor(x).expand(R, len(x)).contiguous().realize()
    positions = Tensor(np.arange(R, dtype=np.int32))

    @TinyJit
    def step(start: UOp) -> Tensor:
        return next_tokens(logits, case.filters, case.state, case.rows, positions + start).realize()
    start = Variable("start", 0, draws)
    drawn = np.concatenate([step(start.bind(i)).numpy() for i in range(0, draws, R)])
    exact = torch.tensor(their_filtered(x, params, seen, said)).double().softmax(-1).numpy()
    counts = np.bincount(drawn, minlength=len(x)) / draws
    assert not counts[exact == 0].any()
    # 5 / draws: tokens too rare for a normal law
    assert (np.abs(counts - exact) <= 5 * np.sqrt(exact * (1 - exact) / draws) + 5 / draws).all()


def test_no_noise_is_infinite_and_its_law_is_gumbels():
    """Infinite noise would select a token regardless of its probability."""
    ends = gumbel_of(Tensor([0, 0x1FF, 0xFFFFFE00, 0xFFFFFFFF], dtype=dtypes.uint32)).numpy()
    exact = -np.log(-np.log(np.array([2.0 ** -24, 1 - 2.0 ** -24])))
    np.testing.assert_allclose(ends, exact.repeat(2), rtol=1e-5)
    numbers = Tensor(SamplingParams().numbers(3 + (4 << 32))[None])
    drawn = noisy(Tensor.zeros(1, 1 << 16), numbers, Tensor([5], dtype=dtypes.int32))
    noise = np.sort(drawn.numpy()[0].astype(float))
    law = np.exp(-np.exp(-noise))
    # Kolmogorov-Smirnov, beyond which 1 in 10⁶ samples would be
    assert np.abs(law - (np.arange(len(law)) + 0.5) / len(law)).max() < 2.7 / np.sqrt(len(law))


@pytest.mark.parametrize("target", [1.0, 1.5, np.inf])
def test_a_target_that_is_out_of_reach_keeps_every_token(target: float):
    keys = order_bits(Tensor(logits_of(5)[None]))
    assert threshold(keys, Tensor.full((1, V), 0.999 / V), Tensor([[target]])).item() == 0


def test_ties_at_the_threshold_are_all_kept():
    keys = order_bits(Tensor([[1.0, 2, 2, 2, -1]]))
    kept = keys >= threshold(keys, Tensor.ones(1, 5), Tensor([[2.0]]))
    assert kept.tolist() == [[False, True, True, True, False]]


@pytest.mark.slow
def test_a_threshold_is_found_where_the_keys_are():
    keys = Tensor(np.arange(40, dtype=np.uint32)[None], device="PYTHON")
    found = threshold(keys, Tensor.ones_like(keys).cast(dtypes.float32), Tensor([[3.0]], device="PYTHON"))
    assert (found.device, found.item()) == ("PYTHON", 37)


def test_a_nucleus_takes_few_kernels():
    keys, weights = Tensor.empty(1, 128_256, dtype=dtypes.uint32), Tensor.empty(1, 128_256)
    assert len(tinygrad_nv.explain(threshold(keys, weights, Tensor.empty(1, 1))).kernels) <= 20


def test_greedy_takes_the_largest_logit_and_no_noise():
    x = logits_of(4)
    params = [SamplingParams(temperature=0, seed=s, top_k=3, top_p=0.5) for s in range(3)]
    assert {draw(x, p) for p in params} == {int(x.argmax())}
    assert SamplingParams(temperature=0, top_k=3, top_p=0.5).filters == Filters()


def test_a_seed_repeats_itself_and_differs_by_place_and_seed():
    x = np.zeros((6, V), np.float32)

    def tokens(seed: int) -> list[int]: return Case([SamplingParams(seed=seed)] * 6).tokens(x, range(6))
    a = tokens(1 << 40)
    assert a == tokens(1 << 40)
    for other in ((1 << 40) + 1, (1 << 40) + (1 << 16), 0): assert a != tokens(other), "every word counts"
    assert a != tokens((1 << 40) + (1 << 63))
    assert len(set(a)) > 1


def test_a_penalty_of_two_halves_positive_and_doubles_negative_logits():
    x = np.array([4.0, 3.0, -1.0, -1.5], np.float32)
    assert draw(x, SamplingParams(temperature=0, repetition_penalty=2), seen=(0,)) == 1
    y = np.array([-1.0, -1.5], np.float32)
    assert draw(y, SamplingParams(temperature=0, repetition_penalty=2), seen=(0,)) == 1


@pytest.mark.parametrize("params", [SamplingParams(frequency_penalty=1.5), SamplingParams(min_p=1.0)],
                         ids=["no penalty of the prompt", "the likeliest is left"])
def test_ends_of_ranges_are_those_of_transformers(params: SamplingParams):
    x, seen, said = logits_of(3, size=7), (0, 5), (1, 5, 5)
    np.testing.assert_allclose(Case([params], 7, seen, said).apply_filters(x[None])[0],
                               their_filtered(x, params, seen, said), rtol=1e-6)


def test_fresh_seeds_differ(): assert fresh_seed() != fresh_seed()


def test_what_float32_would_round_to_nothing_is_still_something():
    """A temperature that is 0 to float32 would divide by it; a min_p of 0 is none."""
    numbers = SamplingParams(min_p=1e-300, top_p=1e-300, repetition_penalty=1e-300).numbers(0)
    assert (numbers[[Number.min_p, Number.top_p, Number.repetition_penalty]] == np.float32(2.0 ** -126)).all()
    assert numbers.shape == (NUMBERS,)
    assert numbers[Number.top_k] == np.inf
