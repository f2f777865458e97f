"""Launches that begin before the kernel ahead has ended: what they do before they have waited is found."""
from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.runtime.order_case import NBYTES, Bench, N, kernel, mine
from tinygrad_nv.ptx.builder import Barriers, Kernel
from tinygrad_nv.ptx.builder.values import Value
from tinygrad_nv.runtime.driver import Copy, Executable, Fill, Launch, TensorMapSpec, pointer

EARLY = "is not ordered after griddepcontrol.wait: it is"
Write = Callable[[Kernel, Value, Value], None]     # of a kernel, which has pointers out and source


@pytest.fixture
def bench() -> Bench: return Bench()


def load(k: Kernel, source: Value) -> Value: return k.ld("global", "u32", mine(k, source).at())[0]


def store(k: Kernel, out: Value, value: Value) -> None: k.st("global", "u32", mine(k, out).at(), value)


def launch(bench: Bench, write: Write, out: int, source: int, pdl: bool = True, ctas: int = 1) -> Launch:
    text = kernel("dependent", lambda k: write(k, k.pointer("out"), k.pointer("source")))
    function = bench.gpu.load(text).function("dependent")
    return Launch(function, (ctas, 1, 1), (N, 1, 1), (pointer(out), pointer(source)), pdl=pdl)


# **** what is before the wait: b = a + 1 is ahead, and c = b follows ****

def waits_first(k: Kernel, out: Value, source: Value) -> None:
    k.wait_for_previous_grid()
    store(k, out, load(k, source))


def reads_early(k: Kernel, out: Value, source: Value) -> None:
    value = load(k, source)
    k.wait_for_previous_grid()
    store(k, out, value)


def never_waits(k: Kernel, out: Value, source: Value) -> None: store(k, out, k.tid.x)


def one_waits(k: Kernel, out: Value, source: Value) -> None:
    with k.if_(k.tid.x == 0): k.wait_for_previous_grid()
    store(k, out, load(k, source))


def one_waits_for_all(k: Kernel, out: Value, source: Value) -> None:
    with k.if_(k.tid.x == 0): k.wait_for_previous_grid()
    k.sync()
    store(k, out, load(k, source))


def one_waits_for_its_warp(k: Kernel, out: Value, source: Value) -> None:
    with k.if_((k.tid.x & 31) == 0): k.wait_for_previous_grid()
    k.emit("bar.warp.sync", 0xffffffff)
    store(k, out, load(k, source))


def first_lanes_wait(k: Kernel, out: Value, source: Value) -> None:
    with k.if_((k.tid.x & 31) == 0): k.wait_for_previous_grid()
    store(k, out, load(k, source))


def one_waits_then_its_warp_alone(k: Kernel, out: Value, source: Value) -> None:
    """The other warp has synchronised with no warp that waited."""
    with k.if_(k.tid.x == 0): k.wait_for_previous_grid()
    k.emit("bar.warp.sync", 0xffffffff)
    store(k, out, load(k, source))


def ended(k: Kernel) -> Barriers:
    """A barrier that one thread arrives at, made."""
    barriers = k.mbarriers("ended", 1)
    with k.if_(k.tid.x == 0):
        k.mbarrier_init(barriers[0], 1)
        k.fence_mbarrier_init()
    k.sync()
    return barriers


def one_arrives(k: Kernel, out: Value, source: Value) -> None:
    barriers = ended(k)
    with k.if_(k.tid.x == 0):
        k.wait_for_previous_grid()
        k.mbarrier_arrive(barriers[0])
    k.mbarrier_wait(barriers[0], 0)
    store(k, out, load(k, source))


def one_arrives_early(k: Kernel, out: Value, source: Value) -> None:
    barriers = ended(k)
    with k.if_(k.tid.x == 0):
        k.mbarrier_arrive(barriers[0])
        k.wait_for_previous_grid()
    k.mbarrier_wait(barriers[0], 0)
    store(k, out, load(k, source))


def one_publishes(k: Kernel, out: Value, source: Value) -> None:
    flag = k.shared("flag", 4)
    with k.if_(k.tid.x == 0): k.st("shared", "u32", flag.at(), 0)
    k.sync()
    with k.if_(k.tid.x == 0):
        k.wait_for_previous_grid()
        k.emit("st.release.cta.shared.u32", flag.at(), 1)
    seen = k.reg("u32", 0)
    with k.while_(lambda: seen == 0): k.emit("ld.acquire.cta.shared.u32", seen, flag.at())
    store(k, out, load(k, source))


def copies_early(k: Kernel, out: Value, source: Value) -> None:
    tile = k.shared("tile", NBYTES)
    with k.if_(k.tid.x < N // 4):
        at = k.tid.x * 16
        k.cp_async(tile.address(at).at(), (source + at.to("u64")).at(), 16)
        k.cp_async_commit()
        k.cp_async_wait()
    k.wait_for_previous_grid()
    k.sync()
    store(k, out, k.ld("shared", "u32", tile.address(k.tid.x * 4).at())[0])


CLEAN = (waits_first, one_waits_for_all, one_waits_for_its_warp, one_arrives, one_publishes)
FOUND = (reads_early, one_waits, first_lanes_wait, one_waits_then_its_warp_alone, one_arrives_early,
         copies_early)


def name(value: object) -> str: return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("write", CLEAN, ids=name)
def test_what_comes_after_the_wait_is_clean(bench: Bench, write: Write):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(launch(bench, write, bench.c, bench.b))
    assert bench.said() == ""
    assert (bench.read(bench.c) == np.arange(N) + 1).all()


@pytest.mark.parametrize("write", FOUND, ids=name)
def test_what_comes_before_the_wait_is_found(bench: Bench, write: Write):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(launch(bench, write, bench.c, bench.b))
    said = bench.said()
    at, line = f"{bench.b:#x}"[:-2], "cp.async" if write is copies_early else "ld.global"
    assert re.fullmatch(rf"kernel dependent: race: line (\d+): a read of global memory at {at}.. {EARLY} "
                        rf"written by kernel move, which may still run \[.*\n    \1: {line}.*;", said)
    assert bench.said() == ""


def test_a_tile_that_is_asked_for_early(bench: Bench):
    """By TMA, before and after the wait."""
    for late in (False, True):
        k = Kernel("dependent", arch="sm_90a", threads=N)
        source, tile, barrier = k.tensor_map("source"), k.shared("tile", NBYTES, 128), k.mbarriers("full", 1)
        with k.if_(k.tid.x == 0):
            k.mbarrier_init(barrier[0], 1)
            k.fence_mbarrier_init()
            k.mbarrier_expect(barrier[0], NBYTES)
            if late: k.wait_for_previous_grid()
            k.tma_load(tile.at(), source, [0], barrier[0])
            if not late: k.wait_for_previous_grid()
        k.sync()
        k.mbarrier_wait(barrier[0], 0)
        tensor_map = bench.gpu.tensor_map(TensorMapSpec("u32", bench.b, (N,), (), (N,)))
        bench.gpu.submit(bench.move(bench.b, bench.a))
        function = bench.gpu.load(k.ptx().encode()).function("dependent")
        bench.gpu.submit(Launch(function, (1, 1, 1), (N, 1, 1), (tensor_map,), pdl=True))
        said = bench.said()
        assert said == "" if late else "cp.async.bulk.tensor" in said and EARLY in said


# **** writes ****

def writes_early(k: Kernel, out: Value, source: Value) -> None:
    store(k, out, k.tid.x)
    k.wait_for_previous_grid()


def counts_early(k: Kernel, out: Value, source: Value) -> None:
    k.emit("red.global.add.u32", mine(k, out).at(), 1)
    k.wait_for_previous_grid()


@pytest.mark.parametrize(("ahead", "write", "deed", "other"), [
    ("move", writes_early, "a write", "read"), ("move", counts_early, "an atomic access", "read"),
    ("move", reads_early, "", ""), ("tally", writes_early, "a write", "written"),
    ("tally", reads_early, "a read", "written"), ("tally", counts_early, "", ""),
    ("other", writes_early, "", ""), ("other", counts_early, "", "")], ids=name)
def test_early_writes(bench: Bench, ahead: str, write: Write, deed: str, other: str):
    """To a, which the kernel ahead reads, or counts in, or leaves alone."""
    works = {"move": bench.move(bench.b, bench.a), "tally": bench.launch("tally", bench.a),
             "other": bench.move(bench.b, bench.c)}
    bench.gpu.submit(works[ahead])
    early = (bench.c, bench.a) if write is reads_early else (bench.a, bench.c)
    bench.gpu.submit(launch(bench, write, *early))
    said, at = bench.said(), f"{bench.a:#x}"[:-2]
    if not deed: assert said == ""
    else: assert re.search(f": {deed} of global memory at {at}.. {EARLY} {other} by kernel {ahead}, ", said)


# **** everybody waits ****

def test_a_kernel_that_never_waits(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(launch(bench, never_waits, bench.c, bench.b))
    said = bench.said()
    assert "kernel dependent: barrier: line " in said
    assert "the CTA ends without griddepcontrol.wait" in said
    assert "\n" in said
    assert said.rstrip().endswith("ret;")


def test_each_cta_waits(bench: Bench):
    def first_waits(k: Kernel, out: Value, source: Value) -> None:
        with k.if_(k.ctaid.x != 1): waits_first(k, out + k.ctaid.x.to("u64") * NBYTES, source)
    big = bench.buffer(np.zeros(3 * N))
    bench.gpu.synchronize()
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(launch(bench, first_waits, big, bench.b, ctas=3))
    assert "the CTA ends without griddepcontrol.wait" in (said := bench.said())
    assert "[CTA 1; " in said
    assert "times)" not in said


def test_without_pdl_nothing_is_early(bench: Bench):
    for write in (reads_early, never_waits):
        bench.gpu.submit(bench.move(bench.b, bench.a))
        bench.gpu.submit(launch(bench, write, bench.c, bench.b, pdl=False))
    assert bench.said() == ""


def test_unchecked_devices_still_want_the_wait():
    bench = Bench(check=False)
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(launch(bench, reads_early, bench.c, bench.b))
    assert bench.said() == ""
    bench.gpu.submit(launch(bench, never_waits, bench.c, bench.b))
    assert "without griddepcontrol.wait" in bench.said()


# **** who is ahead ****

@pytest.mark.parametrize("between", ["nothing", "fill", "graph", "synchronize", "event of the other stream",
                                     "event after it", "other stream's launch"])
def test_who_is_ahead_in_a_stream(bench: Bench, between: str):
    gpu, s, t = bench.gpu, bench.s, bench.t
    gpu.submit(bench.move(bench.b, bench.a), s)
    if between == "fill": gpu.submit(Fill(bench.b, 0, NBYTES), s)
    elif between == "graph": gpu.graph().instantiate().launch(s)
    elif between == "synchronize": gpu.synchronize(s)
    elif between == "event of the other stream": bench.then(t, s)
    elif between == "event after it":
        bench.then(s, t)
        bench.then(t, s)
    elif between == "other stream's launch": gpu.submit(bench.move(gpu.alloc(NBYTES), bench.a), t)
    gpu.submit(launch(bench, reads_early, bench.c, bench.b), s)
    clean = between in ("fill", "graph", "synchronize", "event after it")
    assert (bench.said() == "") is clean


def releases_early(k: Kernel, out: Value, source: Value) -> None:
    k.launch_dependents()
    waits_first(k, out, source)


def releases_twice(k: Kernel, out: Value, source: Value) -> None:
    """The first counts."""
    releases_early(k, out, source)
    k.launch_dependents()


def releases_late(k: Kernel, out: Value, source: Value) -> None:
    waits_first(k, out, source)
    k.launch_dependents()


def releases_in_another_thread(k: Kernel, out: Value, source: Value) -> None:
    with k.if_(k.tid.x == 0): k.wait_for_previous_grid()
    with k.if_(k.tid.x == 32): k.launch_dependents()
    k.sync()
    store(k, out, load(k, source))


def releases_after_meeting(k: Kernel, out: Value, source: Value) -> None:
    with k.if_(k.tid.x == 0): k.wait_for_previous_grid()
    k.sync()
    with k.if_(k.tid.x == 32): k.launch_dependents()
    store(k, out, load(k, source))


def releases_in_some(k: Kernel, out: Value, source: Value) -> None:
    """CTA 1 waits first, so that the next grid begins after that."""
    with k.if_(k.ctaid.x == 0): k.launch_dependents()
    k.wait_for_previous_grid()
    with k.if_(k.ctaid.x == 1): store(k, out, load(k, source))


CHAINS = {releases_early: True, releases_twice: True, releases_late: False, waits_first: False,
          releases_in_another_thread: True, releases_after_meeting: False, releases_in_some: False}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("middle", CHAINS, ids=name)
def test_a_kernel_two_ahead(bench: Bench, middle: Write, graph: bool):
    """b = a + 1; then from a to another buffer, programmatic; then b is read early."""
    other, ctas = bench.gpu.alloc(NBYTES), 2 if middle is releases_in_some else 1
    works = [bench.move(bench.b, bench.a), launch(bench, middle, other, bench.a, ctas=ctas),
             launch(bench, reads_early, bench.c, bench.b)]
    if graph: chain(bench, *works).launch()
    else:
        for work in works: bench.gpu.submit(work)
    said = bench.said()
    assert (said != "") is CHAINS[middle]
    assert not said or f"{EARLY} written by kernel dependent or kernel move, which may still run" in said


# **** graphs ****

def chain(bench: Bench, *works: Launch | Copy | Fill, edges: tuple[tuple[int, ...], ...] = ()) -> Executable:
    """Each after the one before, or after those in `edges`."""
    graph, nodes = bench.gpu.graph(), []
    for i, work in enumerate(works):
        after = edges[i] if edges else tuple(range(i))[-1:]
        nodes.append(graph.add(work, [nodes[each] for each in after]))
    return graph.instantiate()


@pytest.mark.parametrize(("write", "clean"), [(waits_first, True), (reads_early, False)])
def test_an_edge_of_a_graph_is_programmatic(bench: Bench, write: Write, clean: bool):
    executable = chain(bench, bench.move(bench.b, bench.a), launch(bench, write, bench.c, bench.b))
    executable.launch()
    said = bench.said()
    assert (said == "") is clean
    assert clean or f"{EARLY} written by kernel move, which may still run" in said


def test_edges_that_are_not_programmatic(bench: Bench):
    """From two nodes, from a fill, and none."""
    gpu, early = bench.gpu, launch(bench, reads_early, bench.c, bench.b)
    ahead = [bench.move(bench.b, bench.a), Fill(gpu.alloc(4), 0, 4)]
    chain(bench, *ahead, early, edges=((), (), (0, 1))).launch()
    chain(bench, *ahead, early, edges=((), (0,), (1,))).launch()
    chain(bench, early).launch()
    assert bench.said() == ""


def test_an_edge_that_a_path_implies_does_not_count(bench: Bench):
    """The launch follows both, and directly the second alone."""
    between = bench.gpu.alloc(NBYTES)
    first, second = bench.move(between, bench.a), bench.move(bench.b, between)
    early = launch(bench, reads_early, bench.c, bench.b)
    chain(bench, first, second, early, edges=((), (0,), (0, 1))).launch()
    assert EARLY in bench.said()


def test_a_captured_stream_is_programmatic(bench: Bench):
    gpu, s = bench.gpu, bench.s
    gpu.begin_capture(s)
    gpu.submit(bench.move(bench.b, bench.a), s)
    gpu.submit(launch(bench, reads_early, bench.c, bench.b), s)
    gpu.end_capture(s).instantiate().launch(s)
    assert EARLY in bench.said()
