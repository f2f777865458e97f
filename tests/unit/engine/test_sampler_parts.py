"""A vocabulary in parts, one of each rank: tokens are those of whole rows, bit for bit, whatever the rows of
a step need, and no row is gathered where its order is not needed."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine.parts_case import PartsCase
from tests.support.engine.sampler_case import Case, logits_of
from tests.support.engine.selection_case import hard_rows
from tests.unit.engine.test_sampler_rows import KINDS, SAID, SEEN
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler_state import pack_mask

SIZE = 299      # the last rank has fewer tokens than the others
LOCAL = [each for each in KINDS if not each.filters.ordering]
MASK = Filters(mask=True)
every = pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])


def rows_of(kinds: list[SamplingParams]) -> tuple[np.ndarray, list[int]]:
    """A row of logits for each, and its position."""
    xs = np.stack([logits_of(7 + i, 2, SIZE) for i in range(len(kinds))])
    xs[:, 40] = -0.0
    return xs, [10 + i for i in range(len(kinds))]


def masks_of(xs: np.ndarray) -> np.ndarray:
    """Of every other row the likeliest tokens are not allowed."""
    return np.stack([pack_mask(SIZE, np.argsort(-x)[:9].tolist() if i % 2 else ())
                     for i, x in enumerate(xs)])


@every
def test_tokens_are_those_of_whole_rows(ranks: int) -> None:
    """Of 12 bytes a row and rank."""
    xs, at = rows_of(LOCAL)
    case, whole = PartsCase(ranks, LOCAL, SIZE, SEEN, SAID), Case(LOCAL, SIZE, SEEN, SAID)
    filters, masks = whole.filters | MASK, masks_of(xs)
    assert case.tokens(xs, at, filters, masks) == whole.tokens(xs, at, filters, masks)
    assert [each.sent for each in case.parts] == [{"most": 12 * len(xs)}] * ranks


@pytest.mark.slow
@every
@pytest.mark.parametrize("count", [8, pytest.param(7, marks=pytest.mark.slow)], ids=["shares", "all"])
def test_a_row_that_needs_the_order_of_all(ranks: int, count: int) -> None:
    """Each rank has its share of whole rows, or all, which changes no token of the others."""
    kinds = KINDS[-count:]
    xs, at = rows_of(kinds)
    case, whole = PartsCase(ranks, kinds, SIZE, SEEN, SAID), Case(kinds, SIZE, SEEN, SAID)
    filters, masks = whole.filters | MASK, masks_of(xs)
    found = case.tokens(xs, at, filters, masks)
    assert found == whole.tokens(xs, at, filters, masks)
    row = 4 * len(case.parts[0].tokens)
    shares = {"rows": row * count // ranks, "tokens": 4 * count // ranks}
    assert [each.sent for each in case.parts] == [shares if count == 8 else {"rows": row * count}] * ranks
    if count == 8: return
    own = [i for i, each in enumerate(kinds) if each in LOCAL]
    apart = PartsCase(ranks, [kinds[i] for i in own], SIZE, SEEN, SAID)
    assert apart.tokens(xs[own], [at[i] for i in own], apart.filters | MASK, masks[own]) == \
        [found[i] for i in own]


@pytest.mark.sampled(1)
@every
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0), SamplingParams(seed=4),
    pytest.param(SamplingParams(seed=4, min_p=0.1), marks=pytest.mark.slow),
    pytest.param(SamplingParams(temperature=0, presence_penalty=1.0), marks=pytest.mark.slow),
    pytest.param(SamplingParams(seed=2, top_k=5), marks=pytest.mark.slow)], ids=["greedy", "drawn", "min_p",
                                                                               "penalty", "top_k"])
def test_equals_nan_and_nothing_left(params: SamplingParams, ranks: int) -> None:
    """The first of equals is chosen, NaN told, and no token beyond the vocabulary chosen."""
    x = hard_rows(SIZE)
    made = PartsCase(ranks, [params] * len(x), SIZE).tokens(x, 5)
    assert made == Case([params] * len(x), SIZE).tokens(x, 5)
    assert (made[2], made[3]) == (SIZE, 0)


def test_each_rank_counts_its_own_tokens() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    x = np.zeros((3, SIZE), np.float32)
    x[[0, 1, 2], [3, 152, 298]] = 1
    case = PartsCase(2, [params] * 3, SIZE, (298,))
    assert case.tokens(x, count=True) == [3, 152, 298]
    counts = np.concatenate([state.counts.numpy() for state in case.states], 1)[case.order]
    assert counts.shape == (3, 304)
    assert {(int(i), int(j)): float(counts[i, j]) for i, j in np.argwhere(counts)} == {
        (0, 3): 1, (1, 152): 1, (2, 298): 1.5, (0, 298): 0.5, (1, 298): 0.5}


def test_a_fork_has_the_counts_of_a_rank() -> None:
    params = SamplingParams(frequency_penalty=1.0, seed=1, logit_bias={2: 1.0, 200: 3.0})
    case = PartsCase(2, [params], SIZE, (1, 200), (4, 4))
    state, source = case.states[1], int(case.order[0])
    state.fork(source, 2, params, 9)
    assert state.counts.numpy()[2].tolist() == state.counts.numpy()[source].tolist()
    assert (state.counts.numpy()[2, 200 - 152], state.bias.numpy()[2, 200 - 152]) == (0.5, 3)
    assert state.bias.numpy()[2].sum() == 3
