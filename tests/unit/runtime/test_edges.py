"""Edges of graphs: the transitive reduction, and which edges are programmatic."""
from __future__ import annotations

import random
from itertools import combinations

import pytest

from tinygrad_nv.runtime.driver import Attributes, Copy, Fill, Function, Launch, Work
from tinygrad_nv.runtime.edges import EdgeChain, EdgeCounts, early, reduce_edges
from tinygrad_nv.runtime.library_call import LibraryCall

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
    assert reduce_edges(after) == wanted


@pytest.mark.parametrize("seed", range(40))
def test_the_least_edges_of_the_same_order(seed):
    """Random graphs: what comes before a node stays, and no edge can be left out."""
    random.seed(seed)
    count, dense = random.randrange(1, 16), random.random()
    after = [tuple(n for n in range(i) if random.random() < dense) for i in range(count)]
    least = reduce_edges(after)
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


def launch(ctas: int, pdl: bool = True) -> Launch: return Launch(FUNCTION, (ctas, 1, 1), (32, 1, 1), pdl=pdl)


def chained(*nodes: tuple[Work, tuple[int, ...]],
            sm_count: int = 8) -> tuple[list[tuple[int, ...]], EdgeChain]:
    chain = EdgeChain(sm_count)
    return [chain.add(work, after) for work, after in nodes], chain


def test_large_launches_are_a_chain():
    """q, k and v after one norm, then what needs all three: without the chain one edge would be early."""
    after, chain = chained((launch(8), ()), (launch(9), (0,)), (launch(9), (0,)), (launch(9), (0,)),
                           (launch(8), (1, 2, 3)))
    assert after == [(), (0,), (1,), (2,), (3,)]
    assert chain.counts == EdgeCounts(launches=5, edges=4, programmatic=4, chained=2)


def test_small_independent_launches_run_side_by_side():
    after, chain = chained((launch(8), ()), (launch(3), (0,)), (launch(5), (0,)), (launch(1), (0,)),
                           (launch(8), (1, 2, 3)))
    assert after == [(), (0,), (0,), (0,), (1, 2, 3)]  # the fourth would be the ninth CTA; 1 and 2 are no one
    assert chain.counts == EdgeCounts(launches=5, edges=6, programmatic=3, beside=1)


def test_a_launch_is_not_beside_what_it_follows_by_way_of_a_fill():
    after, chain = chained((launch(1), ()), (Fill(0, 0, 4), (0,)), (launch(1), (1,)), (launch(1), ()))
    assert after == [(), (0,), (1,), (0,)]
    assert chain.counts == EdgeCounts(launches=3, edges=3, programmatic=1, chained=1, beside=1)


def test_a_grid_that_is_not_known_is_a_large_one():
    chain = EdgeChain(8)
    assert [chain.add(launch(1), (), fills=True) for _ in range(3)] == [(), (0,), (1,)]


def test_launches_without_pdl_follow_their_data_alone():
    after, chain = chained((launch(9, pdl=False), ()), (launch(9, pdl=False), ()), (launch(9), ()))
    assert after == [(), (), (1,)]
    assert chain.counts == EdgeCounts(launches=3, edges=1, programmatic=1, chained=1)


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_keeps_the_order_that_data_asks_for(seed):
    random.seed(seed)
    chain, wanted = EdgeChain(8), []
    after = []
    for i in range(20):
        work = random.choice([launch(random.randrange(1, 12), random.random() < 0.9), Fill(0, 0, 4)])
        wanted.append(tuple(n for n in range(i) if random.random() < 0.2))
        after.append(chain.add(work, wanted[-1], random.random() < 0.1))
    assert all(need <= have for need, have in zip(reach(wanted), reach(after), strict=True))
    assert after == reduce_edges(after)
    early_ones = [early(chain.works[i], [chain.works[n] for n in numbers]) for i, numbers in enumerate(after)]
    assert (chain.counts.edges, chain.counts.programmatic) == (sum(map(len, after)), sum(early_ones))


def test_collectives_follow_one_another():
    """Launches that other processes run, too, and calls of libraries: in the order in which they came,
    whatever else they need. Others do not follow them."""
    collective = Launch(FUNCTION, (1, 1, 1), (32, 1, 1), given=lambda event, new: None)
    call = LibraryCall("a call", (), (), lambda stream: None)
    after, _ = chained((collective, ()), (PLAIN, ()), (call, ()), (collective, (1,)))
    assert after == [(), (), (0,), (1, 2)]
