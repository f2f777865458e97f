"""Requests through the engine get what they get alone, whatever arrives, waits, ends or fails beside them."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from unittest import mock

import pytest
from engine_fake import BROKEN, EOS, VOCAB, Engine, FakeDevice, OracleProposer, Rule, alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.kvcache.pool import PagePool

BASE = [(7 * i + i * i) % VOCAB for i in range(64)]     # what prompts have in common


@dataclass
class Ask:
    """A request, when it arrives, and what becomes of it. `shared` tokens of its prompt are `BASE`'s, `own`
    its own. After step `abort` it is cancelled; `told` tokens of its first sequence end that one."""
    shared: int
    own: list[int]
    params: SamplingParams
    priority: int = 0
    arrives: int = 0
    abort: int | None = None
    told: int | None = None
    rule: int | None = None

    def request(self, number: int) -> Request:
        rules = () if self.rule is None else tuple(Rule(self.rule) for _ in range(self.params.n))
        return Request(str(number), BASE[:self.shared] + self.own, self.params, self.priority,
                       float(self.arrives), rules)


@dataclass
class Case:
    """An engine, and what is asked of it."""
    asks: list[Ask]
    config: EngineConfig
    page_size: int = 4
    pages: int = 64
    host_pages: int = 0
    late: bool = True
    wrong: int = 2
    fails: dict[int, int] = field(default_factory=dict)


@dataclass
class Result:
    """What came of it, by request and index."""
    tokens: dict[tuple[str, int], list[int]]
    reasons: dict[tuple[str, int], str]
    core: EngineCore
    device: FakeDevice


def run(case: Case) -> Result:
    """Drives an engine until nothing is left, and checks what must hold of any."""
    config = case.config
    device = FakeDevice(case.pages, case.page_size, case.host_pages, config.max_seqs,
                        config.max_batched_tokens, config.window, case.late, case.fails)
    pool = PagePool(case.pages, case.page_size, host_pages=case.host_pages, window=config.window)
    requests = [ask.request(number) for number, ask in enumerate(case.asks)]
    with mock.patch.dict(os.environ, NV_DEBUG="1"): core = EngineCore(device, pool, config)
    expected = answers(case, core.max_len)
    proposer = OracleProposer({(name, i): requests[int(name)].prompt + answer
                               for (name, i), (answer, _) in expected.items()}, case.wrong)
    if config.num_speculative_tokens: core.scheduler.proposer = proposer
    result = Result({}, {}, core, device)
    limit = 40 * sum(ask.params.n * (len(request.prompt) + len(expected[str(i), 0][0]) + 4)
                     for i, (ask, request) in enumerate(zip(case.asks, requests, strict=True))) + 200
    step = 0
    while core.unfinished or any(ask.arrives >= step for ask in case.asks):
        for ask, request in zip(case.asks, requests, strict=True):
            if ask.arrives == step: core.add(request)
            if ask.abort == step: core.abort(request.id)
        waited = {seq.name for _, seq in core.scheduler._waiting_queue if seq.waiting}
        for chosen in core.step(): note(case, result, chosen)
        overtaken(core, waited)
        step += 1
        assert step < limit, "no end"
    assert device.faults == []
    pool.assert_conserved([])
    assert pool.stats().in_use == pool.stats().host_in_use == 0
    assert sorted(core.scheduler._slots) == list(range(config.max_seqs))
    assert not (core.scheduler.num_waiting + core.scheduler.num_new + len(core.scheduler.running))
    assert not proposer.known
    check(case, result, expected)
    return result


def note(case: Case, result: Result, chosen) -> None:
    """Records outputs, and finishes sequences as a stop string would."""
    name = chosen.request, chosen.index
    assert name not in result.reasons, "a sequence goes on after its end"
    tokens = result.tokens.setdefault(name, [])
    tokens.extend(chosen.tokens)
    ask = case.asks[int(chosen.request)]
    assert len(chosen.logprobs) == (len(chosen.tokens) if ask.params.logprobs is not None else 0)
    if chosen.finish_reason is not None: result.reasons[name] = chosen.finish_reason
    elif ask.told is not None and chosen.index == 0 and len(tokens) >= ask.told:
        result.core.finish(chosen.request, 0, "told")


def overtaken(core: EngineCore, waited: set[tuple[str, int]]) -> None:
    """No waiting sequence has a smaller key than one that started."""
    waiting = [seq.key for _, seq in core.scheduler._waiting_queue if seq.waiting and seq.name in waited]
    begun = [seq.key for seq in core.scheduler.running if seq.name in waited]
    if waiting and begun and core.scheduler.num_preempted == 0: assert max(begun) < min(waiting)


def answers(case: Case, max_len: int) -> dict[tuple[str, int], tuple[list[int], str]]:
    """What each sequence gets alone."""
    return {(str(number), index): alone(ask.request(number), index, case.config, max_len,
                                        None if ask.rule is None else Rule(ask.rule))
            for number, ask in enumerate(case.asks) for index in range(ask.params.n)}


def check(case: Case, result: Result, expected) -> None:
    """Each gets the tokens it gets alone; an aborted one gets a prefix of them."""
    assert result.reasons.keys() == expected.keys()
    for name, (tokens, reason) in expected.items():
        ask, got, why = case.asks[int(name[0])], result.tokens[name], result.reasons[name]
        if why == "error" and reason != "error": assert case.fails
        ended = (why == "abort" and ask.abort is not None) or (why == "error" and reason != "error") or \
            (why == "stop" and ask.told is not None and name[1] == 0 and len(got) >= ask.told)
        if ended: assert got == tokens[:len(got)], name
        else: assert (got, why) == (tokens, reason), name


# **** any case ****

params = st.builds(
    SamplingParams, max_tokens=st.integers(1, 14), seed=st.integers(0, 30),
    n=st.sampled_from([1, 1, 1, 2, 3]), ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (), (9,), (9, 20)]), logprobs=st.sampled_from([None, None, 0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]))


def maybe(most: int) -> st.SearchStrategy[int | None]:
    """None, or a number, every third time."""
    return st.none() | st.none() | st.integers(1, most)


@st.composite
def asks(draw) -> Ask:
    """One request."""
    given_params = draw(params)
    least = draw(st.integers(0, given_params.max_tokens or 0))
    given_params = SamplingParams(**{**vars(given_params), "min_tokens": least})
    return Ask(draw(st.integers(0, 20)), draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)),
               given_params, draw(st.integers(-1, 1)), draw(st.integers(0, 12)), draw(maybe(30)),
               draw(maybe(6)), draw(maybe(9)))


@st.composite
def cases(draw) -> Case:
    """Few pages, small budgets, everything that can happen."""
    page_size, max_seqs = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.integers(3, 6))
    speculation = draw(st.sampled_from([0, 0, 0, 2, 5, 9]))
    max_len, budget = draw(st.integers(28, 44)), draw(st.integers(max(8, max_seqs), 40))
    window = draw(st.sampled_from([None, None, None, 1, 5, 12]))
    # so much that each prompt fits, or the window of one sequence
    places = 40 if window is None else window + budget + 2 * page_size
    least = -(-places // page_size)
    config = EngineConfig(max_seqs, budget, max_len, 1000, draw(st.booleans()), draw(st.floats(0.5, 20)),
                          (EOS,), window, draw(st.sampled_from([0.0, 0.5, 4.0])), speculation)
    fails = draw(st.just({}) | st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=3))
    return Case(draw(st.lists(asks(), min_size=1, max_size=8)), config, page_size,
                least + draw(st.integers(0, least)), draw(st.sampled_from([0, 0, 5, 60])),
                draw(st.booleans()), draw(st.integers(1, 4)), fails)


def tried(examples: int):
    """So many examples."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@tried(250)
@given(cases())
def test_a_request_gets_what_it_gets_alone(case):
    run(case)


@pytest.mark.slow
@tried(6000)
@given(cases())
def test_a_request_gets_what_it_gets_alone_in_many_cases(case):
    run(case)


# **** one by one ****

class Watched(FakeDevice):
    """Notes when batches are launched and when their results are asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.notes: list[str] = []

    def launch(self, batch):
        number = len(self.launched)
        self.notes.append(f"launch {number}")
        done = super().launch(batch)
        result = done.result
        def watched(timeout=None):
            self.notes.append(f"look {number}")
            return result(timeout)
        done.result = watched
        return done


def watched(late: bool = True, **more) -> tuple[Engine, list[str]]:
    """An engine whose device takes notes."""
    engine = Engine(late=late, more=more)
    engine.device = engine.core.executor = Watched(64, 4, 0, 4, 32, late=late)
    return engine, engine.device.notes


def test_the_next_step_is_launched_before_the_last_is_looked_at():
    engine, notes = watched()
    engine.add("a", range(5), max_tokens=4)
    engine.end()
    assert notes == ["launch 0", "launch 1", "look 0", "launch 2", "look 1", "launch 3", "look 2", "look 3"]
    engine, notes = watched(overlap=False)
    engine.add("a", range(5), max_tokens=4)
    engine.end()
    assert notes == [f"{what} {number}" for number in range(4) for what in ("launch", "look")]


def test_a_step_waits_for_the_device_once():
    engine, notes = watched()
    for i in range(6): engine.add(str(i), range(3 + i), n=1 + i % 2, max_tokens=3 + i)
    while engine.core.unfinished:
        before = sum(note.startswith("look") for note in notes)
        engine.step()
        assert sum(note.startswith("look") for note in notes) <= before + 1


def test_a_structure_is_looked_at_before_the_next_step():
    engine, notes = watched()
    params = SamplingParams(seed=0, max_tokens=3)
    engine.core.add(Request("a", [1, 2], params, matchers=(Rule(9),)))
    engine.end()
    assert notes == [f"{what} {number}" for number in range(3) for what in ("launch", "look")]


def test_answers_of_a_request_have_seeds_of_their_own():
    engine = Engine()
    request = engine.add("a", range(9), n=3, seed=(1 << 64) - 2)
    engine.end()
    answers = [engine.tokens("a", i) for i in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3
    engine.add("b", range(9), seed=0)
    engine.end()
    assert engine.tokens("b") == answers[2]         # 2^64 − 2 + 2
    assert engine.alone(request) == answers[0]


def test_a_request_without_a_seed_draws_one():
    engine = Engine()
    for name in ("a", "b"): engine.add(name, range(9), seed=None, max_tokens=20)
    engine.end()
    assert engine.tokens("a") != engine.tokens("b")


@pytest.mark.parametrize("when", range(1, 9))
def test_a_request_is_cancelled_at_any_moment(when):
    """While it waits, in a chunk of its prompt, as its answers fork, and while they run."""
    engine = Engine(late=True, max_batched_tokens=8)
    other = engine.add("other", range(3), max_tokens=20)
    engine.add("a", range(20), n=3, max_tokens=4)
    engine.step(when)
    engine.core.abort("a")
    engine.core.abort("a")
    engine.core.abort("unknown")
    engine.end()
    assert [engine.last("a", i).finish_reason for i in range(3)] == ["abort"] * 3
    assert engine.tokens("other") == engine.alone(other)
    assert sorted(engine.core.scheduler._slots) == [0, 1, 2, 3]


def test_a_cancelled_id_may_come_again():
    engine = Engine(late=True)
    engine.add("a", range(6))
    engine.step(2)
    engine.core.abort("a")
    engine.step()
    again = engine.add("a", range(7))
    engine.outputs_seen.clear()
    engine.end()
    assert engine.tokens("a") == engine.alone(again)


def test_a_sequence_that_its_text_ends():
    engine = Engine(late=True)
    engine.add("a", range(6), n=2, max_tokens=9)
    engine.step(4)
    engine.core.finish("a", 1, "END")
    engine.end()
    last = engine.last("a", 1)
    assert (last.tokens, last.finish_reason, last.stop_reason) == ((), "stop", "END")
    assert (len(engine.tokens("a", 0)), len(engine.tokens("a", 1))) == (9, 2)


def test_logits_that_are_no_numbers_end_their_request_alone():
    engine = Engine(late=True)
    engine.add("broken", range(6), seed=BROKEN)
    other = engine.add("other", range(6, 12))
    engine.end()
    last = engine.last("broken")
    assert (last.tokens, last.finish_reason) == ((), "error")
    assert "the model computed NaN" in str(last.error)
    assert engine.tokens("other") == engine.alone(other)


def test_end_tokens_and_stop_tokens():
    engine = Engine()
    engine.add("all", range(9), max_tokens=200)
    engine.end()
    answer = engine.tokens("all")
    first = answer.index(EOS)
    stop = next(token for token in answer[3:] if token not in answer[:3] and token != EOS)
    engine.add("eos", range(9), max_tokens=200, ignore_eos=False)
    engine.add("stop", range(9), max_tokens=200, stop_token_ids=(stop,))
    engine.end()
    assert engine.tokens("eos") == answer[:first + 1]
    assert (engine.last("eos").finish_reason, engine.last("eos").stop_reason) == ("stop", None)
    assert engine.tokens("stop") == answer[:answer.index(stop) + 1]
    assert (engine.last("stop").finish_reason, engine.last("stop").stop_reason) == ("stop", stop)


def test_no_end_token_is_chosen_before_min_tokens():
    for least in range(1, 30):
        engine = Engine()
        request = engine.add("a", range(9), max_tokens=40, ignore_eos=False, min_tokens=least,
                             stop_token_ids=tuple(range(0, VOCAB, 2)))
        engine.end()
        answer = engine.tokens("a")
        assert answer == engine.alone(request)
        assert all(token % 2 and token != EOS for token in answer[:least])
        assert len(answer) > least


def test_an_answer_without_a_token_is_not_finished_from_outside():
    engine = Engine()
    request = engine.add("a", range(9), n=2)
    engine.step()
    engine.core.finish("a", 1)
    engine.end()
    assert [engine.tokens("a", index) for index in range(2)] == [engine.alone(request, i) for i in range(2)]


def test_the_context_ends():
    engine = Engine(pages=4, more={"max_len": 40})         # 16 positions, 7 of which may be padding
    assert engine.core.max_len == 9
    engine.add("a", range(4), max_tokens=None)
    engine.end()
    assert (len(engine.tokens("a")), engine.last("a").finish_reason) == (5, "length")


def test_drafts_that_are_right_save_steps():
    request = Engine().add("a", range(9), max_tokens=40)
    answer = Engine().alone(request)
    steps = {}
    for wrong in (1, 3, 1000):
        proposer = OracleProposer({("a", 0): [*range(9), *answer]}, wrong)
        engine = Engine(more={"num_speculative_tokens": 7}, proposer=proposer)
        engine.add("a", range(9), max_tokens=40)
        engine.end()
        assert engine.tokens("a") == answer
        stats = engine.core.stats()
        steps[wrong] = stats.steps
        assert stats.accepted <= stats.drafted
    assert steps[1000] == 1 + -(-39 // 8) < steps[3] < steps[1] == 40


def test_a_prompt_of_one_token_is_forked_before_it_is_drafted_for():
    params = SamplingParams(n=2, seed=0, ignore_eos=True, max_tokens=12)
    answers = [Engine().alone(Request("a", [7], params), index) for index in range(2)]
    proposer = OracleProposer({("a", index): [7, *answer] for index, answer in enumerate(answers)}, 1000)
    engine = Engine(more={"num_speculative_tokens": 4}, proposer=proposer)
    engine.add("a", [7], n=2, max_tokens=12)
    engine.end()
    assert [engine.tokens("a", index) for index in range(2)] == answers
    assert engine.core.stats().accepted > 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fails", range(6))
def test_a_step_that_fails_ends_its_requests_and_no_others(fails, late):
    engine = Engine(late=late, fails={fails: 1})
    engine.add("in it", BASE[:40], max_tokens=5)
    while not engine.device.launched[fails:]: engine.step()
    # it starts in the step after, whose tokens are dropped, and are not counted for its penalty
    other = engine.add("other", range(20), max_tokens=6, presence_penalty=1.0)
    engine.end()
    assert engine.last("in it").finish_reason == "error"
    assert "the device has no memory left" in str(engine.last("in it").error)
    assert engine.tokens("other") == engine.alone(other)
    assert engine.core.stats().failed_steps == 1


def test_figures():
    engine = Engine(pages=8)
    engine.add("a", range(20), n=2, max_tokens=5)
    engine.add("b", range(20), arrival_s=1.0, max_tokens=5)
    engine.core.step()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (1, 1, 6 / 8)
    engine.end()
    stats = engine.core.stats()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0.0)
    assert (stats.prompt_tokens, stats.prefix_hits, stats.generated_tokens) == (40, 16, 15)
    assert stats.prefix_hit_rate == 0.4
    assert stats.steps == len(engine.device.launched)
