"""Packing: TRL's documented results, what must hold for any lengths, and best fit by search."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.train.data.packing import Plan, alone, best_fit, pieces, wrap

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


def tokens(plan: Plan, documents: list[list[int]]) -> list[list[list[int]]]:
    """The rows, each a list of segments."""
    return [[documents[plan.documents[piece]][plan.begins[piece]:plan.begins[piece] + plan.counts[piece]]
             for piece in plan.pieces(row)] for row in range(len(plan))]


def documents(lengths: list[int]) -> list[list[int]]:
    return [[1000 * number + token for token in range(length)] for number, length in enumerate(lengths)]


# the examples of TRL's `pack_dataset`
EXAMPLE = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]


@pytest.mark.parametrize(("split", "rows"), [
    (False, [[[1, 2, 3, 4]], [[8, 9, 10], [11]], [[6, 7]]]), (True, [[[1, 2, 3, 4]], [[8, 9, 10], [5]],
                                                                     [[6, 7], [11]]])])
def test_best_fit_is_that_of_trl(split: bool, rows: Any):
    plan = best_fit(pieces(np.array([len(each) for each in EXAMPLE]), 4, split), 4)
    assert tokens(plan, EXAMPLE) == rows
    assert plan.tokens.tolist() == [sum(map(len, row)) for row in rows]


def slow_best_fit(lengths: list[int], most: int) -> list[list[int]]:
    """Every row is looked at for every document; of equal rooms, the one that has had it longest."""
    rows: list[tuple[int, int, list[int]]] = []     # room, since when, documents
    for step, number in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        fitting = [row for row in rows if row[0] >= lengths[number]]
        room, _, found = min(fitting, key=lambda row: row[:2], default=(most, 0, []))
        place = next((place for place, row in enumerate(rows) if row[2] is found), len(rows))
        rows[place:place + 1] = [(room - lengths[number], step, found)]
        found.append(number)
    return [row for _, _, row in rows]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_best_fit_is_that_of_a_search(lengths: list[int]):
    plan = best_fit(pieces(np.array(lengths), 20, False), 20)
    found = [[int(plan.documents[piece]) for piece in plan.pieces(row)] for row in range(len(plan))]
    assert found == slow_best_fit(lengths, 20)


@given(LENGTHS, st.integers(2, 30), st.sampled_from(["alone", "best_fit", "wrapped"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_token_is_lost_or_doubled(lengths: list[int], most: int, how: str, split: bool):
    given_documents, counts = documents(lengths), np.array(lengths)
    order = np.random.default_rng(len(lengths)).permutation(len(lengths))
    made = pieces(counts, most, split)
    plan = {"alone": lambda: alone(made), "best_fit": lambda: best_fit(made, most),
            "wrapped": lambda: wrap(counts, order, most)}[how]()
    rows = tokens(plan, given_documents)
    found = sorted(token for row in rows for segment in row for token in segment)
    kept = [each if split or how == "wrapped" else each[:most] for each in given_documents]
    assert found == sorted(token for each in kept for token in each)
    assert all(0 < sum(map(len, row)) <= most for row in rows)
    # a segment is consecutive tokens of one document
    assert all(np.diff(segment).tolist() == [1] * (len(segment) - 1) for row in rows for segment in row)
    if how == "wrapped":
        assert [token for row in rows for segment in row for token in segment] == [
            token for number in order for token in given_documents[number]]
        assert all(sum(map(len, row)) == most for row in rows[:-1])


def test_a_row_of_wrapped_begins_where_the_one_before_ended():
    plan = wrap(np.array([3, 0, 6, 2]), np.array([2, 3, 1, 0]), 4)
    assert tokens(plan, documents([3, 0, 6, 2])) == [[[2000, 2001, 2002, 2003]], [[2004, 2005], [3000, 3001]],
                                                     [[0, 1, 2]]]


def test_packing_of_many_documents_is_quick():
    lengths = np.random.default_rng(0).integers(1, 2000, 20_000)
    plan = best_fit(pieces(lengths, 4096, False), 4096)
    assert plan.tokens.mean() > 0.99 * 4096
