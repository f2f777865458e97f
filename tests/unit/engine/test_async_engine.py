"""Many callers of one core: each gets its own tokens, and callers start, leave and crash at any time."""
from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from tests.support.engine.core_case import CountingCore, CountingLLM
from tinygrad_nv.engine.async_engine import AsyncEngine, merge_deltas
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import EngineError, ModelError, QueueFull, RequestError


def run(case, core: CountingCore | None = None):
    """`case(engine, core)` in a loop of its own."""
    core = core or CountingCore()

    async def whole():
        engine = AsyncEngine(CountingLLM(core))
        await engine.start()
        try: return await asyncio.wait_for(case(engine, core), 20)
        finally:
            core.gate.set()
            await engine.stop()
    return asyncio.run(whole())


async def deltas(stream) -> list[Delta]: return [delta async for delta in stream]


async def text(stream) -> str: return "".join(delta.text for delta in await deltas(stream))


def test_each_caller_gets_its_own_tokens_and_the_loop_is_woken_once_a_step():
    async def case(engine, core):
        lengths = [3, 1, 7, 5]
        streams = [engine.generate([1], SamplingParams(max_tokens=n)) for n in lengths]
        texts = await asyncio.gather(*map(text, streams))
        assert texts == ["".join(f"{i} " for i in range(n)) for n in lengths]
        assert core.threads
        assert threading.get_ident() not in core.threads
        assert engine.stats().running == 0
    run(case)


def test_n_sequences_come_by_index():
    async def case(engine, core):
        texts = {0: "", 1: "", 2: ""}
        async for delta in engine.generate([1], SamplingParams(n=3, max_tokens=3)):
            texts[delta.index] += delta.text
        assert texts == {0: "0 1 2 ", 1: "100 101 102 ", 2: "200 201 202 "}
    run(case)


def test_a_stop_string_ends_a_sequence_of_the_core():
    async def case(engine, core):
        made = await deltas(engine.generate([1], SamplingParams(stop=("3 4",), max_tokens=10 ** 6)))
        assert "".join(delta.text for delta in made) == "0 1 2 "
        assert (made[-1].finish_reason, made[-1].stop_reason) == ("stop", "3 4")
        await asyncio.to_thread(engine.llm.engine.join)
        assert ("finish", "request-0", 0, "3 4") in core.calls
    run(case, CountingCore(step_s=0.001))


ENDLESS = SamplingParams(max_tokens=None)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_closing_an_iterator_ends_its_request(at: int):
    async def case(engine, core):
        stream = engine.generate([1], ENDLESS)
        for _ in range(at): await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(engine.llm.engine.join)
        assert not core.has_unfinished
        assert [call[0] for call in core.calls] == (["add", "abort"] if at else [])
    run(case, CountingCore(step_s=0.001))


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.02])
def test_cancelling_a_task_ends_its_request_at_any_moment(after_s: float):
    async def case(engine, core):
        other = asyncio.create_task(text(engine.generate([1], SamplingParams(max_tokens=30))))
        task = asyncio.create_task(text(engine.generate([1], ENDLESS)))
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        assert await other == "".join(f"{i} " for i in range(30)), "others do not notice"
        await asyncio.to_thread(engine.llm.engine.join)
        assert not core.has_unfinished
    run(case, CountingCore(step_s=0.001))


def test_a_slow_caller_gets_what_came_meanwhile_in_one_piece():
    async def case(engine, core):
        stream = engine.generate([1], SamplingParams(n=2, max_tokens=50))
        first = await anext(stream)
        await asyncio.to_thread(engine.llm.engine.join)
        rest = await deltas(stream)
        assert len(rest) <= 4
        whole = first.text + "".join(delta.text for delta in rest if delta.index == 0)
        assert whole == "".join(f"{i} " for i in range(50))
    run(case)


def test_deltas_that_are_merged_lose_nothing():
    a, b = Delta(1, "a", (1,), cached_tokens=5), Delta(1, "b", (2, 3), finish_reason="stop", stop_reason=3)
    expected = Delta(1, "ab", (1, 2, 3), finish_reason="stop", stop_reason=3, cached_tokens=5)
    assert merge_deltas(a, b) == expected


def test_bad_requests_are_refused_at_once():
    async def case(engine, core):
        with pytest.raises(RequestError, match="empty"): engine.generate([])
        stream = engine.generate([1], ENDLESS, request_id="mine")
        await anext(stream)
        with pytest.raises(RequestError, match="'mine' is running"): engine.generate([1], request_id="mine")
        await stream.aclose()
        assert core.calls.count(("add", "mine")) == 1
    run(case)


def test_a_full_queue_refuses_and_takes_again():
    async def case(engine, core):
        core.gate.clear()
        tasks = [asyncio.create_task(text(engine.generate([1]))) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(QueueFull, match="2 requests wait"): engine.generate([1])
        tasks[0].cancel()
        await asyncio.sleep(0)
        third = asyncio.create_task(text(engine.generate([1])))
        core.gate.set()
        assert await tasks[1] == await third == "0 1 2 3 "
        assert await text(engine.generate([1])) == "0 1 2 3 "
    run(case, CountingCore(queue_limit=2))


def test_statistics_are_waited_for_in_a_thread():
    """The loop goes on: else what it does here would never end the wait."""
    async def case(engine, core):
        answered = threading.Event()
        engine.llm.ranks = SimpleNamespace(refresh_stats=lambda: waited.append(answered.wait(5)))
        task, waited = asyncio.create_task(engine.refresh_stats()), []
        await asyncio.sleep(0.02)
        answered.set()
        await task
        assert waited == [True]
    run(case)


def test_what_the_core_refuses_comes_as_an_error_of_every_sequence():
    async def case(engine, core):
        core.refuse = RequestError("no room for it")
        made = await deltas(engine.generate([1], SamplingParams(n=2)))
        assert [delta.index for delta in made] == [0, 1]
        for delta in made: assert (delta.finish_reason, delta.error) == ("error", core.refuse)
        core.refuse = None
        assert await text(engine.generate([1])) == "0 1 2 3 ", "it goes on"
    run(case)


@pytest.mark.parametrize("error", [AssertionError("pages"), ModelError("damaged")])
def test_a_crash_ends_every_request_with_words(error: Exception):
    async def case(engine, core):
        core.gate.clear()
        tasks = [asyncio.create_task(deltas(engine.generate([1], SamplingParams(n=n)))) for n in (1, 2)]
        await asyncio.sleep(0.02)
        core.crash = error
        core.gate.set()
        for *_, last in await asyncio.gather(*tasks):
            assert last.finish_reason == "error"
            assert last.error is engine.failure
        assert engine.failure is error or (isinstance(engine.failure, EngineError)
                                           and "AssertionError: pages" in str(engine.failure))
        with pytest.raises(type(engine.failure)): engine.generate([1])
    run(case)


def test_a_closed_engine_ends_what_runs_and_says_so():
    async def case(engine, core):
        core.step_s = 0.01
        stream = engine.generate([1], SamplingParams(max_tokens=10 ** 6))
        await anext(stream)
        await asyncio.to_thread(engine.llm.engine.close)
        *_, last = await deltas(stream)
        assert last.finish_reason == "error"
        with pytest.raises(EngineError, match="the model is closed"): engine.generate([1])
        engine.llm.engine.close()
    run(case)


def test_who_asks_what_the_core_raises_at_is_told_and_who_asks_behind():
    core = CountingCore()
    thread, told = CountingLLM(core).engine, []
    core.gate.clear()
    def ask(name: str) -> None:
        thread.submit(Request(name, [1], SamplingParams(max_tokens=3)), told.extend)
    ask("a")
    while not core.threads: time.sleep(0.001)
    core.refuse = AssertionError("no NVError")      # what `add` of b raises
    for name in "bc": ask(name)
    core.gate.set()
    thread.join()
    ends = {each.request: str(each.error) for each in told if each.finish_reason == "error"}
    assert ends.keys() == {"a", "b", "c"}
    assert all("no NVError" in words for words in ends.values())


def test_a_process_that_was_forked_off_is_refused():
    thread = CountingLLM(CountingCore()).engine
    thread._lock.acquire()      # another thread's, when the process is forked
    if not (child := os.fork()):
        signal.alarm(10)
        try: thread.submit(Request("a", [1], SamplingParams()), print)
        except EngineError: os._exit(7 if thread.abort("a") is None else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_stopping_lets_requests_end_and_takes_no_new_ones():
    async def case(engine, core):
        task = asyncio.create_task(text(engine.generate([1], SamplingParams(max_tokens=20))))
        await asyncio.sleep(0.01)
        stopped = asyncio.create_task(engine.stop(5))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="stopping"): engine.generate([1])
        begun = time.monotonic()
        await stopped
        assert time.monotonic() - begun < 4
        assert (await task).endswith("19 ")
    run(case, CountingCore(step_s=0.005))


def test_stopping_ends_what_has_not_ended_in_time():
    async def case(engine, core):
        streams = [engine.generate([1], SamplingParams(n=n, max_tokens=None)) for n in (1, 2)]
        tasks = [asyncio.create_task(deltas(stream)) for stream in streams]
        await asyncio.sleep(0.02)
        await engine.stop(0.05)
        for task in tasks: assert (await task)[-1].finish_reason == "abort"
        assert not core.has_unfinished
    run(case, CountingCore(step_s=0.001))


def test_a_model_is_loaded_beside_the_loop():
    async def whole():
        def load():
            time.sleep(0.1)
            return CountingLLM(CountingCore())
        engine, ticks = AsyncEngine(load), 0
        starting = asyncio.create_task(engine.start())
        while not starting.done():
            ticks += 1
            await asyncio.sleep(0.005)
        assert ticks > 5
        assert await text(engine.generate([1])) == "0 1 2 3 "
    asyncio.run(whole())


def test_a_model_that_cannot_be_loaded_says_so():
    def load(): raise ModelError("no such directory")
    with pytest.raises(ModelError, match="no such"): asyncio.run(AsyncEngine(load).start())


def test_an_idle_engine_keeps_no_thread_and_nothing_alive():
    llm = CountingLLM(CountingCore())
    async def once(llm):
        engine = AsyncEngine(llm)
        await engine.start()
        assert await text(engine.generate([1])) == "0 1 2 3 "
        await engine.stop()
    asyncio.run(once(llm))
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
    kept = weakref.ref(llm)
    del llm
    gc.collect()
    assert kept() is None


def test_two_iterators_of_one_id_that_were_not_started():
    async def case(engine, core):
        first, second = (engine.generate([1], request_id="a") for _ in range(2))
        begun = asyncio.create_task(text(first))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="request 'a' is running"): await text(second)
        assert await begun == "0 1 2 3 "
    run(case)
