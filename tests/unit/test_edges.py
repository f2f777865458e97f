"""Edges of graphs: the transitive reduction, and which edges are programmatic."""
from __future__ import annotations

import random
from itertools import combinations

import pytest

from tinygrad_nv.runtime.driver import Attributes, Copy, Fill, Function, Launch
from tinygrad_nv.runtime.edges import early, reduced

FUNCTION = Function("k", Attributes(0, 0, 0, 1024), None)
PLAIN, PDL = (Launch(FUNCTION, (1, 1, 1), (32, 1, 1), pdl=pdl) for pdl in (False, True))


def reach(after: list[tuple[int, ...]]) -> list[set[int]]:
    """The nodes before each node, by the definition."""
    out: list[set[int]] = []
    for numbers in after: out.append(set(numbers).union(*(out[number] for number in numbers)))
    return out


@pytest.mark.parametrize(("after", "wanted"), [
    ([()], [()]),
    ([(), (0,), (0, 1)], [(), (0,), (1,)]),
    ([(), (), (0, 1), (2, 1, 0)], [(), (), (0, 1), (2,)]),
    ([(), (0,), (0,), (0, 1, 2)], [(), (0,), (0,), (1, 2)]),
    ([(), (0, 0), (1, 1)], [(), (0,), (1,)]),
])
def test_known_reductions(after, wanted):
    assert reduced(after) == wanted


@pytest.mark.parametrize("seed", range(40))
def test_the_least_edges_of_the_same_order(seed):
    """Random graphs: what comes before a node stays, and no edge can be left out."""
    random.seed(seed)
    count, dense = random.randrange(1, 16), random.random()
    after = [tuple(n for n in range(i) if random.random() < dense) for i in range(count)]
    least = reduced(after)
    assert reach(least) == reach(after)
    for node, numbers in enumerate(least):
        for kept in combinations(numbers, len(numbers) - 1 if numbers else 0):
            fewer = [*least[:node], kept, *least[node + 1:]]
            assert not numbers or reach(fewer) != reach(after)


def test_which_edges_are_programmatic():
    copy, fill = Copy(0, 256, 16), Fill(0, 0, 16)
    assert early(PDL, [PLAIN])
    assert early(PDL, [PDL])
    assert not any(early(PDL, before) for before in ([], [copy], [fill], [PLAIN, PLAIN], [PLAIN, fill]))
    assert not any(early(work, [PLAIN]) for work in (PLAIN, copy, fill))
