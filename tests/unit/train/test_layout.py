"""Which rank is what."""
from __future__ import annotations

from itertools import product

import pytest

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import AXES, Layout, Place, layout_of


def test_places() -> None:
    """The tensor axis counts fastest, the data axis slowest."""
    layout = Layout(data=2, pipeline=1, context=3, tensor=2)
    assert layout.size == 12
    assert [layout.place(rank) for rank in (0, 1, 2, 6, 11)] == [
        Place(), Place(tensor=1), Place(context=1), Place(data=1), Place(1, 0, 2, 1)]
    assert [layout.rank(layout.place(rank)) for rank in range(12)] == list(range(12))
    assert list(layout.axes) == list(AXES)


def test_members() -> None:
    """Ranks that differ in some axes alone; together they are all, each once."""
    layout = Layout(2, 2, 1, 3)
    assert layout.members(4, "tensor") == (3, 4, 5)
    assert layout.members(4, "data") == (4, 10)
    assert layout.members(4, "tensor", "data") == layout.members(4, "data", "tensor") == (3, 4, 5, 9, 10, 11)
    assert layout.members(4) == (4,)
    for axes in product(AXES, AXES):
        found = sorted({layout.members(rank, *axes) for rank in range(12)})
        assert sorted(rank for each in found for rank in each) == list(range(12))


def test_what_counts_once() -> None:
    layout = Layout(data=2, tensor=2)
    assert [layout.counts(rank) for rank in range(4)] == [True, False, True, False]
    assert [layout.keeper(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_started_ranks() -> None:
    for given, started, data in ((0, 1, 1), (0, 3, 3), (3, 3, 3)):
        assert layout_of(TrainingArguments(data_parallel_size=given), started) == Layout(data=data)
    with pytest.raises(ConfigError, match="3 ranks"): layout_of(TrainingArguments(data_parallel_size=3), 2)
