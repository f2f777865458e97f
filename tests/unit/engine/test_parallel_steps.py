"""Steps of a rank of several, captured and not run: which collectives they have, of how many bytes, and how
much memory a rank has of what is cut by the vocabulary."""
from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tinygrad.uop.ops import UOp

from tests.support.engine.runner_case import LENGTH, PAGES, PLAIN, SIZE
from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.transports.library import KINDS
from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.engine.worker.logit_rows import Rows
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.warm_up import FILTER_SETS, PART_FILTER_SETS, Job
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.parallel import Parallel, VocabularyPart, local_config
from tinygrad_nv.runtime.note import note_of

VOCABULARY, PART, RANKS, SAMPLES = 1001, 504, 2, 16
GREEDY, DRAWN, APART, ORDERED, ALL = PART_FILTER_SETS
PAIRS = 8 * SAMPLES * RANKS
ROWS = 4 * PART * SAMPLES   # of each rank its share of the other's


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    """The second of two ranks, whose transport is not there."""
    whole = replace(PLAIN, vocab_size=VOCABULARY, num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
    group = Group("0-1", (0, 1), 1, 1.0)
    model = Llama(local_config(whole, RANKS), dtypes.float32, "CPU", parallel=Parallel(group, whole))
    made = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=16, max_len=LENGTH, max_batched_tokens=16)
    yield made
    made.close()


def collectives(runner: ModelRunner, job: Job) -> list[tuple[str, int]]:
    """The kinds of a step's, and the bytes of their results."""
    runner.prepare(job)
    if isinstance(job, BatchShape): made = runner.steps[job][1]
    elif isinstance(job, Rows): made = runner.logit_rows.steps[job]     # type: ignore[union-attr]
    else: made = runner.samplers[job]
    calls = [call for each in made.jit.captured.linear.src for call in inner(each)]
    notes = [(note.template, call.src[1].buffer.nbytes) for call in calls if (note := note_of(call.src[0]))]
    return [each for each in notes if each[0] in KINDS]


def inner(call: UOp) -> list[UOp]:
    """The launches of a graph, or the one that it is."""
    graph = call.src[0]
    return list(graph.src[0].src) if graph.arg == "graph" else [call]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("filters", "found"), [
    (GREEDY, [PAIRS]), pytest.param(DRAWN, [PAIRS], marks=pytest.mark.slow),
    (APART, [PAIRS // 2, PAIRS])], ids=["greedy", "drawn", "apart"])
def test_what_a_sampler_gathers(runner: ModelRunner, filters: Filters, found: list[int]) -> None:
    """8 bytes a row and rank, 4 more for min-p."""
    assert collectives(runner, (SAMPLES, filters)) == [("all_gather", each) for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("filters", [ORDERED, pytest.param(ALL, marks=pytest.mark.slow)],
                         ids=["ordered", "all"])
def test_rows_are_shared_out_where_order_is_needed(runner: ModelRunner, filters: Filters) -> None:
    """Of one row all have all; processors may differ in what they make of it."""
    assert collectives(runner, (SAMPLES, filters)) == [("all_to_all", ROWS), ("all_gather", 4 * SAMPLES)]
    if filters == ORDERED: return
    assert collectives(runner, (1, filters)) == [("all_gather", 4 * PART * RANKS), ("broadcast", 4)]


def test_a_step_gathers_no_logits(runner: ModelRunner) -> None:
    shape = BatchShape.at_least(SAMPLES, 0, SAMPLES, True)
    assert collectives(runner, shape) == [("all_reduce", 4 * SAMPLES * PLAIN.hidden_size)] * 3


def test_rows_are_gathered_of_samples_that_ask(runner: ModelRunner) -> None:
    """The rank that answers no requests reads none."""
    assert not runner.output_buffer.answers
    assert collectives(runner, Rows(SAMPLES, 8)) == [("all_gather", 4 * PART * 8 * RANKS)]


def test_a_rank_has_its_part_of_memory(runner: ModelRunner) -> None:
    state, output = runner.sampler_state, runner.output_buffer
    assert output.logits(SAMPLES).shape == (SAMPLES, PART)
    assert state.counts.shape == state.bias.shape == (16, PART)
    # words that have tokens 504 … 1007
    assert runner.masks.tensors(SAMPLES)["masks"].shape == (SAMPLES, 32 - 15)


@pytest.mark.parametrize("rows", [PART, VOCABULARY - PART], ids=["padded", "quantised"])
def test_what_is_beyond_the_vocabulary_is_never_chosen(rows: int) -> None:
    """Of a matrix with rows of anything there, or without them; and of a rank that has no token."""
    group = Group("0-1", (0, 1), 1, 1.0)
    part = VocabularyPart(group, VOCABULARY, range(PART, 2 * PART))
    logits = np.arange(3 * rows, dtype=np.float32).reshape(1, 3, rows)
    found = part.pad_logits(Tensor(logits)).numpy()
    np.testing.assert_array_equal(found[..., :part.count], logits[..., :part.count])
    assert part.count == 497
    assert found.shape == (1, 3, PART)
    assert (found[..., 497:] == -np.inf).all()
    none = VocabularyPart(group, 500, range(PART, 2 * PART))
    assert (none.pad_logits(Tensor(logits[..., :rows])).numpy() == -np.inf).all()


def test_filters_that_need_no_order_have_a_sampler_of_their_own(runner: ModelRunner) -> None:
    assert [each.ordering for each in PART_FILTER_SETS] == [False, False, False, True, True]
    jobs = [job for some in runner.jobs for job in some]
    for shape in (job for job in jobs if isinstance(job, BatchShape)):
        assert all((shape.samples, each) in jobs for each in PART_FILTER_SETS)
        assert Rows(shape.samples, shape.samples) in jobs
    steps = copy(runner.sampler_steps)
    steps.steps = dict.fromkeys(((4, each) for each in PART_FILTER_SETS), cast(Any, None))
    for each in (Filters(draw=True, min_p=True), Filters(penalty=True, mask=True), Filters(bias=True)):
        assert steps.serving(each, 4) == APART
    assert steps.serving(Filters(draw=True, top_p=True), 4) == ORDERED
    assert steps.serving(Filters(draw=True, top_k=True, bias=True), 4) == ALL
    assert set(FILTER_SETS) < set(PART_FILTER_SETS)
