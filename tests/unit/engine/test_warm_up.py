"""What is captured ahead: room for every batch before the rest, in two processes, and nothing afterwards."""
from __future__ import annotations

import itertools
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Device
from tinygrad.device import Buffer
from tinygrad.uop.ops import Ops, UOp

from tests.support.engine.runner_case import LENGTH, PAGES, PLAIN, SIZE, Driver, network
from tinygrad_nv import dtypes
from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.scheduling.scheduler_output import GROUP, max_prompt_logits, pad_decodes
from tinygrad_nv.engine.worker import warm_up
from tinygrad_nv.engine.worker.input_buffer import BatchShape, ShapeChoice
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.step_process import CapturedJob, NumberQueue, StepProcess
from tinygrad_nv.models.lora import AdapterMatrices, ModelAdapters
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.program import KernelSource
from tinygrad_nv.runtime.programs import Compilations

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="forks are used on Linux")


# **** which ****

@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("max_seqs", "budget"), [(1, 8), (2, 32), (4, 64), (64, 512), (100, 300)])
def test_the_first_have_room_for_every_batch(max_seqs: int, budget: int, adapters: bool):
    """Of decodes, prompts and samples that the scheduler may put into a step."""
    whole = -(-budget // GROUP)
    largest = BatchShape(128, whole, GROUP * max(2, max_seqs), False)
    first, others = warm_up.default_jobs(max_seqs, budget, largest, False, adapters)
    shapes = [job for job in first if isinstance(job, BatchShape)]
    most = max_seqs + max_prompt_logits(max_seqs)
    for decode, adapted in itertools.product(range(1, max_seqs + 1), {False, adapters}):
        for groups, samples in ((0, decode), (1, 1), (1, decode), (whole, most)):
            batch = BatchShape(decode, groups, samples, groups == 0, adapted)
            serving = [each for each in shapes if each == batch or each.has_room_for(batch)]
            assert serving, batch
            assert all((each.samples, filters) in first
                       for each in serving for filters in warm_up.GENERAL_FILTERS)
    assert not set(first) & set(others)
    for number, job in enumerate(others):
        if isinstance(job, BatchShape):
            assert all((job.samples, each) in [*first, *others[:number]] for each in warm_up.FILTER_SETS)


def test_a_full_step_is_no_larger_than_its_budget():
    """Whatever number of decodes is beside prompts: 46 and 58 groups ran in 768 tokens of a budget of 512."""
    largest = BatchShape(64, 184, 512, False)
    jobs = warm_up.default_jobs(64, 512, largest, False, False)
    choice = ShapeChoice([job for part in jobs for job in part if isinstance(job, BatchShape)])
    for decodes in range(1, 65):
        groups = (512 - pad_decodes(decodes, 64, 512)) // GROUP
        shape = choice.of(BatchShape(decodes, groups, min(decodes + 4, 64), False), True)
        assert shape.num_tokens == 512, (decodes, shape)
        assert shape.samples < 4 * decodes + 16
    assert pad_decodes(40, 64, 127) == 40, "half of the budget stays for prompts"


def test_decodes_serve_decodes_alone():
    four, three, prompt = BatchShape(4, 0, 4, True), BatchShape(3, 0, 3, True), BatchShape(1, 0, 2, False)
    assert four.has_room_for(three)
    assert not four.has_room_for(prompt)
    assert not three.has_room_for(four)
    assert not BatchShape(4, 0, 4, True, adapted=True).has_room_for(three)


# **** in two processes ****

def made(number: int) -> CapturedJob: return CapturedJob(number, UOp(Ops.NOOP, tag=(number, os.getpid())), 1)


@linux
def test_both_processes_take_numbers_and_the_fork_takes_those_that_follow():
    queue = NumberQueue(50)
    process = StepProcess.start(queue, range(50, 53), made)
    assert process is not None
    mine = list(iter(queue.take, None))
    found = list(iter(process.receive, None))
    assert sorted([*mine, *(each.number for each in found)]) == list(range(53))
    assert [each.number for each in found][-3:] == [50, 51, 52]
    assert all(each.step is not None and each.step.tag == (each.number, process.pid) for each in found)
    pid = process.pid
    process.close()
    with pytest.raises(ChildProcessError): os.waitpid(pid, os.WNOHANG)


@linux
def test_a_fork_that_dies_ends_what_it_sends(capfd: pytest.CaptureFixture[str]):
    def capture(number: int) -> CapturedJob:
        if number == 2: raise MemoryError("no room")
        return made(number)
    process = StepProcess.start(NumberQueue(0), range(5), capture)
    assert process is not None
    assert [each.number for each in iter(process.receive, None)] == [0, 1]
    process.close()
    assert "MemoryError: no room" in capfd.readouterr().err


@linux
def test_what_cannot_be_captured_does_not_end_what_follows():
    def capture(number: int) -> CapturedJob:
        if number == 2: raise ValueError("no kernel")
        return made(number)
    process = StepProcess.start(NumberQueue(3), range(3, 5), capture)
    assert process is not None
    found = list(iter(process.receive, None))
    assert [(each.number, each.step is None) for each in found] == [(i, i == 2) for i in range(5)]
    process.close()


@linux
def test_a_fork_holds_no_port():
    """A server that is gone has given its port back, whatever its fork does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address, go = listening.getsockname(), os.pipe()
        process = StepProcess.start(NumberQueue(0), range(2),
                                    lambda number: made(number + len(os.read(go[0], number))))
        assert process is not None
        assert (first := process.receive()) is not None
        assert first.number == 0
    with socket.create_server(address, reuse_port=False): pass
    process.close()


# **** a runner ****

def runner_of(model, adapters: ModelAdapters | None = None, forks: bool = True) -> ModelRunner:
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH,
                         max_batched_tokens=16, identity="weights", adapters=adapters)
    runner.forks = forks
    return runner


def answers(runner: ModelRunner) -> list[list[int]]:
    driver = Driver(runner)
    for prompt in (9, 3): driver.add(prompt)
    driver.drive(4)
    return [each.tokens for each in driver.sequences]


def warmed(runner: ModelRunner) -> tuple[list[tuple[int, int]], int]:
    """Warms up, waits for what follows, and returns the progress and how many steps this process traced."""
    seen: list[tuple[int, int]] = []
    counted, finished = Compilations(), threading.Event()
    runner.warm_up(lambda done, total: seen.append((done, total)), defer=True)
    steps = Compilations().steps - counted.steps
    if runner.ahead is not None and runner.ahead.others:
        runner.follow(lambda done, total: finished.set() if done == total else None,
                      lambda count: finished.set())
        assert finished.wait(120)
    return seen, steps


@pytest.mark.slow
@linux
def test_a_warm_up_in_two_processes_serves_like_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    model = network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
    alone = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=2, max_len=LENGTH, max_batched_tokens=16)
    expected = answers(alone)
    alone.close()
    runner = runner_of(model)
    first, others = runner.jobs
    first, others = [job for job in first if isinstance(job, BatchShape) or job[1] == Filters()], others[:3]
    monkeypatch.setattr(ModelRunner, "jobs", (first, others))
    seen, traced = warmed(runner)
    assert seen[0] == (0, len(first))
    assert seen[-1] == (len(first), len(first))
    assert traced <= len(first), "those that follow are the fork's"
    assert {*runner.steps, *runner.samplers} == {*first, *others}
    counted = Compilations()
    assert answers(runner) == expected
    assert counted.since() == 0
    runner.close()
    # what both have captured is kept
    again = runner_of(model, forks=False)
    assert warmed(again)[1] == 0
    assert answers(again) == expected
    again.close()


def test_what_is_captured_ahead_writes_no_input_of_a_batch():
    """Small buffers are mapped shared: what a fork writes to one, the process that serves finds in its batch.
    """
    runner = runner_of(network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,)), forks=False)
    words = runner.input_buffer.open()
    words[:] = 7
    for job in (BatchShape.at_least(2, 0, 0, True), (2, Filters(mask=True))): runner.prepare(job)
    assert (words == 7).all()
    assert runner.masks.buffer is not None
    assert not runner.masks.buffer.open().any()
    runner.close()


@linux
def test_a_fork_writes_to_no_memory_that_was_freed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both processes have it among what is free, and small buffers are mapped shared."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    runner, here = runner_of(network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))), os.getpid()
    size = 1000
    buffers = [Buffer("CPU", size, dtypes.uint8).allocate() for _ in range(8)]
    views = [np.frombuffer(each.as_memoryview(force_zero_copy=True), np.uint8) for each in buffers]
    for view in views: view[:] = 7
    for each in buffers: each.deallocate()
    assert sum(len(each) for (freed, _), each in Device["CPU"].allocator.cache.items() if freed == size) >= 8

    def prepare(self: ModelRunner, job: warm_up.Job) -> None:
        if os.getpid() == here: return
        for _ in range(8):
            taken = Buffer("CPU", size, dtypes.uint8).allocate()
            np.frombuffer(taken.as_memoryview(force_zero_copy=True), np.uint8)[:] = 1
    monkeypatch.setattr(ModelRunner, "prepare", prepare)
    warmed(runner)
    assert all((view == 7).all() for view in views)
    runner.close()


def test_what_cannot_be_captured_elsewhere_is_captured_before(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_up.StepProcess, "start", lambda *_: None)
    runner = runner_of(network())
    first, others = runner.jobs
    monkeypatch.setattr(ModelRunner, "prepare", lambda self, job: prepared.append(job))
    prepared: list[warm_up.Job] = []
    assert warmed(runner)[0][-1] == (len(first) + len(others),) * 2
    assert set(prepared) == {*first, *others}
    runner.close()


@linux
def test_what_a_dead_fork_leaves_is_captured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    runner, here = runner_of(network()), os.getpid()
    first, _ = runner.jobs
    prepared: list[warm_up.Job] = []
    def prepare(self: ModelRunner, job: warm_up.Job) -> None:
        if os.getpid() != here: os._exit(3)
        prepared.append(job)
    monkeypatch.setattr(ModelRunner, "prepare", prepare)
    runner.warm_up(defer=True)
    assert set(prepared) == set(first)
    runner.close()


def test_a_kept_step_waits_for_its_samplers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A batch would choose it, and capture the sampler that is not there."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_up.StepProcess, "start", lambda *_: None)
    runner = ModelRunner(network(), pages=64, page_size=SIZE, max_seqs=16, max_len=LENGTH,
                         max_batched_tokens=64, identity="weights")
    _, others = runner.jobs
    store = runner.step_store
    step = next(job for job in others if isinstance(job, BatchShape) and (job.samples, Filters()) in others)
    assert store is not None
    store.steps = {runner.job_name(step): UOp(Ops.NOOP)}
    monkeypatch.setattr(ModelRunner, "prepare", lambda self, job: None)
    runner.warm_up(defer=True)
    assert runner.ahead is not None
    assert runner.ahead.fork_jobs.index(step) > runner.ahead.fork_jobs.index((step.samples, Filters()))
    store.changed = False
    runner.close()


def test_a_step_with_a_kernel_that_did_not_build_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler may have been ended for want of memory: the next start tries again."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    runner = runner_of(network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,)), forks=False)
    job = (1, Filters())
    monkeypatch.setitem(program.refused, KernelSource("CPU", "k", ""), "does not build")
    runner.prepare(job)
    assert runner.step_store is not None
    assert not runner.step_store.steps
    program.refused.clear()
    del runner.samplers[job]
    runner.prepare(job)
    assert [*runner.step_store.steps] == [runner.job_name(job)]
    runner.close()


# **** with adapters ****

@pytest.mark.slow
def test_steps_with_adapters_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They read an adapter from memory: another one in the same slot gives its own tokens."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))

    def tokens(seed: int | None) -> tuple[list[int], int]:
        model = network(num_layers=1, ropes=PLAIN.ropes[:1], windows=(None,))
        adapters, random = ModelAdapters(model, 2, 4, dtypes.float32), np.random.default_rng(seed)
        def drawn(*shape: int) -> np.ndarray: return random.standard_normal(shape).astype(np.float32)
        shapes = {name: (int(layer.a.shape[-1]), width) for layer in adapters.layers
                  for name, width in zip(layer.names, layer.segments, strict=True)}
        matrices = {} if seed is None else {name: AdapterMatrices(drawn(4, width), drawn(4, out))
                                            for name, (width, out) in shapes.items()}
        adapters.write(1, matrices)
        runner, counted = runner_of(model, adapters), Compilations()
        driver = Driver(runner)
        sequence = driver.add(9)
        for _ in range(3):
            entry = driver.entry(sequence, len(sequence.tokens) - sequence.computed)
            driver.run(entry._replace(adapter=1))
        runner.close()
        return sequence.tokens, Compilations().steps - counted.steps
    first, traced = tokens(1)
    assert traced > 0
    assert tokens(1) == (first, 0)
    other, none = tokens(2)
    assert none == 0
    assert other != first
    assert tokens(None)[0] not in (first, other)


def test_filters_of_a_batch_run_in_a_sampler_that_is_there():
    assert warm_up.FILTER_SETS[-1] == Filters(**dict.fromkeys(vars(Filters()), True))
    for each in warm_up.FILTER_SETS: assert any(each | level == level for level in warm_up.GENERAL_FILTERS)
