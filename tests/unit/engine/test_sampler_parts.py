"""A vocabulary in parts, one of each rank: tokens are those of whole rows, bit for bit, whatever rows of a
step need, and no row is gathered where its order is not needed."""
from __future__ import annotations

import numpy as np
import pytest
from parts_case import PartsCase
from sampler_case import Case, V, logits_of
from test_sampler_rows import KINDS, SAID, SEEN

from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler import packed_mask

LOCAL = [each for each in KINDS if not each.filters.ordering]
HARD = V - 1        # a last part has fewer tokens than the others


def rows_of(kinds: list[SamplingParams], size: int, steps: int = 1) -> tuple[np.ndarray, list[int]]:
    xs = np.stack([logits_of(7 * steps + i, 2, size) for i in range(len(kinds))])
    xs[:, 40] = -0.0
    return xs, [10 * steps + i for i in range(len(kinds))]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kinds", [LOCAL, KINDS], ids=["apart", "gathered"])
def test_tokens_are_those_of_whole_rows(ranks: int, kinds: list[SamplingParams]):
    """And each row's are those that it has alone, in a step that gathers or does not."""
    xs, at = rows_of(kinds, HARD)
    masks = np.stack([packed_mask(HARD, [int(x.argmax())] if i % 2 else ()) for i, x in enumerate(xs)])
    case, whole = PartsCase(ranks, kinds, HARD, SEEN, SAID), Case(kinds, HARD, SEEN, SAID)
    expected = whole.tokens(xs, at)
    assert case.tokens(xs, at) == expected
    filters = whole.filters | Filters(mask=True)
    assert case.tokens(xs, at, filters, masks) == whole.tokens(xs, at, filters, masks)
    for i, params in enumerate(kinds):
        alone = PartsCase(ranks, [params], HARD, SEEN, SAID)
        assert alone.tokens(xs[i:i + 1], at[i]) == [expected[i]]
