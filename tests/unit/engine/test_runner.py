"""A model runner's greedy tokens equal those of the whole context at once, whatever else is in the batch;
with NV_DETERMINISTIC=1 log probabilities do, too, to the last bit."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.runner_case import LENGTH, PAGES, SIZE, Driver, network, poison, poison_pages
from tinygrad_nv import LLM, SamplingParams, Tensor, dtypes
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, Sample, ScheduledSeq, SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import CAPTURE_AFTER, STEP_GROUPS, BatchShape
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, RequestError
from tinygrad_nv.kvcache.groups import cache_groups
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.numerics.policy import deterministic

KINDS: dict[str, dict[str, Any]] = {
    "gqa": {}, "mqa tied": {"num_kv_heads": 1, "tied": True}, "windows": {"windows": (6, None)},
    "qk norm": {"qk_norm": "head"}, "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "gemma": {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 32 ** 0.5, "num_kv_heads": 4},
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest):
    """A model and its runner."""
    model = network(**KINDS[request.param])
    groups = cache_groups(model.config.windows, LENGTH, SIZE)
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=6, max_len=LENGTH, groups=groups)
    assert len(groups.windows) == len(set(model.config.windows))
    poison(runner)
    yield model, runner
    runner.close()


@pytest.mark.sampled(1)
def test_mixed_batches_choose_what_the_whole_context_does(both, request):
    model, runner = both
    driver = Driver(runner)
    # each shape of a step is compiled: the first kind has more of them
    many = "[gqa]" in request.node.name
    for prompt in (9, 3, 12, 1) if many else (9, 3): driver.add(prompt)
    driver.drive(12)
    driver.check(model)


@pytest.fixture(scope="module")
def plain():
    """A model and its runner, whose tests begin with pages of NaN."""
    model = network()
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=4, max_len=LENGTH, host_pages=8)
    yield model, runner
    runner.close()


def test_a_fork_goes_on_as_its_source_does(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 1)
    source = driver.add(6)
    driver.run(driver.entry(source, 5))
    fork = driver.fork(source)
    seqs = [driver.entry(source, 1, (fork,))]
    driver.run(*seqs)
    # the last prompt token was computed for both, into the source's page
    page = fork.computed // SIZE
    driver.copies.append(PageCopy(CopyKind.DEVICE_TO_DEVICE, source.pages[page], fork.pages[page]))
    fork.computed += 1
    for _ in range(5): driver.run(driver.entry(fork, 1), driver.entry(source, 1))
    assert fork.tokens == source.tokens
    driver.check(model)


def test_pages_come_back_from_the_host(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 2)
    one, two = driver.add(11), driver.add(5)
    driver.run(driver.entry(one, 11), driver.entry(two, 5))
    away = list(one.pages)
    driver.copies += [PageCopy(CopyKind.DEVICE_TO_HOST, page, k) for k, page in enumerate(away)]
    driver.run(driver.entry(two, 1))
    poison_pages(runner, away)
    back = [driver.free.pop() for _ in away]
    driver.copies += [PageCopy(CopyKind.HOST_TO_DEVICE, k, page) for k, page in enumerate(back)]
    one.pages = back
    for _ in range(4): driver.run(driver.entry(one, 1), driver.entry(two, 1))
    driver.check(model)


def test_the_next_step_is_launched_before_the_last_one_is_read(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 3)
    sequence = driver.add(7)
    driver.reserve(sequence, 20)
    pages = sequence.pages
    prompt = ScheduledSeq(0, 0, tuple(sequence.tokens), pages, (Sample(6, 0, 7),))
    decodes = [ScheduledSeq(0, 7 + i, (), pages, (Sample(0, 0, 8 + i),)) for i in range(8)]
    pending = [runner.launch(SchedulerOutput((each,))) for each in (prompt, *decodes)]
    sequence.tokens += [int(each.result(60).tokens[0]) for each in pending]
    driver.check(model)


def test_each_token_of_a_draft_is_sampled_and_the_last_one_is_kept(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 4)
    sequence = driver.add(9)
    driver.reserve(sequence, 24)
    tokens, pages = tuple(sequence.tokens), sequence.pages
    samples = tuple(Sample(row, 0, row + 1) for row in range(9))
    each = runner.launch(SchedulerOutput((ScheduledSeq(0, 0, tokens, pages, samples),))).result(60).tokens
    wanted = model(Tensor([tokens], dtype=dtypes.int32)).numpy()[0].argmax(-1)
    assert each.tolist() == wanted.tolist()
    sequence.tokens.append(int(each[-1]))
    sequence.computed = 9
    for _ in range(2): driver.run(driver.entry(sequence, 1))
    driver.check(model)


def test_steps_without_samples_and_without_sequences(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 5)
    sequence = driver.add(10)
    for num_tokens in (1, 1, 4): driver.run(driver.entry(sequence, num_tokens))
    driver.run()
    driver.run(driver.entry(sequence, 4))
    for _ in range(2): driver.run(driver.entry(sequence, 1))
    driver.check(model)


def test_logits_that_are_not_numbers_choose_no_token(plain):
    model, runner = plain
    poison(runner)
    driver = Driver(runner, 6)
    ill, well = driver.add(3), driver.add(3)
    driver.run(driver.entry(ill, 3), driver.entry(well, 3))
    poison_pages(runner, ill.pages)
    driver.run(driver.entry(ill, 1), driver.entry(well, 1))
    assert ill.tokens.pop() >= runner.vocab_size
    driver.run(driver.entry(well, 1))
    driver.sequences.remove(ill)
    driver.check(model)


@pytest.mark.slow
def test_a_batch_that_is_too_large_is_refused_and_the_next_one_runs(plain):
    model, runner = plain
    poison(runner)
    tokens = tuple(range(8)) * 1000
    with pytest.raises(RequestError, match="a batch of"):
        runner.launch(SchedulerOutput((ScheduledSeq(0, 0, tokens, [0], ()),))).result(60)
    driver = Driver(runner, 7)
    driver.add(4)
    driver.drive(3)
    driver.check(model)


def test_after_an_exception_in_a_capture_the_shape_is_captured_again(plain, monkeypatch):
    model, _ = plain
    runner = ModelRunner(model, pages=8, page_size=SIZE, max_seqs=2, max_len=16)
    try:
        driver = Driver(runner, 8)
        sequence = driver.add(4)
        with monkeypatch.context() as patched:
            patched.setattr(Llama, "step_paged", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError): driver.run(driver.entry(sequence, 4))
        sequence.computed = 0
        driver.run(driver.entry(sequence, 4))
        driver.run(driver.entry(sequence, 1))
        driver.check(model)
    finally: runner.close()


def test_shapes_hold_what_they_are_for_and_are_few():
    found = set()
    for decode in range(65):
        for groups in range(40):
            for samples in (0, 1, decode, decode + groups):
                shape = BatchShape.at_least(decode, groups, samples, False)
                assert shape.decode >= decode
                assert shape.groups >= groups
                assert shape.samples >= max(1, samples)
                if groups: assert shape.num_tokens // GROUP in STEP_GROUPS
                found.add((shape.num_tokens, shape.decode))
    assert len(found) < 64


@pytest.mark.slow
def test_a_rare_shape_is_served_by_one_with_room_for_it_and_a_usual_one_is_captured():
    model = network()
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=4, max_len=LENGTH)
    try:
        runner.warm_up(shapes=[BatchShape.at_least(4, 3, 8, False)])
        poison(runner)
        driver = Driver(runner)
        steady, *others = (driver.add(prompt) for prompt in (9, 3, 12))
        driver.run(driver.entry(steady, 9))                             # 16 tokens, served by the shape of 32
        driver.run(driver.entry(steady, 1), *(driver.entry(each, len(each.tokens)) for each in others))
        assert len(runner.steps) == 1
        for _ in range(CAPTURE_AFTER + 1):                              # a decode step is captured at once
            driver.run(*(driver.entry(each, 1) for each in driver.sequences))
        assert [shape.direct for shape in runner.steps] == [False, True]
        driver.check(model)
        batch = SchedulerOutput((ScheduledSeq(0, 0, (1, 2), steady.pages),))
        for _ in range(CAPTURE_AFTER): runner.launch(batch).result(60)
        assert len(runner.steps) == 2
        runner.launch(batch).result(60)
        assert len(runner.steps) == 3
    finally: runner.close()


PROMPTS = [[3, 7, 9, 11, 40, 5, 6, 7, 8], [3, 7, 9], list(range(2, 60)), [3, 7, 9, 11, 40, 5, 6, 7, 9]]
PARAMS = (SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True),
          SamplingParams(max_tokens=6, temperature=1.0, seed=5, top_p=0.9, logprobs=3, ignore_eos=True))


@pytest.fixture
def llm(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    with LLM(tiny, device="CPU", max_model_len=96, max_num_seqs=4, num_pages=64,
             max_num_batched_tokens=32) as made:
        yield made


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[object]:
    """Tokens, and log probabilities as they are."""
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs)
            for each in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]


def test_alone_and_among_others(llm: LLM):
    for params in PARAMS:
        together = answers(llm, PROMPTS, params)
        assert [answers(llm, [prompt], params)[0] for prompt in PROMPTS] == together
        assert answers(llm, PROMPTS[1:3], params) == together[1:3]


def test_a_block_of_this_thread_would_not_reach_the_engine(tiny: Path):
    with deterministic(), pytest.raises(ConfigError, match=r"set os\.environ") as caught:
        LLM(tiny, device="CPU")
    assert "steps run in a thread of their own" in str(caught.value)
