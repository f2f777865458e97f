"""`EngineCore`: schedules requests, launches steps, and returns the tokens of the requests that run.

Protocol: called from one thread. `add` queues a request. `step` launches a step and returns the output of an
earlier one; call it while `has_unfinished` is true. Between steps, `abort` ends a request and `finish` ends a
sequence whose text has met a stop string. Tokens that the device still samples for them are dropped.

Scheduling is asynchronous: `step` schedules and launches step k + 1, then waits for step k. The device
computes while the host processes tokens, and the host waits for the device once a step. `spare_s` is how long
`step` may be put off. Step k is waited for
first when a sequence in it needs its token on the host (structured output, draft tokens), or when the pool is
out of pages. In a pipeline of S stages, S steps are under way at a time, of different sequences
(scheduling/scheduler.py), and the oldest is waited for.

A step that raises ends its requests with finish reason "error". The steps launched after it are dropped, the
positions that all were to write count as not computed, and the other sequences compute them again.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tinygrad_nv import config as settings
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.failures import step_error
from tinygrad_nv.engine.lora.slots import AdapterUse
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Proposer, Request, Seq, check_request, new_sequences
from tinygrad_nv.engine.scheduling.scheduler import OutOfPages, Scheduler, commit_computed
from tinygrad_nv.engine.scheduling.scheduler_output import (
    GROUP,
    Logprobs,
    SamplerOutput,
    ScheduledSeq,
    SchedulerOutput,
)
from tinygrad_nv.engine.scheduling.step_plan import ScheduledStep, TokenMasks
from tinygrad_nv.engine.scheduling.step_times import StepTimes
from tinygrad_nv.errors import (
    ConfigError,
    DistError,
    ModelError,
    NVError,
    QueueFull,
    RequestError,
)
from tinygrad_nv.kvcache.groups import num_pages
from tinygrad_nv.kvcache.hybrid_table import SequenceTable
from tinygrad_nv.kvcache.pool import PagePool

if TYPE_CHECKING:
    from tinygrad_nv.models.peft import Adapter


class Executor(Protocol):
    """The device side: runs steps. Calls return at once, and take effect in the order of the calls."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seqs(self) -> int: ...

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        """Runs one step."""

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        """Assigns a slot to a sequence; `output` are the tokens it has generated already."""

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into an adapter slot."""

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """Assigns a slot to a copy of the sequence in `source`, with another seed."""


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine. Current values: running and waiting sequences, and the fraction of pages in
    use (`kv_used`). Totals: preemptions, and how many of them offloaded pages to the host; prompt tokens
    looked up in the prefix cache and found there; prompt and generated tokens; steps launched, and steps that
    failed; draft tokens proposed, and accepted, of
    these how many at each place of a draft. `adapters` of a model that is served with some."""
    running: int
    waiting: int
    kv_used: float
    preempted: int
    offloaded: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    failed_steps: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...] = ()
    adapters: AdapterUse | None = None

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of prompt tokens found in the prefix cache; 0 before the first prompt."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose output has not been processed."""
    step: ScheduledStep
    sampled: Future[SamplerOutput]
    ended_s: list[float]        # when its tokens were on the host, by the thread that put them there


class EngineCore:
    """Requests over an executor and its pages. `proposer` drafts up to `config.num_speculative_tokens` tokens
    a step for each sequence."""

    def __init__(self, executor: Executor, pool: PagePool, config: EngineConfig,
                 proposer: Proposer | None = None) -> None:
        if config.max_seqs > executor.max_seqs:
            raise ConfigError(f"max_seqs is {config.max_seqs}",
                              f"at most {executor.max_seqs}: the device has no more slots", "lower max_seqs")
        self.executor, self.pool, self.config = executor, pool, config
        self.max_len, self.vocab_size = max_context_length(pool, config), executor.vocab_size
        self.scheduler = Scheduler(pool, config, TokenMasks(executor.vocab_size), proposer)
        self._requests: dict[str, list[Seq]] = {}
        self._in_flight = deque[InFlightStep]()     # in the order of their launches
        self._outputs: list[EngineCoreOutput] = []
        self._num_added = 0
        self._times = StepTimes()
        self._debug = bool(settings.get("NV_DEBUG"))
        self._num_generated = self._num_steps = self._num_failed_steps = 0
        self._num_draft_tokens, self._accepted_at = 0, [0] * config.num_speculative_tokens

    # **** requests ****

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` for a request that can never run, `QueueFull` when
        `queue_limit` requests wait."""
        if request.id in self._requests:
            raise RequestError(f"request {request.id!r} is running", "an id of its own", "change the id")
        check_request(request, self.config, self.max_len, self.vocab_size)
        if self.scheduler.num_new >= self.config.queue_limit:
            raise QueueFull(f"{self.scheduler.num_new} requests wait", f"at most {self.config.queue_limit}",
                            "retry later, or raise queue_limit")
        self._num_added += 1
        seq = new_sequences(request, self.config, self.max_len, self._num_added)
        self._requests[request.id] = [seq, *seq.branches]
        self.scheduler.add(seq)

    def abort(self, request: str) -> None:
        """Ends a request with finish reason "abort". Does nothing for an unknown or finished request."""
        for seq in self._requests.get(request, [])[:]: self._finish_seq(seq, "abort")

    def finish(self, request: str, index: int, stop_reason: int | str | None = None) -> None:
        """Ends a sequence that has output tokens, with finish reason "stop": its text has met a stop string.
        """
        for seq in self._requests.get(request, []):
            if seq.index == index and seq.num_output_tokens: return self._finish_seq(seq, "stop", stop_reason)

    def reset_prefix_cache(self) -> None:
        """Forgets what the prefix cache holds: later requests compute their prompts."""
        self.pool.forget_prefixes()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is queued or running, or an output has not been returned."""
        return bool(self._requests or self._outputs or self._in_flight)

    def stats(self) -> EngineStats:
        """Current statistics. Any thread may call this."""
        pool, scheduler = self.pool.stats(), self.scheduler
        return EngineStats(len(scheduler.running), scheduler.num_waiting, pool.in_use / pool.total,
                           scheduler.num_preempted, scheduler.num_offloaded, scheduler.prompt_tokens,
                           scheduler.prefix_hits, scheduler.prompt_tokens, self._num_generated,
                           self._num_steps, self._num_failed_steps,
                           self._num_draft_tokens, sum(self._accepted_at), tuple(self._accepted_at),
                           scheduler.adapter_use())

    # **** a step ****

    def spare_s(self) -> float:
        """Seconds for which `step` may be put off: the device is busy, and who comes has room."""
        room = self.scheduler.num_waiting + len(self.scheduler.running) < self.config.max_seqs
        alone = self.config.overlap and self.config.stages == 1 and not self._outputs
        return self._times.spare_s() if alone and room else 0.0

    def step(self) -> list[EngineCoreOutput]:
        """Launches the next step if there is one, and waits for the previous one (for this one if `overlap`
        is off; in a pipeline for the oldest, once every stage has one). Returns the outputs since the last
        call."""
        under_way, stages = self._in_flight, self.config.stages
        if under_way and under_way[-1].step.needs_sync and stages == 1: self._sync()
        began_s = self._times.clock()
        try: step = self.scheduler.schedule(not under_way, len(under_way))
        except OutOfPages:
            self._sync()
            began_s, step = self._times.clock(), self.scheduler.schedule(True)
        stuck = step is None and not under_way and self._requests and not self._outputs
        assert not stuck, "requests are left, and none can be scheduled"
        if step is not None:
            under_way.append(self._launch(step))
            tokens = sum(len(each.tokens) or 1 for each in step.batch.seqs)
            self._times.note_launch((tokens, len(step.batch.seqs)), began_s)
        if under_way and (step is None or len(under_way) > max(1, stages - 1)): self._wait()
        if not self.config.overlap: self._sync()
        if self._debug: self.pool.assert_conserved(self._block_tables())
        out, self._outputs = self._outputs, []
        return out

    def _launch(self, step: ScheduledStep) -> InFlightStep:
        self._num_steps += 1
        try:
            for number, adapter in step.adapters: self.executor.load_adapter(number, adapter)
            for seq in step.started: self._start_slot(seq)
            for seq in step.forked:
                for each in seq.branches:
                    self.executor.fork(seq.slot, each.slot, seq.request.params, each.seed)
            sampled = self.executor.launch(step.batch)
        except Exception as error:
            sampled = Future()
            sampled.set_exception(error)
        ended_s, clock = list[float](), self._times.clock
        sampled.add_done_callback(lambda _: ended_s.append(clock()))
        return InFlightStep(step, sampled, ended_s)

    def _start_slot(self, seq: Seq) -> None:
        request, output = seq.request, seq.tokens[seq.num_prompt_tokens:]
        self.executor.start_slot(seq.slot, request.params, seq.seed, request.prompt, output)

    def _sync(self) -> None:
        """Waits for the steps in flight, and processes their outputs."""
        while self._in_flight: self._wait()

    def _wait(self) -> None: self._update_from_output(self._in_flight.popleft())

    def _update_from_output(self, in_flight: InFlightStep) -> None:
        """Waits for a step, and appends its tokens to their sequences."""
        try: sampled = in_flight.sampled.result()
        except DistError: raise     # ranks that have parted stay apart
        except Exception as error: return self._fail_step(in_flight.step, error)
        self._times.note_end(in_flight.ended_s[0] if in_flight.ended_s else self._times.clock())
        tokens, logprobs, at = sampled.tokens.tolist(), sampled.logprobs, 0
        step, size, drafted = in_flight.step, self.pool.page_size, in_flight.step.drafted
        for seq, work in zip(step.seqs, step.batch.seqs, strict=True):
            first, at = at, at + len(work.samples)
            if seq.finished: continue
            num_tokens, written = len(work.tokens) or 1, work.start + (len(work.tokens) or 1)
            if drafted and seq in drafted:
                self._accept_draft(seq, work, tokens[first:at], first, logprobs)
                continue
            # other sequences share full pages alone, so a decode updates the block table once a page
            if num_tokens > 1 or not written % size: commit_computed(seq, written)
            if seq.prompt_logprobs is not None: first = self._collect_prompt(seq, work, first, logprobs)
            if first == at or seq.finished: continue
            seq.num_in_flight -= 1
            if not seq.forking:
                self._append_token(seq, tokens[first], logprobs.get(first) if logprobs else None)
            else:
                for number, branch in enumerate(self._fork(seq, written), first):
                    self._append_token(branch, tokens[number], logprobs.get(number))
        assert at == len(tokens), f"{len(tokens)} tokens for {at} samples"

    def _collect_prompt(self, seq: Seq, work: ScheduledSeq, at: int, logprobs: dict[int, Logprobs]) -> int:
        """Keeps the log probabilities of prompt tokens, whose samples come first. Returns the number of the
        sample after them."""
        assert seq.prompt_logprobs is not None
        for sample in work.samples:
            if sample.target is None: break
            if (found := logprobs.get(at)) is None:
                for each in (seq, *seq.branches): self._fail_seq(each, nan_error())
                break
            seq.prompt_logprobs.append(found)
            at += 1
        return at

    def _fork(self, seq: Seq, written: int) -> list[Seq]:
        """Forks the branches off a sequence whose prompt is computed, and starts them. Returns all n
        sequences."""
        table, branches = seq.table, seq.branches
        assert table is not None
        commit_computed(seq, written)
        table.truncate(written)         # pages not written yet must not be shared
        seq.branches, seq.forking, seq.num_reserved = [], False, 0
        for each in branches:
            each.table, each.num_scheduled, each.num_cached = table.fork(), seq.num_scheduled, seq.num_cached
            self.scheduler.start_running(each)
        return [seq, *branches]

    def _accept_draft(self, seq: Seq, work: ScheduledSeq, tokens: list[int], at: int,
                      logprobs: dict[int, Logprobs]) -> None:
        """Accepts the longest prefix of the draft that equals the sampled tokens, and the token sampled after
        it."""
        draft, num_accepted = work.tokens[1:], 0
        seq.num_in_flight -= 1
        self._num_draft_tokens += len(draft)
        while True:
            token = tokens[num_accepted]
            self._append_token(seq, token, logprobs.get(at + num_accepted))
            if seq.finished or num_accepted == len(draft) or draft[num_accepted] != token: break
            num_accepted += 1
        for place in range(num_accepted): self._accepted_at[place] += 1
        if seq.finished: return
        seq.num_scheduled = work.start + 1 + num_accepted
        commit_computed(seq, seq.num_scheduled)
        assert seq.table is not None
        seq.table.truncate(seq.num_scheduled)
        seq.refresh_block_table(self.pool.page_size)

    def _append_token(self, seq: Seq, token: int, logprobs: Logprobs | None) -> None:
        """Appends a sampled token to a sequence, and checks whether the sequence ends with it."""
        if not 0 <= token < self.vocab_size: return self._fail_seq(seq, nan_error())
        tokens = seq.tokens
        tokens.append(token)
        self._num_generated += 1
        length = len(tokens)
        params = seq.request.params
        reason: str | None = None
        stop: int | str | None = None
        complete = False
        if token in seq.stop_ids:   # before `min_tokens` the token mask excludes them
            reason = "stop"
            stop = token if token in params.stop_token_ids else None
        elif seq.matcher is not None:
            try: seq.matcher.accept(token)
            except NVError as error: return self._fail_seq(seq, error)
            if seq.matcher.is_finished: reason, complete = "stop", True
        if reason is None and length >= seq.max_length: reason = "length"
        if reason is None and (repetition := params.repetition_detection) is not None and \
                length >= seq.min_length and repetition.finds(tokens, seq.num_prompt_tokens):
            reason, stop = "repetition", "repetition_detected"
        found = () if logprobs is None else (logprobs,)
        self._outputs.append(made := EngineCoreOutput(seq.request.id, seq.index, (token,), found, reason,
                                                      stop, seq.num_cached, None, complete))
        if seq.prompt_logprobs is not None and seq.num_output_tokens == 1:
            made.prompt_logprobs = tuple(seq.prompt_logprobs)
        if reason is not None: self._free_seq(seq)

    # **** ends ****

    def _free_seq(self, seq: Seq) -> None:
        """Removes a finished sequence."""
        group = self._requests[seq.request.id]
        group.remove(seq)
        if not group: del self._requests[seq.request.id]
        self.scheduler.remove(seq)

    def _finish_seq(self, seq: Seq, reason: str, stop: int | str | None = None,
                    error: NVError | None = None) -> None:
        """Ends a sequence without a token."""
        self._outputs.append(EngineCoreOutput(seq.request.id, seq.index, (), (), reason, stop,
                                              max(0, seq.num_cached), error))
        self._free_seq(seq)

    def _fail_seq(self, seq: Seq, error: NVError) -> None: self._finish_seq(seq, "error", error=error)

    def _fail_step(self, step: ScheduledStep, error: Exception) -> None:
        """Handles a step that raised. Steps launched after it read incomplete data and are dropped."""
        self._num_failed_steps += 1
        for later in self._in_flight: later.sampled.exception()
        self._in_flight.clear()
        self._times.forget()
        words = error if isinstance(error, NVError) else step_error(error)
        for seq in step.seqs:
            if seq.finished: continue
            for each in (seq, *seq.branches): self._fail_seq(each, words)
        self.pool.recover(step.number, self._block_tables())
        for seq in self.scheduler.running: self.scheduler.restart(seq)
        self.scheduler.adapters.invalidate()

    def _block_tables(self) -> list[SequenceTable]:
        return [seq.table for group in self._requests.values() for seq in group if seq.table is not None]


def max_context_length(pool: PagePool, config: EngineConfig) -> int:
    """Tokens that one sequence may have: `config.max_len`, or what the pool holds when the sequence runs
    alone, whichever is less. The padding of the last group of tokens counts."""
    total, size = pool.device.total, pool.page_size
    def fits(tokens: int) -> bool:
        return sum(num_pages(tokens, each, size, config.max_batched_tokens) for each in pool.windows) <= total
    if not fits(GROUP + 1):
        raise ConfigError(f"a pool of {total} pages of {size} tokens", f"pages for {GROUP + 1} tokens",
                          "give the cache more memory")
    if fits(config.max_len + GROUP - 1): return config.max_len
    longest = bisect_right(range(config.max_len + GROUP), False, key=lambda tokens: not fits(tokens)) - 1
    return longest - GROUP + 1


def nan_error() -> ModelError:
    """The error for NaN logits: they have no maximum, so the sampler returns a token id past the vocabulary.
    """
    return ModelError("the model computed NaN, so there is no likeliest token",
                      "weights that are finite, and a dtype that holds what is computed with them",
                      "try --dtype bfloat16 or float32; if that does not help, the weights are damaged: "
                      "download them again")
