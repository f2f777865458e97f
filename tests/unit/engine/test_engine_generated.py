"""Requests through the engine get what they get alone, whatever arrives, waits, ends or fails beside them."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engine.engine_fake import (
    EOS,
    VOCAB,
    FakeDevice,
    OracleProposer,
    Rule,
    alone,
    alone_on_prompt,
)
from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.kvcache.groups import num_pages
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
    windows: tuple[int | None, ...] = (None,)
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
                        config.max_batched_tokens, case.windows, case.late, case.fails)
    pool = PagePool(case.pages, case.page_size, host_pages=case.host_pages, windows=case.windows)
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
    while core.has_unfinished or any(ask.arrives >= step for ask in case.asks):
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
    asked = ask.params.prompt_logprobs is not None and chosen.index == 0 and bool(chosen.tokens)
    if asked and len(tokens) == 1:
        prompt = ask.request(0).prompt
        assert list(chosen.prompt_logprobs) == alone_on_prompt(prompt, case.windows)
    else: assert not chosen.prompt_logprobs
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
                                        None if ask.rule is None else Rule(ask.rule), case.windows)
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
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]), prompt_logprobs=st.sampled_from([None, None, 0]))


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
    windows = draw(st.sampled_from([(None,)] * 3 + [(1,), (5,), (12,), (5, None), (None, 1, 7), (4, 9)]))
    # so much that each prompt fits, or the window of one sequence
    least = sum(num_pages(40, window, page_size, budget) for window in windows)
    config = EngineConfig(max_seqs, budget, max_len, 1000, draw(st.booleans()), draw(st.floats(0.5, 20)),
                          (EOS,), draw(st.sampled_from([0.0, 0.5, 4.0])), speculation,
                          stages=draw(st.sampled_from([1, 1, 1, 2, 4])))
    fails = draw(st.just({}) | st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=3))
    return Case(draw(st.lists(asks(), min_size=1, max_size=8)), config, page_size,
                least + draw(st.integers(0, least)), draw(st.sampled_from([0, 0, 5, 60])),
                draw(st.booleans()), draw(st.integers(1, 4)), windows, fails)


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


def test_long_drafts_share_the_samples_of_a_step():
    """9 drafts and a token for each of 3 sequences would be 30 samples, and a step has 24."""
    result = run(Case([Ask(0, [0], SamplingParams(max_tokens=12, seed=0, n=3))],
                      EngineConfig(3, 33, 28, 1000, False, 1.0, (EOS,), 0.0, 9), page_size=1))
    assert 24 in [batch.num_samples for batch in result.device.launched]
