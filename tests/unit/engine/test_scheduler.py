"""The scheduler: token budget, order, fairness, preemption."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.engine_fake import Engine, alone_on_prompt
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request, Seq, new_sequences
from tinygrad_nv.engine.scheduling.step_plan import StepPlan
from tinygrad_nv.errors import QueueFull
from tinygrad_nv.kvcache.page_allocator import CopyKind

LONG = [i % 37 for i in range(1, 201)]


# **** budgets and chunks ****

def test_decodes_go_on_while_a_long_prompt_is_computed():
    engine = Engine(pages=200)
    for i in range(3): engine.add(str(i), [i, 1, 2], max_tokens=60)
    engine.step(2)
    engine.add("long", LONG, max_tokens=2)
    while not engine.tokens("long"):
        told = engine.step()
        # 3 of 32 tokens are decodes, and 24 of the rest are whole groups
        if "long" in engine.running and not engine.tokens("long"):
            assert sorted(engine.rows())[:3] == [1, 1, 1]
            assert sorted(engine.rows())[3:] in ([24], [8], [])
        assert {chosen.request for chosen in told} >= {"0", "1", "2"}
    assert len(engine.device.launched) <= 2 + -(-200 // 24) + 2
    engine.end()


def test_rows_that_fill_a_group_up_count():
    engine = Engine(pages=200, max_seqs=8)
    for i in range(8): engine.add(str(i), [i] * 5)
    engine.step()
    assert engine.rows() == [5, 5, 5, 5]                        # 8 tokens each, with padding
    engine.step()
    assert sorted(engine.rows()) == [1, 1, 1, 1, 5, 5, 5]       # 4 tokens are left, less than a group
    engine.end()


def test_a_chunk_is_whole_groups_or_the_last():
    assert [StepPlan(budget, 0).chunk_size(sequence(left), 0) for left, budget in
            ((100, 32), (100, 31), (20, 32), (3, 8), (100, 7), (1, 100), (1, 7))] == [32, 24, 20, 3, 0, 1, 1]
    assert [StepPlan(budget, 0, single_tokens=True).chunk_size(sequence(100), 0)
            for budget in (7, 1, 0)] == [1, 1, 0]


def test_chunks_of_prompts_with_log_probabilities():
    """Of as many tokens as logits are computed of, and more where these are known already."""
    seq = sequence(100, prompt_logprobs=0)
    assert [StepPlan(512, logits).chunk_size(seq, 0) for logits in (0, 7, 8, 21, 98, 99)] == [
        0, 0, 8, 16, 96, 100]
    assert [StepPlan(512, 8).chunk_size(seq, start) for start in (91, 92, 98, 99)] == [9, 8, 2, 1]
    seq.num_scored = 40
    assert [StepPlan(512, logits).chunk_size(seq, 10) for logits in (0, 8, 59)] == [24, 32, 90]
    assert StepPlan(512, 0, single_tokens=True).chunk_size(seq, 39) == 1
    assert StepPlan(512, 0, single_tokens=True).chunk_size(seq, 40) == 0
    plan = StepPlan(512, 64)
    seq.num_scheduled = 32
    plan.add(seq, 16)
    assert plan.logits_budget == 56
    plan.remove(seq)
    assert plan.logits_budget == 64


def test_prompts_share_what_logits_a_step_computes():
    """24 of 4 sequences': two prompts have a chunk each; the next begins when they are done."""
    engine = Engine(pages=200, max_batched_tokens=64)
    engine.add("plain", [1] * 3, max_tokens=20)
    for name in "abc": engine.add(name, LONG[:16], prompt_logprobs=0, max_tokens=1)
    engine.end()
    assert [engine.rows(i) for i in range(4)] == [[3, 16, 8], [1, 8, 16], [1], [1]]
    for name in "abc":
        first = next(each for each in engine.outputs_seen if each.request == name)
        assert list(first.prompt_logprobs) == alone_on_prompt(LONG[:16])
        assert first.cached_tokens == 0


def sequence(tokens: int, **params: Any) -> Seq:
    """One that has not begun."""
    return new_sequences(Request("a", [1] * tokens, SamplingParams(**params)), EngineConfig(), 2048, 0)


def test_a_budget_that_decodes_take_leaves_a_row_for_prompts():
    engine = Engine(max_seqs=8, max_batched_tokens=8, pages=200)
    for i in range(7): engine.add(str(i), [i], max_tokens=40)
    while len(engine.running) < 7: engine.step()
    engine.add("last", list(range(12)), max_tokens=2)
    for _ in range(14): engine.step()
    assert engine.tokens("last")
    engine.end()


def test_no_row_is_computed_behind_the_last_token():
    engine = Engine()
    engine.add("a", range(10), max_tokens=7)
    engine.end()
    # 10 prompt tokens, and each output token but the last
    assert sum(batch.num_tokens for batch in engine.device.launched) == 16


def test_one_prompt_for_n_answers():
    engine = Engine(max_seqs=4)
    request = engine.add("a", range(21), n=4, max_tokens=5)
    engine.end()
    assert sum(batch.num_tokens for batch in engine.device.launched) == 21 + 4 * 4
    assert [engine.tokens("a", i) for i in range(4)] == [engine.alone(request, i) for i in range(4)]
    # 21 tokens end in a shared page: each writer but the last copies it
    kinds = [copy.where for batch in engine.device.launched for copy in batch.copies]
    assert kinds.count(CopyKind.DEVICE_TO_DEVICE) == 3


def test_a_block_table_that_has_not_changed_is_the_same_object():
    engine = Engine(page_size=8)
    engine.add("a", range(4), max_tokens=20)
    engine.end()
    tables = [work.block_table for batch in engine.device.launched for work in batch.seqs]
    assert all(isinstance(pages, tuple) for pages in tables)
    assert len({id(pages) for pages in tables}) == len(set(tables)) == 3


# **** order ****

def begun(engine: Engine, steps: int = 400) -> list[str]:
    """Requests in the order in which they began."""
    order: list[str] = []
    for _ in range(steps):
        engine.step()
        order += [name for name in engine.running if name not in order]
        if not engine.core.has_unfinished: break
    return order


def test_a_smaller_priority_goes_first():
    engine = Engine(max_seqs=1)
    for name, priority in (("later", 1), ("normal", 0), ("urgent", -1), ("normal too", 0)):
        engine.add(name, [1, 2], priority, max_tokens=2)
    assert begun(engine) == ["urgent", "normal", "normal too", "later"]


def test_who_waits_gains_a_level_of_priority_every_ageing_s():
    engine = Engine(max_seqs=1, more={"ageing_s": 10.0})
    for name, priority, arrival in (("first", 1, 0.0), ("urgent", 0, 9.0), ("too late", 0, 11.0)):
        engine.add(name, [1, 2], priority, arrival, max_tokens=2)
    assert begun(engine) == ["urgent", "first", "too late"]


@settings(max_examples=40, deadline=None)
@given(priority=st.integers(0, 3), length=st.integers(1, 40), ageing=st.floats(0.5, 8),
       seqs=st.integers(1, 3))
def test_no_request_starves(priority, length, ageing, seqs):
    """Urgent requests arrive one a second, and one takes more than a second: those that arrive `ageing_s` for
    each level later than the one that waits do not overtake it."""
    engine = Engine(max_seqs=seqs, max_batched_tokens=8, pages=40, more={"ageing_s": ageing})
    engine.add("patient", LONG[:length], priority, 0.0, max_tokens=3)
    order: list[str] = []
    for second in range(int((priority + 1) * ageing) + 6):
        engine.add(f"urgent {second}", [second % 30], -1, float(second), max_tokens=6 * seqs)
        order += [name for name in begun(engine, 1) if name not in order]
    order += [name for name in begun(engine) if name not in order]
    assert not engine.core.has_unfinished
    overtook = order[:order.index("patient")]
    # the difference is (priority + 1) levels
    assert all(int(name.split()[1]) <= (priority + 1) * ageing for name in overtook)


def test_no_request_overtakes_the_first_in_the_queue():
    engine = Engine(pages=20, max_seqs=4)
    engine.add("runs", range(30), max_tokens=30)
    engine.step()
    engine.add("large", LONG[:40], arrival_s=1.0, max_tokens=2)
    engine.add("small", [1], arrival_s=2.0, max_tokens=2)
    assert begun(engine) == ["runs", "large", "small"]


def test_n_answers_wait_for_n_slots():
    engine = Engine(max_seqs=3)
    engine.add("one", [1], max_tokens=6)
    engine.step()
    engine.add("three", [2, 3], arrival_s=1.0, n=3, max_tokens=2)
    engine.add("another", [2, 3], arrival_s=2.0, max_tokens=2)
    engine.step(3)
    assert engine.running == ["one"]
    assert begun(engine) == ["one", "three", "another"]
    engine.end()


def test_the_queue_has_an_end():
    engine = Engine(max_seqs=1, more={"queue_limit": 2})
    engine.add("a", [1])
    engine.step()
    engine.add("b", [1])
    engine.add("c", [1])
    with pytest.raises(QueueFull, match="2 requests wait"): engine.add("d", [1])
    engine.core.abort("b")
    engine.add("d", [1])
    engine.end()


def test_who_came_and_went_is_forgotten():
    engine = Engine(max_seqs=1)
    engine.add("runs", [1], max_tokens=200)
    engine.step()
    engine.add("waits", [1], arrival_s=1.0)
    for i in range(1000):
        engine.add(str(i), [1], arrival_s=2.0)
        engine.core.abort(str(i))
    assert len(engine.core.scheduler._waiting_queue) < 100
    assert begun(engine) == ["runs", "waits"]


# **** pages ****

def scarce(**more) -> Engine:
    """Two answers grow until there is no page for both: 'old' and 'young'."""
    engine = Engine(pages=12, page_size=4, **more)
    engine.add("old", range(12), arrival_s=0.0, max_tokens=24)
    engine.step()
    engine.add("young", range(20, 32), arrival_s=1.0, max_tokens=24)
    engine.step()
    assert engine.running == ["old", "young"]
    return engine


def test_the_last_in_order_gives_its_pages_away():
    engine = scarce()
    while len(engine.running) == 2: engine.step()
    assert engine.running == ["old"]
    assert engine.core.stats().preempted == 1
    assert engine.core.stats().waiting == 1
    # it goes before those of its priority that came later, behind more urgent ones
    engine.add("new", [1], arrival_s=2.0, max_tokens=2)
    engine.add("urgent", [1], -1, arrival_s=2.0, max_tokens=2)
    order = begun(engine)
    assert order.index("urgent") < order.index("young") < order.index("new")
    assert engine.device.faults == []


def test_pages_are_taken_when_every_token_is_known():
    engine = scarce(late=True)
    while len(engine.running) == 2:
        unknown = {seq.request.id: seq.num_in_flight for seq in engine.core.scheduler.running}
        engine.step()
    assert unknown == {"old": 1, "young": 1}        # the step before was not looked at, when this one began
    assert len(engine.tokens("young")) + 12 == len(engine.core._requests["young"][0].tokens)
    engine.end()


def test_a_preempted_answer_is_computed_again_or_comes_back_from_the_host():
    for host_pages, cost, offloads in ((0, 1.0, 0), (12, 1.0, 1), (12, 100.0, 0), (3, 1.0, 0)):
        engine = scarce(host_pages=host_pages, more={"offload_cost": cost})
        engine.end()
        assert engine.core.stats().preempted >= 1
        assert bool(engine.core.stats().offloaded) == bool(offloads), (host_pages, cost)
        copies = {copy.where for batch in engine.device.launched for copy in batch.copies}
        if offloads: assert copies >= {CopyKind.DEVICE_TO_HOST, CopyKind.HOST_TO_DEVICE}


def test_preempted_answers_that_have_not_forked_give_their_slots_back():
    """Of three answers to a long prompt, while it is computed."""
    engine = Engine(pages=83, page_size=2, max_batched_tokens=16)
    engine.add("old", [1, 2, 3], max_tokens=40)
    many = engine.add("many", LONG[:150], arrival_s=1.0, n=3, max_tokens=3)
    while not engine.core.stats().preempted: engine.step()
    assert not engine.tokens("many")
    assert len(engine.core.scheduler._slots) == 3
    engine.end()
    for index in range(3):
        assert engine.tokens("many", index) == engine.alone(many, index)


def test_an_answer_that_fills_all_pages_comes_back_from_the_host():
    engine = Engine(pages=4, page_size=16, host_pages=8, more={"offload_cost": 0.0})
    old = engine.add("old", LONG[:20], max_tokens=36)
    engine.step()
    young = engine.add("young", LONG[30:40], arrival_s=1.0, max_tokens=46)
    engine.step(6)
    # the one that is before it in order takes its last page as late as that
    urgent = engine.add("urgent", LONG[60:70], -1, arrival_s=2.0, max_tokens=46)
    engine.end()
    assert engine.core.stats().offloaded
    for each in (old, young, urgent): assert engine.tokens(each.id) == engine.alone(each)


@pytest.mark.parametrize("copies", [0, 1, 100])
def test_a_step_that_fails_on_its_way_to_the_host_loses_nothing(copies):
    engine = scarce(late=True, host_pages=12, more={"offload_cost": 0.0})
    while len(engine.running) == 2: engine.step()
    engine.device.fails = {len(engine.device.launched) - 1: copies}
    assert {copy.where for copy in engine.device.launched[-1].copies} == {CopyKind.DEVICE_TO_HOST}
    engine.end()
    assert engine.last("old").finish_reason == "error"
    young = Request("young", list(range(20, 32)), SamplingParams(seed=0, ignore_eos=True, max_tokens=24))
    assert engine.tokens("young") == engine.alone(young)


def test_a_cancelled_request_gives_its_pages_to_who_waits():
    engine = scarce(host_pages=12, more={"offload_cost": 0.0})
    while len(engine.running) == 2: engine.step()
    engine.core.abort("young")                      # away at the host
    assert engine.pool.stats().host_in_use == 0
    engine.core.abort("old")
    assert engine.pool.stats().in_use == 0
    assert {chosen.finish_reason for chosen in engine.step()} == {"abort"}
    engine.end()


def test_a_sliding_window_holds_few_pages():
    engine = Engine(pages=18, max_seqs=1, windows=(8,))
    request = engine.add("a", LONG[:100], max_tokens=100)
    most = 0
    while engine.core.has_unfinished:
        engine.step()
        most = max(most, engine.pool.stats().in_use)
    assert engine.tokens("a") == engine.alone(request)
    assert most <= (8 + 32) // 4 + 2                # a window, a chunk, and partial pages at both ends
    assert engine.core.stats().preempted == 0


@pytest.mark.parametrize("fails", [{}, {0: 100}])
def test_prompts_that_begin_alike_share_within_a_step(fails):
    engine = Engine(fails=fails, max_batched_tokens=64)
    requests = [engine.add(str(i), [*LONG[:21], i], max_tokens=3) for i in range(4)]
    engine.step()
    assert engine.rows() == [22, 2, 2, 2]
    late = engine.add("late", LONG[:22], max_tokens=3)
    engine.step()
    engine.end()
    if fails:
        # no sequence shares what the failed step was to write
        assert {engine.last(each.id).finish_reason for each in requests} == {"error"}
        assert engine.tokens("late") == engine.alone(late)
    else:
        for each in (*requests, late): assert engine.tokens(each.id) == engine.alone(each)
        assert [engine.last(each.id).cached_tokens for each in (*requests, late)] == [0, 20, 20, 20, 20]


def test_who_is_in_the_step_already_may_lose_its_pages():
    """A chunk of a prompt in a sliding window takes those of an answer that comes after it in order."""
    engine = Engine(pages=14, max_seqs=2, windows=(16,))
    later = engine.add("later", range(20, 36), 1, max_tokens=40)
    engine.step(3)
    first = engine.add("first", LONG[:120], max_tokens=4)
    while engine.running != ["first"]: engine.step()
    assert engine.core.stats().preempted == 1
    assert [work.slot for work in engine.device.launched[-1].seqs] == [engine.core.scheduler.running[0].slot]
    engine.end()
    assert [engine.tokens("first"), engine.tokens("later")] == [engine.alone(first), engine.alone(later)]


def test_a_prompt_that_others_had_is_not_computed_again():
    engine = Engine()
    engine.add("a", LONG[:40], max_tokens=1)
    engine.end()
    before = len(engine.device.launched)
    engine.add("b", [*LONG[:38], 9, 9], max_tokens=1)
    engine.end()
    assert engine.last("b").cached_tokens == 36
    assert [batch.num_tokens for batch in engine.device.launched[before:]] == [4]
    assert engine.core.stats().prefix_hit_rate == 36 / 80


# **** what it costs ****

def test_the_bench_times_steps():
    script = Path(__file__).parents[3] / "bench" / "serving" / "engine_overhead.py"
    done = subprocess.run([sys.executable, script, "--running", "1,4", "--steps", "20", "--dry"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for kind in ("decode", "serve", "logprobs"):
        assert all(f"\n{kind}, {running} " in done.stdout for running in (1, 4))


class Read(list):
    """Tokens that count how many of them are read, and cannot be gone through."""
    count = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        self.count += len(got) if isinstance(at, slice) else 1
        return got

    def __iter__(self): raise AssertionError("a step goes through all tokens of a context")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_reads_no_more_of_a_long_context(overlap):
    engine = Engine(pages=64, page_size=16, max_seqs=1, more={"max_len": 1000, "overlap": overlap})
    request = engine.add("a", LONG * 4, max_tokens=100)
    while not engine.tokens("a"): engine.step()
    (seq,) = engine.core.scheduler.running
    seq.tokens = tokens = Read(seq.tokens)
    before = len(tokens)
    engine.step(64)
    assert len(tokens) == before + 64
    # one for each step that knows it, and one as its page is full
    assert tokens.count <= 2 * 64 + 16
    seq.tokens = list.copy(tokens)
    engine.end()
    assert engine.tokens("a") == engine.alone(request)
