"""`EngineCore`: requests go in, and each step brings tokens of those that run.

Protocol: one thread calls it. `add` lets a request wait; `step` launches a step and hands out what an earlier
one chose, until nothing is `unfinished`. In between `abort` ends a request at any moment, and `finish` a
sequence whose text says so; what the device still chooses for them is dropped.

The loop overlaps: `step` schedules and launches batch k + 1, then waits for batch k. So the device has work
while the host looks at tokens, and a step waits for the device once. Batch k is waited for first where a
sequence of it needs its tokens on the host (structure, drafts), or where pages are short.

A step that raises ends the requests in it with finish reason "error". The step launched after it is dropped,
what both were to write counts as unwritten, and the others go on by computing it again.
"""
from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tinygrad_nv import config as settings
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.outputs import Chosen
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.batch import GROUP, Batch, Logprobs, Sampled, Work
from tinygrad_nv.engine.scheduling.request import Proposer, Request, Seq, check, sequences
from tinygrad_nv.engine.scheduling.scheduler import Scheduler, Short, Step, catch_up
from tinygrad_nv.engine.structured_output.masks import Masks
from tinygrad_nv.errors import ConfigError, EngineError, ModelError, NVError, QueueFull, RequestError
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.kvcache.table import Table


class Device(Protocol):
    """What computes. Calls return at once, and their effects come in the order of the calls."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_seqs(self) -> int: ...

    def launch(self, batch: Batch) -> Future[Sampled]:
        """Computes a batch."""

    def begin(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
              output: Sequence[int] = ()) -> None:
        """A sequence takes a slot, with what there is of its answer already."""

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """A sequence takes a slot as another is now, but for the seed."""


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine: sequences that run and that wait now, and the part of the pages that is in use.
    Since it began: how often a sequence lost its pages, and how often they went to the host; tokens of
    prompts that began, and those of them that were there already; tokens chosen; steps launched, and those
    that failed; tokens drafted, and those that were right."""
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

    @property
    def prefix_hit_rate(self) -> float:
        """Of the tokens of prompts, how many were there already; 0 before the first."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


@dataclass(frozen=True)
class Flight:
    """A step that was launched."""
    step: Step
    sampled: Future[Sampled]


class EngineCore:
    """Requests over a device and its pages. `proposer` drafts tokens, `config.speculation` at a time."""

    def __init__(self, device: Device, pool: PagePool, config: EngineConfig,
                 proposer: Proposer | None = None) -> None:
        if config.max_seqs > device.max_seqs:
            raise ConfigError(f"max_seqs is {config.max_seqs}",
                              f"at most {device.max_seqs}: the device has no more slots", "lower max_seqs")
        self.device, self.pool, self.config = device, pool, config
        self.max_len, self.vocab_size = context(pool, config), device.vocab_size
        self.scheduler = Scheduler(pool, config, Masks(device.vocab_size), proposer)
        self._live: dict[str, list[Seq]] = {}
        self._flight: Flight | None = None
        self._out: list[Chosen] = []
        self._order = 0
        self._debug = bool(settings.get("NV_DEBUG"))
        self._generated = self._steps = self._failed = self._drafted = self._accepted = 0

    # **** requests ****

    def add(self, request: Request) -> None:
        """Lets a request wait. Raises `RequestError` for one that can never run, `QueueFull` when as many
        wait as may."""
        if request.id in self._live:
            raise RequestError(f"request {request.id!r} is running", "an id of its own", "change the id")
        check(request, self.config, self.max_len, self.vocab_size)
        if self.scheduler.new >= self.config.queue_limit:
            raise QueueFull(f"{self.scheduler.new} requests wait", f"at most {self.config.queue_limit}",
                            "ask again later, or raise queue_limit")
        self._order += 1
        seq = sequences(request, self.config, self.max_len, self._order)
        self._live[request.id] = [seq, *seq.branches]
        self.scheduler.add(seq)

    def abort(self, request: str) -> None:
        """Ends a request with finish reason "abort", whatever it is doing; one that is over is none."""
        for seq in self._live.get(request, [])[:]: self._told(seq, "abort")

    def finish(self, request: str, index: int, stop_reason: int | str | None = None) -> None:
        """Ends a sequence that has chosen tokens, with finish reason "stop": its text says so."""
        for seq in self._live.get(request, []):
            if seq.index == index and seq.chosen: return self._told(seq, "stop", stop_reason)

    @property
    def unfinished(self) -> bool:
        """Whether `step` has anything to do or to hand out."""
        return bool(self._live or self._out or self._flight)

    def stats(self) -> EngineStats:
        """Figures of now; any thread may ask."""
        pool, scheduler = self.pool.stats(), self.scheduler
        return EngineStats(len(scheduler.running), scheduler.waiting, pool.in_use / pool.total,
                           scheduler.preempted, scheduler.offloaded, scheduler.prompt_tokens, scheduler.hits,
                           scheduler.prompt_tokens, self._generated, self._steps, self._failed,
                           self._drafted, self._accepted)

    # **** a step ****

    def step(self) -> list[Chosen]:
        """Launches the next step if there is one, and waits for the one before it, or without overlap for
        itself. What finished since the last call is told."""
        if self._flight is not None and self._flight.step.hosted: self._settle()
        try: step = self.scheduler.schedule(self._flight is None)
        except Short:
            self._settle()
            step = self.scheduler.schedule(True)
        before, self._flight = self._flight, None if step is None else self._launch(step)
        if before is not None: self._look(before)
        if not self.config.overlap: self._settle()
        assert step is not None or before is not None or not self._live or self._out, "nothing goes on"
        if self._debug: self.pool.assert_conserved(self._tables())
        out, self._out = self._out, []
        return out

    def _launch(self, step: Step) -> Flight:
        self._steps += 1
        try:
            for seq in step.begun: self._begin(seq)
            for seq in step.forked:
                for each in seq.branches:
                    self.device.fork(seq.slot, each.slot, seq.request.params, each.seed)
            sampled = self.device.launch(step.batch)
        except Exception as error:
            sampled = Future()
            sampled.set_exception(error)
        return Flight(step, sampled)

    def _begin(self, seq: Seq) -> None:
        prompt = seq.prompt
        self.device.begin(seq.slot, seq.request.params, seq.seed, seq.request.prompt, seq.tokens[prompt:])

    def _settle(self) -> None:
        """Looks at the step that was launched, if there is one."""
        flight, self._flight = self._flight, None
        if flight is not None: self._look(flight)

    def _look(self, flight: Flight) -> None:
        """Waits for a step, and hands its tokens to their sequences."""
        try: sampled = flight.sampled.result()
        except Exception as error: return self._fail(flight.step, error)
        tokens, told, at = sampled.tokens.tolist(), sampled.logprobs, 0
        step, size, drafted = flight.step, self.pool.page_size, flight.step.drafted
        for seq, work in zip(step.seqs, step.batch.works, strict=True):
            first, at = at, at + len(work.samples)
            if seq.finished: continue
            rows, written = len(work.tokens) or 1, work.start + (len(work.tokens) or 1)
            if drafted and seq in drafted:
                self._verified(seq, work, tokens[first:at], first, told)
                continue
            # others find a page when it is full, so decodes tell the table page by page
            if rows > 1 or not written % size: catch_up(seq, written)
            if first == at: continue
            seq.unknown -= 1
            if not seq.forking: self._take(seq, tokens[first], told.get(first) if told else None)
            else:
                for number, branch in enumerate(self._fork(seq, written), first):
                    self._take(branch, tokens[number], told.get(number))
        assert at == len(tokens), f"{len(tokens)} tokens for {at} samples"

    def _fork(self, seq: Seq, written: int) -> list[Seq]:
        """A sequence whose prompt is computed, and its branches, which run from now on."""
        table, branches = seq.table, seq.branches
        assert table is not None
        catch_up(seq, written)
        table.truncate(written)         # pages that nobody has written are not to be shared
        seq.branches, seq.forking, seq.covered = [], False, 0
        for each in branches:
            each.table, each.scheduled, each.cached = table.fork(), seq.scheduled, seq.cached
            self.scheduler.run(each)
        return [seq, *branches]

    def _verified(self, seq: Seq, work: Work, tokens: list[int], at: int,
                  told: dict[int, Logprobs]) -> None:
        """Takes what a draft has right, and the token chosen after that."""
        draft, right = work.tokens[1:], 0
        seq.unknown -= 1
        self._drafted += len(draft)
        while True:
            token = tokens[right]
            self._take(seq, token, told.get(at + right))
            if seq.finished or right == len(draft) or draft[right] != token: break
            right += 1
        self._accepted += right
        if seq.finished: return
        seq.scheduled = work.start + 1 + right
        catch_up(seq, seq.scheduled)
        assert seq.table is not None
        seq.table.truncate(seq.scheduled)
        seq.shown(self.pool.page_size)

    def _take(self, seq: Seq, token: int, told: Logprobs | None) -> None:
        """The next token of a sequence."""
        if not 0 <= token < self.vocab_size: return self._broken(seq, not_a_number())
        tokens = seq.tokens
        tokens.append(token)
        self._generated += 1
        length = len(tokens)
        reason, stop, complete = None, None, False
        if token in seq.ends:   # before there are `min_tokens` a mask forbids them
            reason = "stop"
            stop = token if token in seq.request.params.stop_token_ids else None
        elif seq.matcher is not None:
            try: seq.matcher.accept(token)
            except NVError as error: return self._broken(seq, error)
            if seq.matcher.finished: reason, complete = "stop", True
        if reason is None and length >= seq.limit: reason = "length"
        self._out.append(Chosen(seq.request.id, seq.index, (token,), () if told is None else (told,), reason,
                                stop, seq.cached, None, complete))
        if reason is not None: self._end(seq)

    # **** ends ****

    def _end(self, seq: Seq) -> None:
        """A sequence is over."""
        family = self._live[seq.request.id]
        family.remove(seq)
        if not family: del self._live[seq.request.id]
        self.scheduler.remove(seq)

    def _told(self, seq: Seq, reason: str, stop: int | str | None = None,
              error: NVError | None = None) -> None:
        """A sequence ends without a token."""
        self._out.append(Chosen(seq.request.id, seq.index, (), (), reason, stop, max(0, seq.cached), error))
        self._end(seq)

    def _broken(self, seq: Seq, error: NVError) -> None: self._told(seq, "error", error=error)

    def _fail(self, step: Step, error: Exception) -> None:
        """A step raised. The one after it ran on what was left."""
        self._failed += 1
        later, self._flight = self._flight, None
        if later is not None: later.sampled.exception()
        words = error if isinstance(error, NVError) else EngineError(
            f"a step of the engine failed: {type(error).__name__}: {error}", "steps that end",
            "ask again; if it happens again, ask for less at a time (--max-num-seqs, "
            "--max-num-batched-tokens)")
        for seq in step.seqs:
            if seq.finished: continue
            for each in (seq, *seq.branches): self._broken(each, words)
        self.pool.recover(step.number, self._tables())
        for seq in self.scheduler.running: self.scheduler.restart(seq)

    def _tables(self) -> list[Table]:
        return [seq.table for family in self._live.values() for seq in family if seq.table is not None]


def context(pool: PagePool, config: EngineConfig) -> int:
    """Tokens that a sequence may have: as many as `config` says, or as the pool holds of one alone, the rows
    that fill its last group up included."""
    held = pool.stats().total * pool.page_size
    if config.window is not None and config.window + config.max_batched_tokens + 2 * pool.page_size <= held:
        return config.max_len
    if held < GROUP + 1:
        raise ConfigError(f"a pool of {held} tokens", f"at least {GROUP + 1}", "give the cache more memory")
    return min(config.max_len, held - GROUP + 1)


def not_a_number() -> ModelError:
    """Logits that are not numbers have no maximum, and the sampler says so with a token past the last."""
    return ModelError("the model computed NaN, so there is no likeliest token",
                      "weights that are finite, and a dtype that holds what is computed with them",
                      "try --dtype bfloat16 or float32; if that does not help, the weights are damaged: "
                      "download them again")
