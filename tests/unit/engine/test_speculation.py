"""Drafts change no token and save steps: those repeat_from from the sequence, and those of another model."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engine.engine_fake import EOS, VOCAB, Engine, FakeDevice, OracleProposer, Rule, alone
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import DraftRequest, Request
from tinygrad_nv.engine.speculation.draft_model import DraftModelProposer
from tinygrad_nv.engine.speculation.ngram import (
    MAX_DRAFT_TOKENS,
    NgramProposer,
    SpeculativeConfig,
    parse_speculative,
    repeat_from,
)
from tinygrad_nv.kvcache.pool import PagePool


def ask(tokens, most=4, key=("a", 0)) -> DraftRequest:
    return DraftRequest(key, tokens, most, SamplingParams(), 0)


def found(tokens, most=4, longest=4, shortest=2) -> list[int]:
    """What `NgramProposer` must find, by looking everywhere."""
    for length in range(longest, shortest - 1, -1):
        for at in range(len(tokens) - 1, length - 1, -1):
            if tokens[at - length:at] == tokens[-length:]:
                return repeat_from(tokens, at, most)
    return []


# **** copies ****

@pytest.mark.parametrize(("tokens", "draft"), [
    ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]), ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2, 8]), ([1, 2, 3], []),
    ([1], []), ([5, 5, 5], [5, 5, 5, 5]), ([0, 1, 2, 9, 8, 2, 5, 0, 1, 2], [9, 8, 2, 5])])
def test_what_followed_the_last_tokens_before(tokens, draft):
    assert NgramProposer().propose([ask(tokens)]) == [draft]


@settings(deadline=None, max_examples=150)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
       cuts=st.lists(st.integers(1, 60), max_size=6), most=st.integers(1, 7), longest=st.integers(1, 4))
def test_an_index_that_grows_finds_what_a_search_finds(tokens, cuts, most, longest):
    proposer = NgramProposer(longest, 1)
    for cut in sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)}):
        assert proposer.propose([ask(tokens[:cut], most)]) == [found(tokens[:cut], most, longest, 1)]


def test_sequences_do_not_look_into_each_other():
    proposer = NgramProposer()
    first, second = ask([1, 2, 3, 1, 2]), ask([8, 1, 2], key=("a", 1))
    assert proposer.propose([first, second]) == [[3, 1, 2, 3], []]
    proposer.forget(("a", 0))
    proposer.forget(("unknown", 0))
    assert list(proposer._indices) == [("a", 1)]


def test_words_of_the_option():
    assert parse_speculative("ngram:3") == SpeculativeConfig(3)
    found = parse_speculative(f"draft:/a:b/c:{MAX_DRAFT_TOKENS}")
    assert found == SpeculativeConfig(MAX_DRAFT_TOKENS, Path("/a:b/c"))


# **** in an engine ****

def requests(number: int, structured: bool = True) -> list[Request]:
    """Requests of all kinds; equal numbers give equal ones."""
    chosen = random.Random(number)
    made = []
    for i in range(6):
        prompt = [chosen.randrange(VOCAB) for _ in range(chosen.randrange(1, 30))]
        n = chosen.choice([1, 1, 2])
        params = SamplingParams(temperature=chosen.choice([0.0, 1.0]), seed=number + 100 * i + 1000, n=n,
                                max_tokens=chosen.randrange(10, 60), min_tokens=0,
                                repetition_penalty=chosen.choice([1.0, 1.0, 1.3]))
        rules = tuple(Rule(30) for _ in range(n)) if structured and i % 3 == 0 else ()
        made.append(Request(f"r{i}", prompt, params, matchers=rules))
    return made


def answered(proposer, asked: list[Request], pages: int = 60) -> Engine:
    """An engine that has answered them, each as it gets it alone."""
    engine = Engine(proposer=proposer, pages=pages, more={"num_speculative_tokens": 5}, max_seqs=4)
    for request in asked: engine.core.add(request)
    engine.end()
    assert not engine.device.faults
    for request in asked:
        for index in range(request.params.n):
            rule = Rule(30) if request.matchers else None
            expected = alone(request, index, engine.config, engine.core.max_len, rule)[0]
            assert engine.tokens(request.id, index) == expected, request
    engine.core.pool.assert_conserved([])
    return engine


@pytest.mark.parametrize("seed", range(4))
def test_copies_change_no_token(seed):
    proposer = NgramProposer(3, 1)
    stats = answered(proposer, requests(seed)).core.stats()
    assert stats.drafted > 0
    assert stats.accepted < stats.drafted
    assert not proposer._indices


def test_log_probabilities_of_accepted_tokens_are_their_own():
    """Those that the same answer has where no draft is accepted."""
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, logprobs=0)
    request = Request("a", [1, 2, 3], params)
    right = alone(request, 0, Engine().config, 256)[0]
    found = []
    for wrong in (4, 1):    # with three right ones between wrong ones, and with none
        engine = answered(OracleProposer({("a", 0): [*request.prompt, *right]}, wrong), [request])
        found.append([each.chosen for made in engine.outputs_seen for each in made.logprobs])
    assert len(found[0]) == 30
    assert found[0] == found[1]


def test_each_row_of_a_draft_has_the_mask_of_its_place():
    """Accepted drafts have the maximum length, also with structured output."""
    params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
    request = Request("a", [1, 2, 3], params, matchers=(Rule(30),))
    right = alone(request, 0, Engine().config, 256, Rule(30))[0]
    proposer = OracleProposer({("a", 0): [*request.prompt, *right]}, 1000)
    stats = answered(proposer, [request]).core.stats()
    assert stats.accepted == stats.drafted >= 24
    assert stats.steps <= 7


def drafter(pages: int = 60, device: type[FakeDevice] = FakeDevice) -> tuple[DraftModelProposer, FakeDevice]:
    """A model that is as good as the larger one, with pages of another size."""
    runner = device(pages, 8, max_seqs=4, late=True)
    return DraftModelProposer(runner, PagePool(pages, 8), 16, 256), runner


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_model_that_agrees_is_always_right_and_saves_steps(seed):
    asked = [each for each in requests(seed, structured=False) if each.params.repetition_penalty == 1]
    model, runner = drafter()
    with_drafts = answered(model, asked).core.stats()
    assert not runner.faults
    assert with_drafts.accepted > 20
    # after an end token it is right no more
    ended = sum(request.params.n for request in asked) * 5
    assert with_drafts.drafted - with_drafts.accepted <= ended
    assert with_drafts.steps < answered(None, asked).core.stats().steps
    model.pool.assert_conserved([])
    assert sorted(model._slots) == [0, 1, 2, 3]


class Other(FakeDevice):
    """Another model: at some positions it samples another token."""

    def _choose(self, sample, row) -> int:
        token = super()._choose(sample, row)
        return (token + 1) % VOCAB if row % 3 == 0 else token


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_model_that_is_often_wrong_changes_no_token(seed):
    model, runner = drafter(device=Other)
    stats = answered(model, requests(seed), pages=36).core.stats()
    assert not runner.faults
    assert 0 < stats.accepted < stats.drafted
    model.pool.assert_conserved([])


def test_a_draft_model_without_pages_drafts_for_as_many_as_it_can():
    model, runner = drafter(pages=7)
    stats = answered(model, requests(1)).core.stats()
    assert not runner.faults
    assert stats.drafted > 0
    model.pool.assert_conserved([])


def test_what_a_draft_had_wrong_is_computed_again():
    """Also with gaps between requests, and with a repeated request."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    model, runner = drafter()
    first = model.propose([ask(prompt)])[0]
    assert model.propose([ask(prompt)])[0] == first
    for right in range(5):
        tokens = [*prompt, *first[:right], (first[min(right, 3)] + 1) % VOCAB, 7, 7]
        model.propose([ask(prompt)])
        fresh, _ = drafter()
        assert model.propose([ask(tokens)]) == fresh.propose([ask(tokens)])
    assert not runner.faults


def test_a_draft_model_that_fails_loses_drafts_alone():
    model, runner = drafter()
    runner.fails = dict.fromkeys((0, 3, 4, 11), 0)
    assert answered(model, requests(2)).core.stats().failed_steps == 0
    model.pool.assert_conserved([])


def test_the_first_tokens_of_a_draft_are_verified_in_their_places():
    """A draft that is shifted by one is wrong everywhere but where tokens repeat."""
    request = Request("a", [1, 2, 3], SamplingParams(temperature=0.0, seed=1, max_tokens=30, ignore_eos=True))
    right = alone(request, 0, Engine().config, 256)[0]

    class Shifted(NgramProposer):
        def propose(self, asked):
            return [[*request.prompt, *right][len(each.tokens) + 1:][:each.max_tokens] for each in asked]

    stats = answered(Shifted(), [request]).core.stats()
    assert stats.accepted < stats.drafted / 5
    assert EOS < VOCAB
