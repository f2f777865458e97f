"""Wrong programs in the tile language: roles and pipes."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tests.support.error.language_case import Case, Wrong, check
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.language import *

wrong = Wrong()


@wrong("tile.role('loader')", "'producer' or 'consumer'")
def a_role_of_another_name(x):
    with tile.role("loader"): x[0, :]  # here


@wrong("tile.pipe(0)", "a number of stages, 1 to 32")
def a_pipe_of_no_stages(x): tile.pipe(0)  # here


@wrong("the role 'consumer' inside of the role 'producer'", "one role after the other")
def a_role_in_a_role(x):
    with tile.role("producer"):
        for _ in tile.range(2):
            with tile.role("consumer"): pass  # here


@wrong("pipe.acquire outside of a role", "the producer", "with tile.role('producer'):")
def acquired_outside(x): tile.pipe(2).acquire()  # here


@wrong("pipe.wait in the producer", "the consumer")
def waited_for_by_the_producer(x):
    pipe = tile.pipe(2)
    with tile.role("producer"): pipe.wait()  # here


@wrong("pipe.wait() of a pipe that no producer fills", "before the consumer, that commits to it")
def a_consumer_without_a_producer(x):
    pipe = tile.pipe(2)
    with tile.role("consumer"):
        for _ in tile.range(4): pipe.wait()  # here


@wrong("pipe.commit(…) of a stage that was not acquired", "pipe.acquire() before it")
def committed_without_acquire(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for i in tile.range(4): pipe.commit(x[i, :])  # here


@wrong("a stage that is acquired and not committed", "pipe.commit(…) in the same iteration")
def acquired_without_commit(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for _ in tile.range(4): pipe.acquire()  # here


@wrong("pipe.acquire() of a pipe that holds a stage already")
def acquired_twice(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for _ in tile.range(4):
            pipe.acquire()
            pipe.acquire()  # here


@wrong("a second stage of a pipe in the producer", "make another: tile.pipe(stages)")
def committed_twice(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for i in tile.range(4):
            pipe.acquire()
            pipe.commit(x[i, :])
            pipe.acquire()  # here


@wrong("pipe.commit of f32", "that is not a loaded tile", "compute with it in the consumer")
def committed_what_was_computed(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for i in tile.range(4):
            pipe.acquire()
            pipe.commit(tile.sum(x[i, :]))  # here


@wrong("pipe.commit() of nothing", "tiles that were loaded")
def committed_nothing(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        pipe.acquire()
        pipe.commit()  # here


@wrong("pipe.acquire in a branch", "both roles count the same stages")
def acquired_in_a_branch(x, n):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for i in tile.range(4):
            if n[0, i] > 0:
                pipe.acquire()  # here
                pipe.commit(x[i, :])


@wrong("a store in the producer", "loads, and arithmetic that says where they begin",
       "move it to the consumer")
def stored_by_the_producer(x, out):
    with tile.role("producer"):
        for i in tile.range(4):
            out[i, :] = x[i, :]  # here


@wrong("tile.reduce in the producer")
def reduced_by_the_producer(x):
    with tile.role("producer"):
        for i in tile.range(4): tile.sum(x[i, :])  # here


@wrong("total changes in a loop of the producer", "compute it from the loop's index")
def carried_by_the_producer(x):
    total = tile.zeros((16,), f32)
    with tile.role("producer"):
        for i in tile.range(4): total = total + x[i, :]  # here


@wrong("a pipe that no consumer waits for", "pipe.wait()")
def never_waited_for(x):
    pipe = tile.pipe(2)
    with tile.role("producer"):
        for i in tile.range(4):
            pipe.acquire()
            pipe.commit(x[i, :])  # here


def filled(pipe, x, count):
    with tile.role("producer"):
        for i in tile.range(count):
            pipe.acquire()
            pipe.commit(x[i, :])


@wrong("the consumer's loop of", "goes from 0 to 3 in steps of 1", "from 0 to 4 in steps of 1",
       "give both the same range")
def loops_of_two_lengths(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(3): pipe.wait()  # here


@wrong("pipe.wait() in 2 loops of the consumer, pipe.commit in 1 of the producer",
       "as many, of the same lengths")
def loops_of_two_depths(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(2):
            for _ in tile.range(2): pipe.wait()  # here


@wrong("a stage that is not released", "pipe.release() behind its last use")
def never_released(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(4): pipe.wait()  # here


@wrong("a second pipe.wait() in an iteration", "one for each commit")
def waited_for_twice(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(4):
            pipe.wait()
            pipe.release()
            pipe.wait()  # here


@wrong("another pipe.wait(), after that of", "make another pipe")
def waited_for_by_two_loops(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(4):
            pipe.wait()
            pipe.release()
        for _ in tile.range(4): pipe.wait()  # here


@wrong("pipe.release() of a stage that was not waited for", "pipe.wait() before it")
def released_without_wait(x):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(4): pipe.release()  # here


@wrong("a tile (16xf32) of a stage that has been released", "pipe.release() behind its last use")
def used_after_release(x, out):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for i in tile.range(4):
            row = pipe.wait()
            pipe.release()
            out[i, :] = row  # here


@wrong("pipe.wait in a branch", "put the `if` around what is computed")
def waited_for_in_a_branch(x, n):
    pipe = tile.pipe(2)
    filled(pipe, x, 4)
    with tile.role("consumer"):
        for i in tile.range(4):
            if n[0, i] > 0:
                pipe.wait()  # here
                pipe.release()


@wrong("pipes of 2 and of 3 stages in one loop", "tile.pipe(3) for both")
def pipes_of_two_lengths(x):
    one, other = tile.pipe(2), tile.pipe(3)
    filled(one, x, 4)
    filled(other, x, 4)
    with tile.role("consumer"):
        for _ in tile.range(4):
            one.wait()
            one.release()
            other.wait()  # here


@wrong.parametrized
def test_wrong_programs(case: Case) -> None: check(case)


def test_stages_without_room() -> None:
    """Stages of a pipe are never fewer than it says: a GPU without room refuses, with the arithmetic."""
    @kernel
    def matmul(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16]) -> OTile["M", "N", f32]:
        T = tile.context()
        pipe, acc = tile.pipe(30), tile.zeros((T.m, T.n), f32)
        with tile.role("producer"):
            for k in tile.range_k(a.shape, T.k):
                pipe.acquire()
                pipe.commit(a[T.m, k], b[k, T.n])
        with tile.role("consumer"):
            for _ in tile.range_k(a.shape, T.k):
                x, y = pipe.wait()
                acc = tile.dot(x, y, acc)
                pipe.release()
        return acc
    a, b = Tensor.zeros(64, 256, dtype=bf16), Tensor.zeros(256, 64, dtype=bf16)
    assert not np.any(matmul.interpret(a, b))
    with pytest.raises(ScheduleError) as raised: matmul.check(a, b, arch="sm_90a")
    assert "B of shared memory" in str(raised.value)
    assert "sm_90a has 232448" in str(raised.value)
