"""Order between the nodes of a graph, and between graphs and streams: found without, clean with."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.runtime.order_case import NBYTES, Bench, N
from tinygrad_nv.runtime.driver import Copy, Executable, Fill, Upload, Work


@pytest.fixture
def bench() -> Bench: return Bench()


def graph(bench: Bench, *nodes: tuple[Work, tuple[int, ...]]) -> Executable:
    """Works, each with the numbers of those that it follows."""
    made, added = bench.gpu.graph(), []
    for work, after in nodes: added.append(made.add(work, [added[i] for i in after]))
    return made.instantiate()


# **** edges ****

@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("second", ["kernel move", "a copy", "a fill", "an upload"])
def test_a_missing_edge(bench: Bench, second: str, edge: bool):
    a, b, c, host = bench.a, bench.b, bench.c, bench.gpu.host(NBYTES)
    works: dict[str, Work] = {"kernel move": bench.move(b, c), "a copy": Copy(b, c, NBYTES),
                              "a fill": Fill(b, 0, NBYTES), "an upload": Upload(b, host, 0, NBYTES)}
    graph(bench, (bench.move(b, a), ()), (works[second], (0,) if edge else ())).launch(bench.s)
    assert bench.said() == ("" if edge else
        f"order: kernel move (node 0 of a graph) writes, and {second} (node 1 of a graph) writes, bytes 0 to "
        f"255 of the 256 allocated at {b:#x}, and nothing orders the two: add an edge from node 0 to node 1")
    assert bench.said() == ""


def test_a_path_of_edges_orders(bench: Bench):
    nodes = ((bench.move(bench.b, bench.a), ()), (Fill(bench.c, 0, 4), (0,)),
             (Copy(bench.a, bench.b, NBYTES), (1,)))
    graph(bench, *nodes).launch()
    assert bench.said() == ""
    graph(bench, nodes[0], nodes[1], (nodes[2][0], ())).launch()
    assert bench.said().count("order: ") == 1   # two buffers, one pair


def test_branches_over_halves(bench: Bench):
    halves = [(bench.move(bench.b + at, bench.a + at, threads=32), (0,)) for at in (0, 128)]
    first, last = (Fill(bench.a, 1, NBYTES), ()), (bench.move(bench.c, bench.b), (1, 2))
    graph(bench, first, *halves, last).launch()
    assert bench.said() == ""
    graph(bench, first, *halves, (last[0], (1,))).launch()
    assert "bytes 128 to 255 of the 256" in bench.said()


# **** when nodes are compared ****

def test_an_update_to_an_overlapping_buffer(bench: Bench):
    made = bench.gpu.graph()
    one, two = (made.add(bench.move(out, bench.a)) for out in (bench.b, bench.c))
    executable = made.instantiate()
    for _ in range(2): executable.launch()
    assert bench.said() == ""
    executable.update(two, bench.move(bench.b, bench.a))
    executable.launch()
    assert "(node 0 of a graph) writes, and kernel move (node 1 of a graph) writes" in bench.said()
    executable.launch()
    assert bench.said() == ""   # told once
    executable.update(one, bench.move(bench.c, bench.a))
    executable.launch()
    assert bench.said() == ""


def test_bytes_that_data_decides(bench: Bench):
    """One node reads a word of b that an index names, the other writes half of b."""
    index = bench.buffer(np.array([40]))
    executable = graph(bench, (bench.launch("pick", bench.c, bench.b, index), ()),
                       (bench.move(bench.b, bench.a, threads=32), ()))
    executable.launch()
    assert bench.said() == ""
    bench.gpu.copy_in(index, memoryview(np.array([20], "<u4")).cast("B"))
    executable.launch()
    assert "kernel pick (node 0 of a graph) reads, and kernel move (node 1 of a graph) writes, bytes 80 to " \
        in bench.said()


# **** graphs and streams ****

@pytest.mark.parametrize("ordered", [False, True])
def test_a_graph_and_a_stream(bench: Bench, ordered: bool):
    executable = graph(bench, (Fill(bench.c, 0, NBYTES), ()), (bench.move(bench.b, bench.a), ()))
    executable.launch(bench.s)
    if ordered: bench.then(bench.s, bench.t)
    bench.gpu.submit(Copy(bench.a, bench.b, NBYTES), bench.t)
    if ordered: bench.then(bench.t, bench.s)
    executable.launch(bench.s)
    said = bench.said()
    assert (said == "") is ordered
    assert ordered or "a copy reads, and kernel move (node 1 of a graph) writes, bytes 0 to 255" in said
    assert ordered or "kernel move (node 1 of a graph) reads, and a copy writes, bytes 0 to 255" in said


@pytest.mark.parametrize("same", [False, True])
def test_launches_of_one_graph_do_not_overlap(bench: Bench, same: bool):
    nodes = [(bench.move(bench.b, bench.a), ())]
    first = graph(bench, *nodes)
    first.launch(bench.s)
    (first if same else graph(bench, *nodes)).launch(bench.t)
    assert (bench.said() == "") is same


# **** captures ****

@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("join", [False, True])
def test_a_capture_forks_and_joins(bench: Bench, fork: bool, join: bool):
    """a to b; b to c in the other stream; c to a. `fork`: the event comes after b is written, not before;
    `join`: the last work comes after the wait, not before."""
    gpu, s, t = bench.gpu, bench.s, bench.t
    gpu.begin_capture(s)
    if not fork: bench.then(s, t)
    gpu.submit(bench.move(bench.b, bench.a), s)
    if fork: bench.then(s, t)
    gpu.submit(bench.move(bench.c, bench.b), t)
    if join: bench.then(t, s)
    gpu.submit(bench.move(bench.a, bench.c), s)
    if not join: bench.then(t, s)
    executable = gpu.end_capture(s).instantiate()
    assert bench.said() == ""   # nothing has run
    executable.launch(s)
    said = bench.said()
    assert ("add an edge from node 0 to node 1" in said) is not fork
    assert ("add an edge from node 1 to node 2" in said) is not join
    if fork and join: assert (bench.read(bench.a) == np.arange(N) + 3).all()


def test_memory_that_only_reads_share_is_not_compared(bench: Bench):
    made = graph(bench, *((bench.move(out, bench.a), ()) for out in (bench.b, bench.c)))
    made.launch()
    assert bench.said() == ""


def test_unchecked_graphs_say_nothing():
    bench = Bench(check=False)
    graph(bench, (bench.move(bench.b, bench.a), ()), (bench.move(bench.b, bench.c), ())).launch()
    assert bench.said() == ""
