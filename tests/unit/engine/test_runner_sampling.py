"""What a runner is asked besides greedy tokens: kinds of keys and values, draws by seed, masks, logprobs,
penalties, and warming up."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.engine.runner_case import LENGTH, PAGES, SIZE, Driver, network, poison
from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import Sample, ScheduledSeq, SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy

PROMPT = (5, 17, 80, 33, 2)


@pytest.fixture(scope="module")
def model():
    return network()


@pytest.fixture(scope="module")
def runner(model):
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=4, max_len=LENGTH)
    poison(made)
    yield made
    made.close()


def logits_of(model, tokens: tuple[int, ...]) -> np.ndarray:
    """The last row's, of the whole context."""
    row: np.ndarray = model(Tensor([tokens], dtype=dtypes.int32)).numpy()[0, -1]
    return row


# **** keys and values ****

# how far below the largest logit (σ = 5.7) a sampled one may be
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "tolerance"), [("float16", 0.02), ("bf16", 0.2), ("fp8", 1.0),
                                                 ("fp8_e5m2", 2.0), ("int8", 0.5)])
def test_keys_and_values_of_fewer_bits(model, kind, tolerance):
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH, kv_dtype=kind)
    try:
        driver = Driver(made)
        for prompt in (9, 3): driver.add(prompt)
        driver.drive(4)
        driver.check(model, tolerance)
        bits = {"fp8": 8, "fp8_e5m2": 8, "int8": 8}.get(kind, 16)
        assert made.store.bytes_per_page == 4 * SIZE * 2 * 8 * bits // 8
    finally: made.close()


def test_int8_is_scaled_by_what_tokens_give(model):
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=1, max_len=LENGTH, kv_dtype="int8")
    try:
        first, second = (layer.k_scale.numpy() for layer in made.store.cache.layers)
        assert first.shape == (PAGES, 2)
        assert (first == first[0]).all()
        assert (first > 0.01).all()
        assert (first != second).all()
    finally: made.close()


@pytest.mark.parametrize(("kind", "words"), [("fp8_inc", "auto, float32"), ("nvfp4", "unknown KV cache"),
                                             ("fp8_per_token_head", "fp8_e4m3 is fp8")])
def test_kinds_that_are_none_are_refused(model, kind, words):
    with pytest.raises(RequestError, match=words): ModelRunner(model, pages=PAGES, kv_dtype=kind)


def test_a_cache_that_is_wider_than_the_model_is_refused():
    half = network(dtype=dtypes.float16)
    with pytest.raises(RequestError, match="not wider than the model"):
        ModelRunner(half, pages=PAGES, kv_dtype="float32")


def test_a_cache_in_which_no_sequence_fits_is_refused(model):
    with pytest.raises(RequestError, match=r"(?s)3 pages of 8 tokens.*6 at least"):
        ModelRunner(model, pages=3, page_size=SIZE, max_len=LENGTH)


# **** sampled tokens ****

def chosen(runner: ModelRunner, *samples: Sample, tokens: tuple[int, ...] = PROMPT):
    """What is sampled after a prompt in the first pages."""
    return runner.launch(SchedulerOutput((ScheduledSeq(0, 0, tokens, range(6), samples),))).result(60)


def test_a_draw_depends_on_seed_and_place_alone(runner):
    params = SamplingParams(temperature=1.5, top_k=40)
    def drawn(slot: int, seed: int, beside: tuple[int, ...] = ()) -> int:
        runner.start_slot(slot, params, seed, PROMPT)
        for other in beside: runner.start_slot(other, SamplingParams(), 100 + other, PROMPT)
        samples = [Sample(4, each, 5) for each in (*beside, slot)]
        return int(chosen(runner, *samples).tokens[-1])
    alone = [drawn(0, seed) for seed in range(8)]
    assert len(set(alone)) > 1
    assert [drawn(2, seed, (1,)) for seed in range(8)] == alone
    assert [drawn(3, seed, (0, 1, 2)) for seed in range(8)] == alone


@pytest.mark.slow
def test_greedy_and_drawn_sequences_run_beside_each_other(model, runner):
    runner.start_slot(0, SamplingParams(temperature=0), 0, PROMPT)
    runner.start_slot(1, SamplingParams(temperature=2.0), 1, PROMPT)
    tokens = chosen(runner, Sample(4, 0, 5), Sample(4, 1, 5)).tokens
    assert tokens[0] == logits_of(model, PROMPT).argmax()


def test_a_mask_leaves_the_likeliest_of_what_it_allows(model, runner):
    runner.start_slot(0, SamplingParams(temperature=0), 0, PROMPT)
    logits = logits_of(model, PROMPT)
    allowed = np.zeros(96, np.uint8)
    allowed[[7, 40, 95]] = 1
    mask = np.packbits(allowed, bitorder="little").view(np.uint32)
    tokens = chosen(runner, Sample(4, 0, 5, mask), Sample(4, 0, 5)).tokens
    assert tokens.tolist() == [max((7, 40, 95), key=lambda i: logits[i]), logits.argmax()]


def test_penalties_count_prompt_and_output(model, runner):
    best = int(logits_of(model, PROMPT).argmax())
    runner.start_slot(0, SamplingParams(temperature=0, logit_bias={best: 5.0}, presence_penalty=2.0,
                                        frequency_penalty=2.0), 0, PROMPT)
    # + 5 − 2 − 2k: sampled until the penalty outweighs the bias
    tokens = [int(chosen(runner, Sample(4, 0, 5)).tokens[0]) for _ in range(12)]
    assert tokens[0] == best
    assert any(token != best for token in tokens)
    runner.start_slot(0, SamplingParams(temperature=0), 0, PROMPT)
    assert chosen(runner, Sample(4, 0, 5)).tokens[0] == best


def test_a_forks_penalties_begin_as_its_sources(model, runner):
    params = SamplingParams(temperature=0, frequency_penalty=2.0)
    runner.start_slot(0, params, 0, PROMPT)
    for _ in range(5): chosen(runner, Sample(4, 0, 5))
    runner.fork(0, 1, params, 7)
    one, two = chosen(runner, Sample(4, 0, 5), Sample(4, 1, 5)).tokens
    assert one == two
    runner.start_slot(1, params, 0, PROMPT)
    assert chosen(runner, Sample(4, 1, 5)).tokens[0] == logits_of(model, PROMPT).argmax()


def test_a_fork_goes_on_with_its_sources_token(runner):
    params = SamplingParams(temperature=0)
    runner.start_slot(0, params, 0, PROMPT)
    first = chosen(runner, Sample(4, 0, 5)).tokens
    runner.fork(0, 1, params, 7)
    seqs = tuple(ScheduledSeq(slot, 5, (), range(6 * slot, 6 * slot + 6), (Sample(0, slot, 6),))
                 for slot in (0, 1))
    copies = (PageCopy(CopyKind.DEVICE_TO_DEVICE, 0, 6),)
    one, two = runner.launch(SchedulerOutput(seqs, copies)).result(60).tokens
    known = seqs[1]._replace(tokens=tuple(first.tolist()))
    assert one == two == runner.launch(SchedulerOutput((known,))).result(60).tokens[0]


def test_logprobs_are_those_of_the_unfiltered_logits(model, runner):
    runner.start_slot(0, SamplingParams(temperature=0, logit_bias={12: 100.0}), 0, PROMPT)
    found = chosen(runner, Sample(4, 0, 5), Sample(4, 0, 5, logprobs=3), Sample(2, 0, 3, logprobs=0),
                   Sample(4, 0, 5, logprobs=(9, 3)))
    assert found.tokens[0] == found.tokens[1] == 12
    assert set(found.logprobs) == {1, 2, 3}
    logits = logits_of(model, PROMPT).astype(np.float64)
    wanted = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-wanted)
    assert found.logprobs[1].chosen == pytest.approx(wanted[12], abs=1e-4)
    assert found.logprobs[1].rank == int(np.where(order == 12)[0][0]) + 1
    assert [token for token, _ in found.logprobs[1].top] == order[:3].tolist()
    assert [x for _, x in found.logprobs[1].top] == pytest.approx(wanted[order[:3]].tolist(), abs=1e-4)
    assert found.logprobs[2].top == ()
    assert [token for token, _ in found.logprobs[3].top] == [9, 3]
    assert [x for _, x in found.logprobs[3].top] == pytest.approx(wanted[[9, 3]].tolist(), abs=1e-4)


def test_log_probabilities_of_a_prompt(model, runner):
    """Of a token that is not sampled, of the logits before it; the sample beside it is as without."""
    runner.start_slot(0, SamplingParams(temperature=0, logit_bias={12: 100.0}), 0, PROMPT)
    found = chosen(runner, *(Sample(i, -1, i + 1, logprobs=2, target=token)
                             for i, token in enumerate(PROMPT[1:])), Sample(4, 0, 5, logprobs=0))
    assert found.tokens[-1] == 12
    assert set(found.logprobs) == set(range(5))
    for i, token in enumerate(PROMPT[1:]):
        logits = logits_of(model, PROMPT[:i + 1]).astype(np.float64)
        wanted = logits - np.log(np.exp(logits).sum())
        assert found.logprobs[i].chosen == pytest.approx(wanted[token], abs=1e-4)
        assert found.logprobs[i].rank == 1 + (wanted > wanted[token]).sum()
        assert [each for each, _ in found.logprobs[i].top] == np.argsort(-wanted)[:2].tolist()


# **** ahead ****

def test_shapes_that_were_warmed_up_capture_nothing_later(model):
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH)
    try:
        seen: list[tuple[int, int]] = []
        made.warm_up(lambda done, total: seen.append((done, total)), [BatchShape.at_least(0, 1, 1, False)])
        assert seen == [(done, 5) for done in range(6)]     # four samplers and the step
        captured = {id(step.jit) for _, step in made.steps.values()}
        chosen(made, Sample(4, 0, 5))
        assert {id(step.jit) for _, step in made.steps.values()} == captured
    finally: made.close()


def test_a_decode_step_is_one_graph_of_eight_kernels_a_layer(model, runner):
    runner.warm_up(shapes=[BatchShape.at_least(4, 0, 4, True)])
    _, step = runner.steps[BatchShape.at_least(4, 0, 4, True)]
    linear = step.jit.captured.linear
    assert len(linear.src) == len(step.graphs) == 1
    # the tokens, their rows, the last norm and the head besides
    assert len(linear.src[0].src[0].src[0].src) == 8 * model.config.num_layers + 4


def test_what_failed_before_a_batch_is_told_by_it(model):
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH)
    try:
        made.start_slot(0, SamplingParams(presence_penalty=1.0), 0, (10 ** 6,))
        with pytest.raises((IndexError, ValueError)): chosen(made, Sample(4, 0, 5))
        assert len(chosen(made, Sample(4, 1, 5)).tokens) == 1
    finally: made.close()
