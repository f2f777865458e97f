"""Steps and samplers that are captured ahead: which, in which order, and in which process.

Protocol: `default_jobs(…)` are all that a load needs, first those that have room for every batch.
`WarmUp(runner, first, others)(progress)` prepares the first and returns: a batch then runs in the smallest
step that is there. `follow(progress)` prepares the others while the engine serves, one at a time between
batches. Steps that are kept on disk (step_store.py) are read. The others are captured, here and in a fork
(step_process.py), which takes its share of the first and all of the others, so that no request waits for a
capture. Where there is no fork (a GPU, steps that are not kept) all are captured here, before the call
returns. `close` ends the fork.

`KeptModel` comes with its steps and its weights, as from a bundle: `weights` is memory by name, as
`ModelRunner` names it (step_store.py). `steps(tensors)` has the schedules of all of `jobs(runner)`, over
memory by name.
"""
from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from queue import SimpleQueue
from typing import Protocol, TypeVar

import numpy as np
from tinygrad.device import Buffer
from tinygrad.helpers import PARALLEL, Context

from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.scheduling.scheduler_output import (
    GROUP,
    decode_rows,
    max_prompt_logits,
    pad_decodes,
)
from tinygrad_nv.engine.worker.input_buffer import BatchShape, InputLayout, next_power_of_two
from tinygrad_nv.engine.worker.logit_rows import Rows, gathers
from tinygrad_nv.engine.worker.step_process import CapturedJob, NumberQueue, StepProcess
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.runtime.programs import count_elsewhere, programs_compiled

# a step; a gather of rows; or a sampler, by its number of samples and its filters
Job = BatchShape | Rows | tuple[int, Filters]
Progress = Callable[[int, int], None]
T = TypeVar("T")


class Runner(Protocol):
    """Protocol of the model runner as a warm-up needs it. `prepare` is called on its thread, by way of
    `run_now`, which waits, or of `defer`, behind batches that wait by now. `forks`: steps may be captured in
    a fork."""
    step_store: StepStore | None
    forks: bool

    def prepare(self, job: Job) -> None: ...
    def job_name(self, job: Job) -> str: ...
    def samples(self, samples: int) -> bool: ...
    def forget_freed(self) -> None: ...
    def run_now(self, task: Callable[[], T]) -> T: ...
    def defer(self, task: Callable[[], None]) -> None: ...


# filters of samplers that are captured ahead: a batch uses the first that has all of its own
FILTER_SETS = (Filters(), Filters(draw=True), Filters(draw=True, top_k=True, top_p=True),
          Filters(**dict.fromkeys((each.name for each in fields(Filters)), True)))
GENERAL_FILTERS = (FILTER_SETS[0], FILTER_SETS[-1])     # these serve every batch
# where ranks have parts of the vocabulary, one also has all that need no whole row
PART_FILTER_SETS = (*FILTER_SETS[:2], replace(FILTER_SETS[-1], top_k=False, top_p=False), *FILTER_SETS[2:])


def default_jobs(max_seqs: int, max_batched_tokens: int, largest: BatchShape, verifies: bool,
                 adapters: bool, parts: bool = False) -> tuple[list[Job], list[Job]]:
    """Lists the jobs that every load needs. The first have room for every batch: decodes of one sequence and
    of all, a short prompt beside a few decodes, and the largest step. The others are decodes of each power of
    two, prompt chunks alone, and prompt chunks beside few and many decodes, of sizes that also serve those
    between."""
    decode = [BatchShape.at_least(1 << i, 0, 0, True) for i in range((max_seqs - 1).bit_length() + 1)]
    whole = -(-max_batched_tokens // GROUP)     # groups of a step without decodes
    chunks = [BatchShape.at_least(0, groups, 1, False)
              for groups in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128) if groups < whole]
    rows = sorted({min(each, max_seqs) for each in (GROUP, 4 * GROUP, max_seqs)})
    beside = [BatchShape.at_least(count, groups, 2 * count, False)
              for count in rows for groups in (4, 16, 32) if groups < whole]
    for count in decode_rows(max_seqs):
        full = BatchShape.at_least(count, 1, min(2 * count, max_seqs), False)
        taken = pad_decodes(count, max_seqs, max_batched_tokens)
        beside.append(replace(full, groups=-(-(max_batched_tokens - taken) // GROUP)))
    if verifies: beside = [replace(each, samples=largest.samples) for each in beside]
    # a short prompt, with the samplers of all decodes; and all that a step may have
    short = replace(beside[0], samples=max(beside[0].samples, decode[-1].samples))
    most = next_power_of_two(max_seqs + max_prompt_logits(max_seqs))
    room = replace(beside[-1], groups=whole, samples=max(beside[-1].samples, most))
    first = list(dict.fromkeys([decode[0], short, decode[-1], room]))
    others = [each for each in dict.fromkeys([*decode, *chunks, *beside]) if each not in first]
    for shapes in (first, others):
        if adapters: shapes += [replace(each, adapted=True) for each in shapes]
    sizes = dict.fromkeys(each.samples for each in first)
    # the longest first
    before: list[Job] = [*first, *((size, each) for size in sizes for each in GENERAL_FILTERS)]
    if parts: before += [job for size in sizes for job in gathers(size)]
    return before, [job for job in with_samplers([*first, *others], parts) if job not in before]


def with_samplers(shapes: Iterable[BatchShape], parts: bool = False) -> list[Job]:
    """Steps, each behind its samplers, and its gathers where ranks have `parts` of the vocabulary."""
    jobs: dict[Job, None] = {}
    for shape in shapes:
        jobs |= dict.fromkeys((shape.samples, each) for each in (PART_FILTER_SETS if parts else FILTER_SETS))
        if parts: jobs |= dict.fromkeys(gathers(shape.samples))
        jobs[shape] = None
    return list(jobs)


class WarmUp:
    """The warm-up of a runner."""

    def __init__(self, runner: Runner, first: list[Job], others: list[Job]) -> None:
        self.runner, self.first, self.others = runner, first, others
        self.fork_jobs, self.num_shared = list[Job](), 0     # captured by the fork alone; how many by both
        self.process: StepProcess | None = None
        self.threads: list[threading.Thread] = []
        self.made: SimpleQueue[CapturedJob | None] = SimpleQueue()   # what the fork sends
        self.done, self.closed = 0, False

    def __call__(self, progress: Progress) -> None:
        """Prepares the first."""
        mine, missing = self._missing(self.first), self._missing(self.others)
        # a step that is kept waits for its samplers: no batch shall choose it before they are there
        self.fork_jobs = [job for job in self.others if job in missing or (
            isinstance(job, BatchShape) and any((job.samples, each) in missing for each in GENERAL_FILTERS))]
        self.num_shared = len(mine)
        numbers = NumberQueue(len(mine))
        if self.others and (mine or self.fork_jobs): self._fork(numbers, [*mine, *self.fork_jobs], len(mine))
        if self.process is None and self.fork_jobs:    # captured now: nothing is captured beside requests
            numbers.close()
            mine, self.first, self.others = [*mine, *self.fork_jobs], [*self.first, *self.others], []
            numbers = NumberQueue(len(mine))
        progress(0, len(self.first))

        def count() -> None:
            self.done += 1
            # what the fork has sent may be of those that follow
            progress(min(self.done + self.made.qsize(), len(self.first)), len(self.first))
        for job in self.first:
            if job in mine: continue
            self._now(job)
            count()
        left = dict(enumerate(mine))
        while (number := numbers.take()) is not None:
            self._now(left.pop(number))
            count()
        numbers.close()
        while left and self.process is not None:
            if (made := self.made.get()) is None:   # the fork died: what it had is captured here
                self.made.put(None)     # for `follow`
                break
            count_elsewhere(made.compiled)
            self.runner.run_now(partial(self._adopt, left.pop(made.number), made))
            count()
        for job in left.values():
            self._now(job)
            count()

    def follow(self, progress: Progress, missed: Callable[[int], None] = lambda count: None) -> None:
        """Prepares the others on the runner's thread. Returns at once. `missed` is told in the end how many
        could not be prepared, if there are any: batches run in larger steps."""
        here, total = deque(job for job in self.others if job not in self.fork_jobs), len(self.others)
        done = 0

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        def read() -> None:
            # it may not get its memory
            with contextlib.suppress(Exception):
                self.runner.prepare(here.popleft())
                count()
            if here: self.runner.defer(read)    # behind batches that wait by now

        def adopt(made: CapturedJob) -> None:
            job = self.fork_jobs[made.number - self.num_shared]
            # a step comes after its samplers, and is of no use without them
            if made.step is not None and (isinstance(job, tuple) or self.runner.samples(job.samples)):
                with contextlib.suppress(Exception):
                    self._adopt(job, made)
                    count()

        def listen(process: StepProcess) -> None:
            while (made := self.made.get()) is not None: self.runner.defer(partial(adopt, made))
            process.close()
            self.runner.run_now(lambda: None)   # after the last
            if done < total and not self.closed: missed(total - done)
            if self.runner.step_store is not None: self.runner.step_store.save()
        if here: self.runner.defer(read)
        if self.process is not None: self._start(partial(listen, self.process))

    def close(self) -> None:
        """Ends what is left to be done."""
        self.closed = True
        if self.process is not None: self.process.close()
        for thread in self.threads: thread.join()

    # **** this process ****

    def _missing(self, jobs: list[Job]) -> list[Job]:
        store = self.runner.step_store
        return [job for job in jobs if store is None or self.runner.job_name(job) not in store.steps]

    def _now(self, job: Job) -> None:
        def prepare() -> None:
            # a core is the fork's: no other processes that compile
            with Context(PARALLEL=PARALLEL.value if self.process is None else 0): self.runner.prepare(job)
        self.runner.run_now(prepare)

    def _adopt(self, job: Job, made: CapturedJob) -> None:
        """Prepares what the fork has captured; what could not be kept is captured here."""
        store = self.runner.step_store
        assert store is not None
        if made.step is not None: store.add(self.runner.job_name(job), made.step)
        self.runner.prepare(job)

    # **** the fork ****

    def _fork(self, numbers: NumberQueue, jobs: list[Job], first: int) -> None:
        """Forks where steps can be handed over."""
        runner, store = self.runner, self.runner.step_store
        if store is None or not runner.forks: return

        def capture(number: int) -> CapturedJob:
            runner.forget_freed()
            before = programs_compiled()
            with Context(PARALLEL=0): runner.prepare(jobs[number])
            step = store.steps.get(runner.job_name(jobs[number]))
            return CapturedJob(number, step, programs_compiled() - before)
        low_priority = range(first, len(jobs))
        self.process = process = runner.run_now(lambda: StepProcess.start(numbers, low_priority, capture))
        if process is None: return

        def receive() -> None:
            while (made := process.receive()) is not None: self.made.put(made)
            self.made.put(None)
        self._start(receive)

    def _start(self, task: Callable[[], None]) -> None:
        self.threads.append(thread := threading.Thread(target=task, name="nv-warm-up", daemon=True))
        thread.start()


class JobRunner(Protocol):
    """Protocol of a runner: its jobs, their names, and where it lays their inputs."""

    @property
    def jobs(self) -> tuple[list[Job], list[Job]]: ...
    def job_name(self, job: Job) -> str: ...
    def layout(self, shape: BatchShape) -> InputLayout: ...


class KeptModel(Protocol):
    """A model whose steps are captured, and whose weights are in memory."""

    @property
    def weights(self) -> Mapping[str, Buffer]: ...
    @property
    def cache_scales(self) -> Iterable[tuple[np.ndarray, np.ndarray]]: ...
    def steps(self, tensors: Callable[[], Mapping[str, Buffer]]) -> StepStore: ...
    def jobs(self, runner: JobRunner) -> list[Job]: ...
