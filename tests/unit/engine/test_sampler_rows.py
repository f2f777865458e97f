"""Rows of different requests in one step of the sampler are independent, bit for bit; masks, slots, counts;
drafts verified by sampling at their positions."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, TinyJit, dtypes

from tests.support.engine.sampler_case import Case, V, logits_of, union
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler import count_tokens, next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState, pack_mask

KINDS = [SamplingParams(temperature=0), SamplingParams(seed=3),
         SamplingParams(temperature=0.7, top_k=4, seed=4), SamplingParams(top_p=0.7, temperature=1.2, seed=5),
         SamplingParams(min_p=0.2, seed=6),
         SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=1.0),
         SamplingParams(frequency_penalty=1.5, seed=7, top_k=9, top_p=0.9),
         SamplingParams(logit_bias={5: 7.0, 9: -100.0}, seed=8)]
SEEN, SAID = (0, 5, 9, 17), (9, 9, 30)


def alone(params: SamplingParams, logits: np.ndarray, position: int) -> int:
    return Case([params], len(logits), SEEN, SAID).tokens(logits[None], position)[0]


@pytest.mark.slow
def test_a_rows_token_is_the_same_whatever_its_neighbours():
    """Each kind by itself, with no filters but its own, then beside all others, in two orders."""
    xs = np.stack([logits_of(i, 2) for i in range(len(KINDS))])
    xs[:, 40] = -0.0  # a bias of 0 would make 0 of it, which is larger to a filter
    positions = list(range(10, 10 + len(KINDS)))
    expected = [alone(*each) for each in zip(KINDS, xs, positions, strict=True)]
    assert Case(KINDS, V, SEEN, SAID).tokens(xs, positions) == expected
    back = Case(KINDS[::-1], V, SEEN, SAID).tokens(xs[::-1].copy(), positions[::-1])
    assert back[::-1] == expected


def test_a_rows_logits_are_the_same_bits_whatever_its_neighbours():
    xs = np.stack([logits_of(i, 2) for i in range(len(KINDS))])
    for i, params in enumerate(KINDS):
        one = Case([params], V, SEEN, SAID).apply_filters(xs[i:i + 1])
        other = Case([params, *KINDS], V, SEEN, SAID).apply_filters(np.concatenate([xs[i:i + 1], xs]))
        if params.temperature: np.testing.assert_array_equal(one[0].view(np.uint32), other[0].view(np.uint32))
        else: assert one[0].argmax() == other[0].argmax()


def test_greedy_rows_beside_drawing_ones_have_no_noise():
    xs = np.stack([logits_of(i) for i in range(16)])
    rows = [replace(KINDS[0] if i % 2 else KINDS[1], seed=i) for i in range(16)]
    drawn = [Case(rows).tokens(xs, position) for position in range(3)]
    for i in range(16): assert (len({each[i] for each in drawn}) == 1) or not i % 2
    assert all(each[i] == xs[i].argmax() for each in drawn for i in range(1, 16, 2))
    assert drawn[0] != drawn[1]


def test_filters_are_what_any_row_needs():
    assert union(KINDS[:2]) == Filters(draw=True)
    assert union(KINDS) == Filters(True, True, True, True, True, True)
    assert Filters(mask=True) | Filters(top_k=True) == Filters(mask=True, top_k=True)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100), st.data())
def test_masks_are_packed_from_the_lowest_bit(size: int, data: st.DataObject):
    forbidden = data.draw(st.sets(st.integers(0, size - 1)))
    mask = pack_mask(size, forbidden)
    assert mask.shape == (-(-size // 32),)
    assert {i for i in range(size) if not mask[i // 32] >> (i % 32) & 1} == forbidden


@pytest.mark.sampled(1)
@pytest.mark.parametrize("params", [KINDS[0], KINDS[2], KINDS[7]], ids=["greedy", "top_k", "bias"])
def test_a_masked_token_is_not_chosen(params: SamplingParams):
    """A bias does not override it; a row with a full mask is as without a mask."""
    x = np.stack([logits_of(1), logits_of(1)])
    best = set(np.argsort(-x[0])[:4].tolist()) | {5}
    masks = np.stack([pack_mask(V, best), pack_mask(V, ())])
    case = Case([params] * 2)
    filters = case.filters | Filters(mask=True)
    made = case.tokens(x, 3, filters, masks)
    assert made[0] not in best
    assert made[1] == case.tokens(x, 3)[1]
    only = pack_mask(V, set(range(V)) - {77})
    assert case.tokens(x, 3, filters, np.stack([only, only])) == [77, 77]


def test_tokens_are_counted_step_by_step():
    """Equals starting with the tokens sampled so far; rows without a slot are not counted."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0, presence_penalty=0.5,
                            repetition_penalty=1.1)
    slots, x, prompt = SamplerState(3, V), logits_of(2, 1), (1, 2, 3)
    x[[7, 8]] = [6, 5.5]
    for slot in (0, 2): slots.start_slot(slot, params, 0, prompt)
    rows = Tensor([2, -1], dtype=dtypes.int32).realize()
    logits, positions = Tensor(np.stack([x, x])).realize(), Tensor([0, 0], dtype=dtypes.int32).realize()

    @TinyJit
    def step() -> Tensor:
        tokens = next_tokens(logits, params.filters, slots, rows, positions).contiguous()
        Tensor.realize(tokens, count_tokens(slots, rows, tokens))
        return tokens
    said: list[int] = []
    for _ in range(6):
        token = int(step().numpy()[0])
        assert token == Case([params], V, prompt, said).tokens(x[None])[0]
        said.append(token)
    assert len(set(said)) > 2
    counts = slots.counts.numpy()
    assert counts.sum(1).tolist() == [1.5, 0, 7.5]
    assert (counts[0] == [0.5 if i in prompt else 0 for i in range(V)]).all()


def test_a_fork_goes_on_with_what_is_counted():
    params = SamplingParams(frequency_penalty=1.0, seed=1, logit_bias={2: 1.0})
    slots = SamplerState(3, V)
    slots.start_slot(0, params, 1, (1, 2), (4, 4))
    slots.fork(0, 2, params, 9)
    counts, bias, numbers = slots.counts.numpy(), slots.bias.numpy(), slots.numbers.numpy()
    np.testing.assert_array_equal(counts[2], counts[0])
    assert (counts[0, 4], counts[0, 1], bias[2, 2]) == (2, 0.5, 1)
    np.testing.assert_array_equal(numbers[2], params.numbers(9))


def test_a_slot_forgets_who_was_there():
    slots, rows = SamplerState(1, V), Tensor([0], dtype=dtypes.int32)
    slots.start_slot(0, SamplingParams(logit_bias={3: 100.0}, frequency_penalty=2.0), 0, (1,), (5,))
    params = SamplingParams(temperature=0, frequency_penalty=1e-9)
    slots.start_slot(0, params, 0, ())
    x = logits_of(4)
    every = Filters(bias=True, penalty=True)
    assert next_tokens(Tensor(x[None]), every, slots, rows, rows).item() == x.argmax()
    assert not slots.counts.numpy().any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [SamplingParams(seed=21), SamplingParams(temperature=0),
                                    SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.01, seed=5)],
                         ids=["draw", "greedy", "filters"])
def test_drafted_tokens_are_judged_by_what_would_have_been_chosen(params: SamplingParams):
    """Four rows of one slot in a step, at consecutive positions: the tokens of four steps."""
    xs = np.stack([logits_of(i, 1.5) for i in range(5)])
    slots, rows = SamplerState(2, V), Tensor([1, 1, 1, 1, 1], dtype=dtypes.int32)
    slots.start_slot(1, params, params.seed or 0, (1, 2))
    positions = Tensor(np.arange(40, 45, dtype=np.int32))
    together = next_tokens(Tensor(xs), params.filters, slots, rows, positions).tolist()
    steps = [next_tokens(Tensor(x[None]), params.filters, slots, rows[:1], positions[i:i + 1]).item()
             for i, x in enumerate(xs)]
    assert together == steps
