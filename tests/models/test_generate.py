"""Prompts in, texts out: many at a time, several callers at a time, and callers that stop in the middle."""
from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.request_output import RequestOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import EngineError, ModelError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5 + i, *range(20, 23 + 3 * i)] for i in range(6)]


@pytest.fixture(scope="module")
def llm(hf_model: Callable[[str], Path]) -> Iterator[LLM]:
    made = LLM(hf_model("llama"), device="CPU", max_num_seqs=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def single(llm: LLM) -> list[list[int]]: return [llm.complete(ids, GREEDY).token_ids for ids in PROMPTS]


def idle(llm: LLM) -> None:
    """Waits until nothing runs, and looks whether anything is left behind."""
    llm.engine.join(20)
    assert not llm.core.has_unfinished
    assert llm.core.pool.stats().in_use == 0


def test_answers_come_in_the_order_of_their_prompts(llm: LLM, single: list[list[int]]):
    """More prompts than run at a time, each with params of its own, some with several answers."""
    seen: list[tuple[int, int]] = []
    params = [replace(GREEDY, max_tokens=2 + 2 * i, n=1 + i % 2) for i in range(6)]
    done = llm.generate(PROMPTS, params, progress=lambda *each: seen.append(each))
    assert [completion.prompt_token_ids for completion in done] == [[*ids] for ids in PROMPTS]
    for i, completion in enumerate(done):
        assert [answer.index for answer in completion.outputs] == list(range(1 + i % 2))
        for answer in completion.outputs: assert answer.token_ids == single[i][:2 + 2 * i]
        assert (completion.token_ids, completion.finish_reason) == (single[i][:2 + 2 * i], "length")
    assert seen == [(i + 1, 6) for i in range(6)]
    idle(llm)


def test_one_prompt_is_a_list_of_one(llm: LLM, single: list[list[int]]):
    for prompts in (PROMPTS[0], [PROMPTS[0]]):
        assert [each.token_ids for each in llm.generate(prompts, GREEDY)] == [single[0]]


def test_params_must_be_as_many_as_prompts(llm: LLM):
    with pytest.raises(RequestError, match="1 sampling_params for 6 prompts"): llm.generate(PROMPTS, [GREEDY])


def test_a_bad_prompt_is_refused_before_any_runs(llm: LLM):
    steps = llm.core.stats().steps
    with pytest.raises(RequestError, match="token id 999 is out"): llm.generate([PROMPTS[0], [999]], GREEDY)
    with pytest.raises(RequestError, match="no tokens"): llm.stream([])
    assert llm.core.stats().steps == steps


def test_each_of_n_answers_has_a_seed_of_its_own(llm: LLM):
    params = replace(GREEDY, temperature=1.0, seed=7, n=3)
    answers = llm.complete(PROMPTS[2], params).outputs
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert [each.token_ids for each in llm.complete(PROMPTS[2], params).outputs] == [
        answer.token_ids for answer in answers]
    assert llm.complete(PROMPTS[2], replace(params, n=1)).token_ids == answers[0].token_ids


def test_a_drawn_seed_is_told_and_repeats_the_answer(llm: LLM):
    first = llm.complete(PROMPTS[1], replace(GREEDY, temperature=1.0))
    again = llm.complete(PROMPTS[1], replace(GREEDY, temperature=1.0, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_streams_run_beside_each_other(llm: LLM, single: list[list[int]]):
    streams = [llm.stream(ids, GREEDY) for ids in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]
    for _ in range(GREEDY.max_tokens):
        for i, stream in enumerate(streams): found[i] += next(stream).tokens
    assert found == single
    for stream in streams: assert next(stream, None) is None
    idle(llm)


def test_threads_share_a_model(llm: LLM, single: list[list[int]]):
    found: dict[int, RequestOutput] = {}
    def work(i: int) -> None: found[i] = llm.complete(PROMPTS[i], GREEDY)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert [found[i].token_ids for i in range(6)] == single


def test_a_conversation_that_goes_on_computes_only_what_is_new(llm: LLM):
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, 320, 40)]
    first = llm.complete(prompt, GREEDY)
    longer = [*prompt, *first.token_ids, 7, 8, 9]
    again = llm.complete(longer, GREEDY)
    assert again.num_cached_tokens == 48, "the full pages of 51 tokens; the last one chosen was not computed"
    llm.core.pool.recover(0, ())
    fresh = llm.complete(longer, GREEDY)
    assert (fresh.num_cached_tokens, fresh.token_ids) == (0, again.token_ids)


def test_logprobs_are_those_of_the_logits(llm: LLM):
    done = llm.complete(PROMPTS[3], replace(GREEDY, logprobs=3))
    ids = [*PROMPTS[3], *done.token_ids]
    exact = llm.model(Tensor([ids], device="CPU"))[0].log_softmax(-1).numpy()
    logprobs = done.outputs[0].logprobs
    assert len(logprobs) == len(done.token_ids)
    for at, each in enumerate(logprobs, len(PROMPTS[3]) - 1):
        best = np.argsort(-exact[at], kind="stable")[:3]
        assert [*each] == best.tolist()
        assert [one.rank for one in each.values()] == [1, 2, 3]
        assert np.allclose([one.logprob for one in each.values()], exact[at][best], atol=1e-4)
        assert ids[at + 1] == best[0]
    chosen = [each[token].logprob for each, token in zip(logprobs, done.token_ids, strict=True)]
    assert done.outputs[0].cumulative_logprob == pytest.approx(sum(chosen))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [5, 70, 65])
def test_warming_up_captures_all_that_an_answer_needs(hf_model: Callable[[str], Path], length: int):
    """A prompt in one chunk, and one whose second chunk is of some tokens, or of one."""
    llm = LLM(hf_model("llama"), device="CPU", max_num_seqs=1, max_num_batched_tokens=64)
    llm.warm_up(GREEDY, length)
    captured = set(llm.runner.steps), set(llm.runner.samplers)
    llm.complete(list(range(3, 3 + length)), GREEDY)
    assert (set(llm.runner.steps), set(llm.runner.samplers)) == captured
    idle(llm)


# **** callers that stop ****

@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_is_closed_ends_its_request(llm: LLM, single: list[list[int]], after: int):
    stream = llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=200))
    for _ in range(after): next(stream)
    stream.close()
    idle(llm)
    assert llm.complete(PROMPTS[0], GREEDY).token_ids == single[0]


def test_an_interrupt_in_the_middle_of_a_batch(llm: LLM, single: list[list[int]]):
    """A signal, as Ctrl-C is, while the caller waits."""
    timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt): llm.generate(PROMPTS * 20, replace(GREEDY, max_tokens=200))
    timer.join()
    idle(llm)
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == single


# **** steps that fail ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", range(3))
def test_a_step_that_fails_while_it_is_captured(hf_model: Callable[[str], Path], at: int, monkeypatch):
    """The `at`-th realize of a request raises, after what it should compute has been written down."""
    apply_penalties = replace(GREEDY, repetition_penalty=1.1)
    expected = LLM(hf_model("llama"), device="CPU").complete(PROMPTS[5], apply_penalties).token_ids
    llm, realize, calls = LLM(hf_model("llama"), device="CPU"), Tensor.realize, [0]

    def failing(*tensors: Tensor, **options) -> Tensor:
        calls[0] += 1
        if calls[0] == at + 1: raise RuntimeError("the driver says no")
        return realize(*tensors, **options)
    monkeypatch.setattr(Tensor, "realize", failing)
    with pytest.raises(EngineError, match="RuntimeError: the driver says no"):
        llm.complete(PROMPTS[5], apply_penalties)
    monkeypatch.undo()
    for _ in range(3): assert llm.complete(PROMPTS[5], apply_penalties).token_ids == expected


@pytest.mark.slow
def test_logits_that_are_no_numbers_end_one_answer(hf_model: Callable[[str], Path]):
    """Of a token with damaged weights. The others go on."""
    llm = LLM(hf_model("llama-sharded"), device="CPU")
    llm.model.embedding.assign((Tensor.arange(320).reshape(-1, 1) == 300).where(
        float("nan"), llm.model.embedding)).realize()
    good, bad = llm.generate([[5, 6, 7], [5, 300]], GREEDY)
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert "the model computed NaN" in str(bad.outputs[0].error)
    with pytest.raises(ModelError, match="the model computed NaN"): llm.complete([300], GREEDY)


@pytest.mark.slow
def test_a_text_ends_at_a_stop_string():
    llm = LLM(DEFAULT_MODEL, device="CPU", max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=60)
    whole = llm.complete("Once upon a time", params).text
    stop = whole.split()[9]
    for include in (False, True):
        stopping = replace(params, stop=(stop,), include_stop_str_in_output=include)
        done = llm.complete("Once upon a time", stopping)
        assert done.text == whole[:whole.index(stop) + include * len(stop)]
        assert (done.finish_reason, done.outputs[0].stop_reason) == ("stop", stop)
    idle(llm)
