"""Order between streams and between the nodes of a graph: what nothing orders is found, and the same with an
event or an edge is clean."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tests.support.runtime.order_case import NBYTES, Bench, N
from tinygrad_nv.errors import KernelError
from tinygrad_nv.runtime.driver import Copy, Download, Executable, Fill, Stream, Upload, Work
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver


@pytest.fixture
def bench() -> Bench: return Bench()


# what touches buffer b, as a work or, of the host, as a call
WORKS: dict[str, Callable[[Bench], Work | Callable[[Stream], object]]] = {
    "kernel move writes": lambda x: x.move(x.b, x.a),
    "kernel move reads": lambda x: x.move(x.gpu.alloc(NBYTES), x.b),
    "kernel tally updates": lambda x: x.launch("tally", x.b),
    "a copy writes": lambda x: Copy(x.b, x.a, NBYTES),
    "a copy reads": lambda x: Copy(x.gpu.alloc(NBYTES), x.b, NBYTES),
    "a fill writes": lambda x: Fill(x.b, 0, NBYTES),
    "an upload writes": lambda x: Upload(x.b, x.gpu.host(NBYTES), 0, NBYTES),
    "a download reads": lambda x: Download(x.gpu.host(NBYTES), 0, x.b, NBYTES),
    "a copy from the host writes": lambda x: partial(x.gpu.copy_in, x.b, memoryview(bytes(NBYTES))),
    "a copy to the host reads": lambda x: partial(x.read, x.b),
}
WRITE, READ = "kernel move writes", "kernel move reads"


def submit(bench: Bench, name: str, stream: Stream) -> str:
    """Submits; returns what the device says at once: a copy to the host waits."""
    work = WORKS[name](bench)
    if not callable(work): bench.gpu.submit(work, stream)
    else:
        try: work(stream)
        except KernelError as error: return error.found
    return ""


@pytest.mark.parametrize("second", WORKS)
@pytest.mark.parametrize("first", WORKS)
def test_a_missing_event_is_found(bench: Bench, first: str, second: str):
    submit(bench, first, bench.s)
    said = submit(bench, second, bench.t) or bench.said(bench.t)
    conflict = not first.endswith("reads") or not second.endswith("reads")
    known = first == "a copy to the host reads"     # the host has waited for it
    if known or not conflict or first == second == "kernel tally updates": assert said == ""
    else:
        one, other = second.rpartition(" ")[0], first.rpartition(" ")[0]
        assert said == (
            f"order: {second}, and {first}, bytes 0 to 255 of the 256 allocated at {bench.b:#x}, and nothing "
            f"orders the two: record an event in stream 1 after {other}, and let stream 2 wait for it before "
            f"{one}")
    assert bench.said() == ""   # told once


@pytest.mark.parametrize("second", WORKS)
@pytest.mark.parametrize("first", WORKS)
def test_an_event_orders(bench: Bench, first: str, second: str):
    submit(bench, first, bench.s)
    bench.then(bench.s, bench.t)
    assert submit(bench, second, bench.t) == bench.said() == ""


@pytest.mark.parametrize("cure", ["one stream", "synchronize", "synchronize all", "wait_for", "third stream"])
def test_what_orders_too(bench: Bench, cure: str):
    gpu, between = bench.gpu, bench.gpu.stream()
    submit(bench, WRITE, bench.s)
    if cure == "synchronize": gpu.synchronize(bench.s)
    elif cure == "synchronize all": gpu.synchronize()
    elif cure == "wait_for": gpu.wait_for(bench.event(bench.s))
    elif cure == "third stream":
        bench.then(bench.s, between)
        bench.then(between, bench.t)
    submit(bench, READ, bench.s if cure == "one stream" else bench.t)
    assert bench.said() == ""


# **** events that do not do it ****

def test_an_event_recorded_too_early(bench: Bench):
    event = bench.event(bench.s)
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.wait(event, bench.t)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert "kernel move reads, and kernel move writes, bytes 0 to 255 " in bench.said()


def test_an_event_stands_for_when_it_was_recorded_last(bench: Bench):
    event = bench.event(bench.s)
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.record(event, bench.s)
    bench.gpu.wait(event, bench.t)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert bench.said() == ""


def test_an_older_event_takes_nothing_back(bench: Bench):
    older = bench.event(bench.s)
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    for event in (bench.event(bench.s), older): bench.gpu.wait(event, bench.t)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert bench.said() == ""


def test_the_wrong_stream_waits(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.then(bench.s, bench.gpu.stream())
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert "order: " in bench.said()


def test_a_wait_after_the_work(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    bench.then(bench.s, bench.t)
    assert "order: " in bench.said()


def test_the_host_waits_for_the_wrong_stream(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.synchronize(bench.t)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert "order: " in bench.said()


def test_the_host_waits_for_an_event_too_early(bench: Bench):
    event = bench.event(bench.s)
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.wait_for(event)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert "order: " in bench.said()


def test_what_the_host_waits_for_includes_what_that_waited_for(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.then(bench.s, bench.t)
    bench.gpu.synchronize(bench.t)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.gpu.stream())
    assert bench.said() == ""


@pytest.mark.parametrize("synchronized", [False, True])
def test_a_new_stream_follows_nothing(bench: Bench, synchronized: bool):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    if synchronized: bench.gpu.synchronize()
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.gpu.stream())
    assert (bench.said() == "") is synchronized


def test_older_work_is_not_forgotten(bench: Bench):
    """The event covers the last work over these bytes, and not the one before over others."""
    gpu, move = bench.gpu, bench.move
    for _ in range(3): gpu.submit(move(bench.b, bench.a), bench.s)
    event = bench.event(bench.s)
    gpu.submit(move(bench.b + 128, bench.a, threads=32), bench.s)
    gpu.wait(event, bench.t)
    gpu.submit(move(bench.c, bench.b, threads=32), bench.t)
    assert bench.said() == ""
    gpu.submit(move(bench.b + 128, bench.a, threads=32), bench.s)
    gpu.submit(move(bench.c, bench.b + 4, threads=32), bench.t)
    assert "reads, and kernel move writes, bytes 128 to 131 of the 256 allocated at" in bench.said()


def test_other_bytes_are_not_forgotten(bench: Bench):
    for at in (0, 128): bench.gpu.submit(bench.move(bench.b + at, bench.a, threads=32), bench.s)
    bench.gpu.submit(bench.move(bench.c, bench.b, threads=32), bench.t)
    assert "bytes 0 to 127 of the 256 allocated at" in bench.said()


@pytest.mark.parametrize(("at", "deeds"), [(0, "a fill writes, and a copy reads, bytes 0 to 3 "),
                                           (128, "a fill writes, and a copy writes, bytes 128 to 131 ")])
def test_a_copy_within_a_buffer(bench: Bench, at: int, deeds: str):
    bench.gpu.submit(Copy(bench.b + 128, bench.b, 128), bench.s)
    bench.gpu.submit(Fill(bench.b + at, 0, 4), bench.t)
    assert deeds in bench.said()


# **** no conflict ****

def test_both_read(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(bench.move(bench.c, bench.a), bench.t)
    assert bench.said() == ""


def test_both_are_atomic(bench: Bench):
    for stream in (bench.s, bench.t): bench.gpu.submit(bench.launch("tally", bench.b), stream)
    assert bench.said() == ""
    assert (bench.read(bench.b) == np.arange(N) + 2).all()


@pytest.mark.parametrize(("first", "clean"), [(32, True), (33, False)])
def test_halves_of_one_buffer(bench: Bench, first: int, clean: bool):
    bench.gpu.submit(bench.move(bench.b, bench.a, threads=first), bench.s)
    bench.gpu.submit(bench.move(bench.b + 128, bench.a, threads=32), bench.t)
    assert (said := bench.said()) == "" or not clean
    assert clean or "bytes 128 to 131 of the 256 allocated at" in said


def test_columns_of_one_buffer(bench: Bench):
    """Copies of every second word."""
    for i in range(0, N, 2):
        bench.gpu.submit(Copy(bench.b + 4 * i, bench.a, 4), bench.s)
        bench.gpu.submit(Copy(bench.b + 4 * i + 4, bench.a, 4), bench.t)
    assert bench.said() == ""
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    bench.gpu.submit(Copy(bench.b + 4, bench.a, 4), bench.s)
    assert "bytes 4 to 7 of" in bench.said()


def test_memory_is_freed_after_the_work_issued_before(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.free(bench.b)
    assert {memory.ptr for memory in bench.s.log} == {bench.a}
    assert bench.said() == ""


def test_unchecked_devices_say_nothing():
    bench = Bench(check=False)
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(bench.move(bench.c, bench.b), bench.t)
    assert bench.said() == ""
    assert not any(stream.log for stream in bench.gpu.streams)


def test_what_the_host_knows_is_forgotten(bench: Bench):
    for _ in range(3): bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    assert sum(len(each) for each in bench.s.log.values()) == 2     # one for each buffer
    bench.gpu.synchronize(bench.s)
    assert not bench.s.log


# **** two devices ****

@pytest.mark.parametrize(("event", "clean"), [(False, False), (True, True)])
def test_copies_between_devices_follow_stream_0(bench: Bench, event: bool, clean: bool):
    other = EmulatedDriver()
    source, stream = other.alloc(NBYTES), other.stream()
    other.submit(Fill(source, 1, NBYTES), stream)
    if event:
        mark = other.event()
        other.record(mark, stream)
        other.wait(mark)
    bench.gpu.copy_peer(Copy(bench.b, source, NBYTES), other)
    other.submit(Fill(source, 2, NBYTES))   # comes later
    if clean: other.synchronize()
    assert (bench.said() == "") is clean
    assert (bench.read(bench.b) == 0x01010101).all()


def test_copies_between_devices_hold_their_source(bench: Bench):
    other = EmulatedDriver()
    source = other.alloc(NBYTES)
    other.submit(Fill(source, 1, NBYTES))
    other.synchronize()
    bench.gpu.copy_peer(Copy(bench.b, source, NBYTES), other)
    other.submit(Fill(source, 2, NBYTES), other.stream())
    with pytest.raises(KernelError, match="a fill writes, and a copy from another device reads, bytes 0 to "):
        other.synchronize()


# **** nodes of graphs ****

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
