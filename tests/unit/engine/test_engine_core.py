"""The core of the engine, one situation at a time: the order of launches, cancellation, ends, failures."""
from __future__ import annotations

import pytest

from tests.support.engine.engine_fake import BROKEN, EOS, VOCAB, Engine, FakeDevice, OracleProposer, Rule
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request


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


def test_each_stage_of_a_pipeline_has_a_step():
    engine, notes = watched(stages=3)
    engine.add("long", [1] * 64, max_tokens=2)
    engine.step(2)
    assert notes == ["launch 0", "launch 1"]    # chunks of one prompt
    engine.end()
    engine, notes = watched(stages=3)
    for i in range(4): engine.add(str(i), range(3 + i), max_tokens=5)
    engine.end()
    # all prompts, which share pages, are one step; then a part of the four sequences each
    assert [engine.rows(batch) for batch in range(4)] == [[3, 4, 1, 2], [1, 1], [1], [1]]
    assert notes[:8] == ["launch 0", "look 0", "launch 1", "launch 2", "launch 3", "look 1", "launch 4",
                         "look 2"]
    assert engine.device.faults == []


def test_a_pipeline_without_overlap_decodes_all():
    engine, notes = watched(stages=3, overlap=False)
    for i in range(4): engine.add(str(i), range(3 + i), max_tokens=3)
    engine.end()
    assert [engine.rows(batch) for batch in range(3)] == [[3, 4, 1, 2], [1] * 4, [1] * 4]
    assert notes == [f"{what} {number}" for number in range(3) for what in ("launch", "look")]


def test_a_structure_is_in_one_step_of_a_pipeline_at_a_time():
    engine, notes = watched(stages=2)
    params = SamplingParams(seed=0, max_tokens=3)
    for name in "ab": engine.core.add(Request(name, [1, 2], params, matchers=(Rule(9),)))
    engine.end()
    assert notes == ["launch 0", "look 0", "launch 1", "launch 2", "look 1", "launch 3", "look 2", "launch 4",
                     "look 3", "look 4"]


def test_a_step_waits_for_the_device_once():
    engine, notes = watched()
    for i in range(6): engine.add(str(i), range(3 + i), n=1 + i % 2, max_tokens=3 + i)
    while engine.core.has_unfinished:
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
    engine.add("in it", [(7 * i + i * i) % VOCAB for i in range(40)], max_tokens=5)
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
