"""NCCL's path on emulated devices, a process for each: what its calls move, in streams and in graphs, and
what they say when ranks differ, give up or end."""
from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from tinygrad import dtypes

from tests.support.dist import forked
from tests.support.dist.forked import Rank
from tinygrad_nv.dist.transports.nccl import CollectiveCall, carrier_of
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.driver import Copy, Fill

DTYPES = {dtypes.float32: np.float32, dtypes.float16: np.float16, dtypes.float64: np.float64,
          dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.int32: np.int32, dtypes.int64: np.int64}


def of(rank: int, count: int, dtype: type = np.float32) -> np.ndarray:
    """What a rank has."""
    return (np.arange(count) * (rank + 2) % 13 + rank).astype(dtype)


def every_kind(here: Rank) -> None:
    """All collectives of all dtypes against NumPy."""
    size, rank, count = here.size, here.rank, 12
    for dtype, kind in DTYPES.items():
        whole = [of(r, count * size, kind) for r in range(size)]
        mine, part = whole[rank], slice(count * rank, count * (rank + 1))
        for op, reduced in (("sum", np.add), ("max", np.maximum), ("min", np.minimum)):
            wanted = reduced.reduce(np.stack(whole)).astype(kind)
            found = here.ran(CollectiveCall("all_reduce", count * size, dtype, op), mine, mine)
            np.testing.assert_array_equal(found, wanted)
            found = here.ran(CollectiveCall("reduce_scatter", count, dtype, op), mine, mine[part])
            np.testing.assert_array_equal(found, wanted[part])
        found = here.ran(CollectiveCall("all_gather", count, dtype), mine[part], mine)
        parts = [w[count * r:count * (r + 1)] for r, w in enumerate(whole)]
        np.testing.assert_array_equal(found, np.concatenate(parts))
        found = here.ran(CollectiveCall("broadcast", count * size, dtype, peer=size - 1), mine, mine)
        np.testing.assert_array_equal(found, whole[-1])
        for version in (22800, 22700):   # by its function, and by sends and receives
            here.comm.nccl.version = version
            found = here.ran(CollectiveCall("all_to_all", count, dtype), mine, mine)
            np.testing.assert_array_equal(found, np.concatenate([w[part] for w in whole]))


def messages(here: Rank) -> None:
    """More than the memory between two ranks holds, around a ring, in one group; 16-bit integers."""
    count, to, source = 100_000, (here.rank + 1) % here.size, (here.rank - 1) % here.size
    mine = of(here.rank, count, np.int16)
    out, given = here.driver.alloc(mine.nbytes), here.placed(mine)
    done = here.driver.alloc(1)
    with here.comm.group("a ring"):
        sends, receives = (CollectiveCall(kind, count, dtypes.int16, peer=peer)
                           for kind, peer in (("send", to), ("recv", source)))
        here.driver.submit(here.comm.call(sends, given, done))
        here.driver.submit(here.comm.call(receives, given, out))
    np.testing.assert_array_equal(here.read(out, mine), of(source, count, np.int16))


def graphs(here: Rank) -> list[int]:
    """Two collectives and copies beside them, three replays, then other memory."""
    driver, comm, count = here.driver, here.comm, 50
    given = of(here.rank, count)
    a, b, c, d = here.placed(given), *(driver.alloc(given.nbytes) for _ in range(3))
    all_reduce = CollectiveCall("all_reduce", count, dtypes.float32)
    graph = driver.graph()
    first = graph.add(comm.call(all_reduce, a, b))
    graph.add(Copy(c, a, given.nbytes))     # beside it
    last = graph.add(comm.call(all_reduce, b, d), [first])
    executable = graph.instantiate()
    for i in range(3):
        driver.copy_in(a, memoryview(given + i).cast("B"))
        executable.launch()
        total = sum(of(r, count) + i for r in range(here.size))
        np.testing.assert_array_equal(here.read(b, given), total)
        np.testing.assert_array_equal(here.read(c, given), given + i)
        np.testing.assert_array_equal(here.read(d, given), total * here.size)
    executable.update(last, comm.call(all_reduce, c, d))
    live = [sum(each() is not None for each in comm.registered.values())]
    del executable, graph
    return [*live, sum(each() is not None for each in comm.registered.values())]


def parts(here: Rank) -> None:
    """Even and odd ranks are communicators of their own."""
    members = [r for r in range(here.size) if r % 2 == here.rank % 2]
    whole, here.comm = here.comm, here.comm.split(here.rank % 2, here.rank, members)
    given = of(here.rank, 9)
    found = here.ran(CollectiveCall("all_reduce", 9, dtypes.float32), given, given)
    np.testing.assert_array_equal(found, sum(of(r, 9) for r in members))
    for each in (here.comm, whole): each.close()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_collectives(size):
    assert forked.run(size, every_kind) == [None] * size


@pytest.mark.parametrize("size", [2, 4])
def test_messages(size): assert forked.run(size, messages) == [None] * size


def test_graphs():
    """Memory that a graph's collectives use is registered as long as it lives: a, b, c and d here."""
    assert forked.run(2, graphs) == [[4, 0]] * 2


def test_parts(): assert forked.run(4, parts) == [None] * 4


# **** what goes wrong ****

def different(here: Rank) -> str:
    """One has another size."""
    given = of(here.rank, 8 + here.rank)
    try: here.ran(CollectiveCall("all_reduce", 8 + here.rank, dtypes.float32, name="w"), given, given)
    except DistError as error: return str(error)
    return "nothing"


def test_ranks_that_differ():
    first, second = forked.run(2, different)
    assert "rank 0 of ranks 0-1: #1 all_reduce of w, 8 float: invalid usage: rank 0 calls all_reduce of 8 " \
        "float, rank 1 calls all_reduce of 9 float" in first
    assert "rank 1 calls all_reduce of 9 float" in second or "gave up" in second


def given_up(here: Rank) -> str:
    """Rank 0 waits for rank 1, which gives up."""
    given = of(here.rank, 8)
    if here.rank == 1:
        time.sleep(0.2)
        here.comm.abort()
        return "aborted"
    try: here.ran(CollectiveCall("all_reduce", 8, dtypes.float32), given, given)
    except DistError as error: return str(error)
    return "nothing"


def test_a_rank_that_gives_up():
    waits, gives_up = forked.run(2, given_up)
    assert gives_up == "aborted"
    assert "#1 all_reduce of a tensor, 8 float: remote process exited" in waits
    assert "rank 1 gave up" in waits


def test_a_rank_that_is_killed_and_the_watchdog():
    def program(here: Rank) -> str:
        if here.rank == 1: os._exit(9)
        why = DistError("rank 1 is lost")
        threading.Timer(0.3, lambda: here.comm.abort(why)).start()  # what a watchdog does
        try: here.ran(CollectiveCall("all_reduce", 8, dtypes.float32), of(0, 8), of(0, 8))
        except DistError as error: return str(error)
        return "nothing"
    assert forked.run(2, program) == ["rank 1 is lost", None]


def test_after_an_error_every_call_says_so():
    def program(here: Rank) -> list[str]:
        said = [different(here)]
        address = here.driver.alloc(32)
        late = CollectiveCall("all_reduce", 8, dtypes.float32)
        try: here.driver.submit(here.comm.call(late, address, address))
        except DistError as error: said.append(str(error))
        return said
    for first, second in forked.run(2, program): assert first == second


def test_a_rank_that_does_not_come():
    def program(here: Rank) -> str:
        try: here.connected(here.comm.nccl.unique_id(), timeout_s=0.3)
        except DistError as error: return str(error)
        return "nothing"
    for said in forked.run(2, program): assert "connecting to the other ranks took longer than 0.3 s" in said


def test_order_among_streams_is_checked():
    """A collective that reads what another stream writes, without an event between."""
    def program(here: Rank) -> str:
        given = of(here.rank, 8)
        a, b = here.placed(given), here.driver.alloc(given.nbytes)
        here.driver.synchronize()
        here.driver.submit(Fill(a, 1, given.nbytes), here.driver.stream())
        here.driver.submit(here.comm.call(CollectiveCall("all_reduce", 8, dtypes.float32), a, b))
        here.driver.synchronize()
        return "nothing"
    for said in forked.run(2, program): assert "nothing orders the two" in said


@pytest.mark.parametrize(("order", "words"), [
    (CollectiveCall("all_reduce", 4, dtypes.int16), "all_reduce of short"),
    (CollectiveCall("all_gather", 4, dtypes.bool), "all_gather of bool")])
def test_dtypes_that_nccl_does_not_have(order, words):
    with pytest.raises(DistError, match=words): carrier_of(order)
