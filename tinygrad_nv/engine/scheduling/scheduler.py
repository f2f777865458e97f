"""The scheduler: which sequences the next step computes, and how many tokens of each.

Protocol. `schedule(synced)` returns a `ScheduledStep` and counts it as launched, or None when nothing can
run. Steps are launched in this order, each before the next is scheduled. `synced`: the output of every
launched step has been processed. Otherwise every running sequence is assumed to continue, and no sequence is
preempted: `OutOfPages` is raised where a preemption would be needed, and pages reserved until then stay
reserved.

Order. A sequence's key is `priority · ageing_s + arrival_s`; a smaller key runs first. One level of priority
is a head start of `ageing_s` seconds, so a waiting request is overtaken for a bounded time only. A step
takes, until the budget of `max_batched_tokens` is used:

  1. each running sequence with one token to compute (decode); beside prompts their number is padded
  2. chunks of running sequences with more (prefill), by key
  3. waiting sequences, by key, until one finds no slot or too few pages
  4. draft tokens, if budget is left and no sequence waits

Chunks of a prompt whose log probabilities are asked for are at most `max_prompt_logits` tokens, which all
such sequences of a step share; drafts, whose tokens need logits, too, are left out of such a step.

Stages. In a pipeline as many steps are under way as there are stages, of different sequences: one whose token
is in flight waits, and a step decodes no more than a share of the others, which leaves as many for each stage
without a step. The first stage so takes tokens from the host, and chunks of one prompt follow each other at
once.

Pages. A waiting sequence starts when there are pages for all its tokens, and one spare page for each running
sequence. When a running sequence finds too few pages, the scheduler preempts the lowest-priority running
sequence and re-queues it with its original key, ahead of all that arrived later.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.lora.slots import AdapterSlots, AdapterUse
from tinygrad_nv.engine.scheduling.request import DraftRequest, Proposer, Seq, pad_end, pad_tokens
from tinygrad_nv.engine.scheduling.scheduler_output import (
    GROUP,
    Sample,
    ScheduledSeq,
    SchedulerOutput,
    max_prompt_logits,
    max_samples,
    pad_decodes,
)
from tinygrad_nv.engine.scheduling.step_plan import ScheduledStep, StepPlan, TokenMasks
from tinygrad_nv.kvcache.hybrid_table import HybridTable
from tinygrad_nv.kvcache.pool import PagePool

# half the time of a named tuple's constructor
make: Any = tuple.__new__
# steps after which a sequence that found too few pages tries again, even if too few became free
RETRY_STEPS = 16


class OutOfPages(Exception):
    """The pool is out of pages, and launched steps have unprocessed outputs. Sync, and schedule again."""


class Scheduler:
    """The running and waiting sequences over the pages of `pool`."""

    def __init__(self, pool: PagePool, config: EngineConfig, masks: TokenMasks,
                 proposer: Proposer | None = None) -> None:
        self.pool, self.config, self.masks, self.proposer = pool, config, masks, proposer
        self.adapters = AdapterSlots(config.max_adapters)
        self.running: list[Seq] = []                # sorted by key
        self.num_waiting = self.num_new = 0         # waiting sequences; those that never ran
        self.num_preempted = self.num_offloaded = 0 # events so far
        self.prompt_tokens = self.prefix_hits = 0   # prompt tokens; those found in the prefix cache
        self._waiting_queue: list[tuple[tuple[float, int, int], Seq]] = []
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._started: list[Seq] = []
        self._short_of_pages: tuple[Seq, int] | None = None
        self._retry_in = 0

    def adapter_use(self) -> AdapterUse | None:
        """The adapters of sequences now. Any thread may call this."""
        waiting = [seq for _, seq in self._waiting_queue[:] if seq.waiting]
        return AdapterUse.of(self.config.max_adapters, *([each.request.adapter for each in seqs]
                                                         for seqs in (self.running[:], waiting)))

    # **** the waiting and running queues ****

    def add(self, seq: Seq) -> None:
        """Queues a new sequence with its branches."""
        self.num_new += 1
        self._enqueue(seq)

    def _enqueue(self, seq: Seq) -> None:
        seq.waiting = True
        self.num_waiting += 1
        heappush(self._waiting_queue, (seq.key, seq))

    def start_running(self, seq: Seq) -> None:
        """Adds a sequence that has a slot to the running queue."""
        seq.waiting = False
        insort(self.running, seq, key=lambda each: each.key)

    def remove(self, seq: Seq) -> None:
        """Removes a finished sequence, and frees its pages and slot."""
        if seq.waiting:
            self.num_waiting -= 1
            self.num_new -= seq.num_cached < 0
        elif seq in self.running: self.running.remove(seq)
        if seq in self._started: self._started.remove(seq)
        self.free_slot(seq)
        if seq.table is not None: seq.table.release()
        seq.waiting, seq.finished = False, True
        if self.proposer is not None: self.proposer.forget(seq.name)
        if len(self._waiting_queue) > 2 * self.num_waiting + 64: self._compact()

    def _compact(self) -> None:
        """Drops removed sequences from the heap. Many may be aborted behind a head that waits long."""
        self._waiting_queue = [each for each in self._waiting_queue if each[1].waiting]
        heapify(self._waiting_queue)

    def free_slot(self, seq: Seq) -> None:
        """Frees the sequence's slot."""
        if seq.slot >= 0: self._slots.append(seq.slot)
        if seq.adapter_slot >= 0: self.adapters.release(seq.adapter_slot)
        seq.slot = seq.adapter_slot = -1

    def _preempt(self, seq: Seq) -> None:
        """Preempts a sequence: offloads or frees its pages, frees its slots, and re-queues it. The host must
        know all its tokens."""
        table = seq.table
        assert table is not None
        assert not seq.num_in_flight
        assert not seq.forking
        commit_computed(seq, seq.num_scheduled)
        table.truncate(seq.num_scheduled)
        self.running.remove(seq)
        if seq in self._started: self._started.remove(seq)
        self.num_preempted += 1
        if table.computed > self.config.offload_cost * table.num_entries and table.offload():
            self.num_offloaded += 1
        else: table.release()
        for each in (seq, *seq.branches): self.free_slot(each)
        self._enqueue(seq)

    def restart(self, seq: Seq) -> None:
        """After a failed step: sets the scheduled position back to what the block table has computed, and has
        the slot set again."""
        assert seq.table is not None
        seq.num_scheduled = seq.table.computed
        seq.num_in_flight, seq.num_reserved, seq.forking = 0, 0, False
        if seq.prompt_logprobs is not None: seq.num_scored = len(seq.prompt_logprobs)
        if seq not in self._started: self._started.append(seq)

    # **** a step ****

    def schedule(self, synced: bool, under_way: int = 0) -> ScheduledStep | None:
        """The next step, or None. `under_way`: steps whose output has not been processed. Raises
        `OutOfPages`."""
        most = max_prompt_logits(self.config.max_seqs)
        plan, before = StepPlan(self.config.max_batched_tokens, most), self.num_preempted
        chunked = self._schedule_decodes(plan, synced, self._most_decodes(under_way))
        for seq in chunked:
            if not seq.waiting: self._schedule_chunk(plan, seq, synced)
        for seq in chunked: self._commit(plan, seq)
        # a sequence preempted in this step would take its pages back
        if before == self.num_preempted: self._schedule_waiting(plan)
        drafts = self.config.num_speculative_tokens and self.pool.states is None
        if drafts and not self.num_waiting and plan.logits_budget == most:
            self._schedule_drafts(plan)
        return self._step(plan) if plan.num_tokens else None

    def _most_decodes(self, under_way: int) -> int:
        """How many sequences may decode: in a pipeline a share of those that are in no step."""
        if self.config.stages == 1 or not self.config.overlap: return len(self.running)
        idle, free = sum(not seq.num_in_flight for seq in self.running), self.config.stages - under_way
        return -(-idle // max(1, free))

    def _schedule_decodes(self, plan: StepPlan, synced: bool, most: int) -> list[Seq]:
        """Schedules one token for each decoding sequence, but `most`. Returns the sequences with more than
        one token to compute."""
        chunked, num_tokens, apart = [], plan.num_tokens, self.config.stages > 1
        for seq in self.running[:]:
            num_known, at = len(seq.tokens) + seq.num_in_flight, seq.num_scheduled
            # not forked yet; its token in flight is its last; just preempted
            if seq.forking or num_known >= seq.max_length or seq.waiting: continue
            if apart and seq.num_in_flight: continue
            if num_known - at > 1: chunked.append(seq)
            elif len(num_tokens) == most: continue
            elif at < seq.num_reserved or self._reserve(plan, seq, at + 1, synced): num_tokens[seq] = 1
        taken = len(num_tokens)
        if chunked or self.num_waiting: taken = pad_decodes(taken, self.config.max_seqs, plan.token_budget)
        plan.token_budget -= taken
        plan.single_tokens = plan.token_budget < GROUP
        return chunked

    def _reserve(self, plan: StepPlan, seq: Seq, end: int, synced: bool) -> bool:
        """Reserves pages up to position `end` for a running sequence, preempting others. False if it was
        itself preempted."""
        while not seq.reserve(end, self.pool.page_size):
            if not synced: raise OutOfPages
            victim = self.running[-1]
            plan.remove(victim)
            self._preempt(victim)
            if victim is seq: return False
        return True

    def _schedule_chunk(self, plan: StepPlan, seq: Seq, synced: bool) -> None:
        num_tokens = plan.chunk_size(seq, seq.num_scheduled)
        if num_tokens and self._reserve(plan, seq, pad_end(seq.num_scheduled, num_tokens), synced):
            plan.add(seq, num_tokens)

    def _commit(self, plan: StepPlan, seq: Seq) -> None:
        """The sequence stays in this step: sequences that start after it may share the pages that it fills.
        """
        if num_tokens := plan.num_tokens.get(seq, 0): advance_table(seq, seq.num_scheduled + num_tokens)

    # **** waiting sequences ****

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while plan.token_budget and (seq := self._next_waiting()) is not None and self._start(seq, plan):
            heappop(self._waiting_queue)
            self.num_waiting -= 1
            if seq.num_cached < 0:
                self.num_new, seq.num_cached = self.num_new - 1, seq.num_scheduled
                self.prompt_tokens += seq.num_prompt_tokens
                self.prefix_hits += seq.num_cached
            for each in (seq, *seq.branches): self._take_slots(each)
            self._started.append(seq)
            self.start_running(seq)
            plan.add(seq, plan.chunk_size(seq, seq.num_scheduled))
            self._commit(plan, seq)

    def _take_slots(self, seq: Seq) -> None:
        seq.slot = self._slots.pop()
        if seq.request.adapter is None: return
        found = self.adapters.acquire(seq.request.adapter)
        assert found is not None, "a slot for the adapter was there"
        seq.adapter_slot = found

    def _next_waiting(self) -> Seq | None:
        while self._waiting_queue and not self._waiting_queue[0][1].waiting: heappop(self._waiting_queue)
        return self._waiting_queue[0][1] if self._waiting_queue else None

    @property
    def num_spare_pages(self) -> int:
        """A page of each group of layers for each running sequence."""
        return len(self.running) * len(self.pool.windows)

    def _start(self, seq: Seq, plan: StepPlan) -> bool:
        """Reserves slots and pages for a waiting sequence, or returns False."""
        if plan.token_budget < GROUP and not plan.single_tokens: return False
        if len(self._slots) < 1 + len(seq.branches): return False
        if (adapter := seq.request.adapter) is not None and self.adapters.find(adapter) is None: return False
        if seq.logits_range(0, len(seq.tokens)) and plan.logits_budget < GROUP: return False
        lacking = self._short_of_pages
        if self.running and self._retry_in and lacking is not None and lacking[0] is seq:
            self._retry_in -= 1
            if self.pool.available < lacking[1]: return False
        pool, spare = self.pool, self.num_spare_pages + len(seq.branches) if self.running else 0
        if (table := seq.table) is None:
            images = seq.request.images
            table = seq.table = pool.open(seq.shareable_tokens, seq.request.salt,
                                          None if images is None else images.digests_of)
        # after a failed step, pages pruned by the window may be cached
        elif not (table.is_offloaded or table.pages): table.share(seq.shareable_tokens)
        start, left = table.computed, len(seq.tokens) - table.computed
        whole, chunk = (pad_end(start, each) for each in (left, plan.chunk_size(seq, start)))
        # a sliding window frees pages while the prompt is computed
        need = sum(each.num_missing_pages(whole if each.window is None else chunk) for each in table.groups)
        end = chunk if any(pool.windows) else whole
        shortfall = need + spare - pool.available
        if shortfall > 0 or (table.is_offloaded and not table.restore()):
            if not table.is_offloaded: table.release()
            self._short_of_pages, self._retry_in = (seq, pool.available + shortfall), RETRY_STEPS
            return False
        seq.num_scheduled = table.computed
        seq.num_reserved, self._short_of_pages = 0, None
        reserved = seq.reserve(end, pool.page_size)
        assert reserved
        return True

    # **** speculative decoding ****

    def _schedule_drafts(self, plan: StepPlan) -> None:
        """Asks the proposer for drafts of decoding sequences, as far as tokens, samples and pages last."""
        requests, samples = {}, max_samples(self.config.max_seqs) - self.config.max_seqs
        for seq, num_tokens in plan.num_tokens.items():
            most = min(self.config.num_speculative_tokens, seq.max_length - len(seq.tokens) - 1)
            if num_tokens > 1 or most < 1 or seq.num_in_flight or seq.branches or not seq.can_draft: continue
            cost = pad_tokens(1 + most) - 1
            if seq.num_scheduled + 1 < len(seq.tokens) or plan.token_budget < cost: continue
            requests[seq] = DraftRequest(seq.name, seq.tokens, most, seq.request.params, seq.seed)
            plan.token_budget -= cost
        if not requests or self.proposer is None: return
        for seq, draft in zip(requests, self.proposer.propose(list(requests.values())), strict=True):
            draft = draft[:min(requests[seq].max_tokens, samples)]
            if seq.matcher is not None:
                masks = plan.masks[seq] = seq.matcher.masks(draft)
                draft = draft[:len(masks) - 1]
            if not draft or not all(0 <= token < self.masks.size for token in draft): continue
            own = len(self.pool.windows) * ((len(draft) + GROUP) // self.pool.page_size + 1)
            if self.pool.available < self.num_spare_pages + own: continue
            if seq.reserve(pad_end(seq.num_scheduled, 1 + len(draft)), self.pool.page_size):
                plan.num_tokens[seq], plan.drafts[seq] = 1 + len(draft), draft
                samples -= len(draft)

    # **** the batch ****

    def _step(self, plan: StepPlan) -> ScheduledStep:
        seqs: list[ScheduledSeq] = []
        forked: list[Seq] = []
        needs_sync, drafts = False, plan.drafts
        for seq, num_tokens in plan.num_tokens.items():
            start, tokens = seq.num_scheduled, seq.tokens
            seq.num_scheduled = end = start + num_tokens
            num_known = len(tokens)
            # the common case: the token is still on the device
            if start == num_known: part: Sequence[int] = ()
            else: part = tokens[start:end] if seq not in drafts else [*tokens[start:], *drafts[seq]]
            samples: tuple[Sample, ...] = ()
            if end >= num_known:
                if seq.matcher is None and end >= seq.min_length and not (drafts or seq.branches):
                    samples = (make(Sample, (num_tokens - 1, seq.slot, end, None, seq.logprobs, None)),)
                else: samples = self._samples(seq, start, num_tokens, plan)
                seq.num_in_flight += 1
                if seq.needs_sync: needs_sync = True
                if seq.forking: forked.append(seq)
            if seq.prompt_logprobs is not None: samples = self._prompt_samples(seq, start, end) + samples
            states = None
            if self.pool.states is not None and isinstance(seq.table, HybridTable):
                states = seq.table.step_states(start, end)
            seqs.append(make(ScheduledSeq, (seq.slot, start, part, seq.block_table, samples,
                                            seq.adapter_slot, seq.request.images, states)))
        started, self._started = self._started, []
        number = self.pool.batch
        batch = SchedulerOutput(tuple(seqs), self.pool.take_copies())
        return ScheduledStep(batch, list(plan.num_tokens), frozenset(drafts), started, forked, needs_sync,
                             number, self.adapters.take_loads())

    def _samples(self, seq: Seq, start: int, num_tokens: int, plan: StepPlan) -> tuple[Sample, ...]:
        """The samples of a sequence whose last known token is computed: the next token; after a draft, one
        for each token; with branches, one for each branch."""
        end = start + num_tokens
        if seq in plan.drafts:
            masks = plan.masks.get(seq) or [None] * num_tokens
            return tuple(self._sample(seq, i, start + i + 1, masks[i]) for i in range(num_tokens))
        if not seq.branches: return (self._sample(seq, num_tokens - 1, end, next_mask(seq)),)
        seq.forking = True
        return tuple(self._sample(each, num_tokens - 1, end, next_mask(each))
                     for each in (seq, *seq.branches))

    def _prompt_samples(self, seq: Seq, start: int, end: int) -> tuple[Sample, ...]:
        """Samples for the log probabilities of prompt tokens."""
        wanted, count = seq.logits_range(start, end), seq.request.params.prompt_logprobs
        if wanted: seq.num_scored = wanted.stop
        return tuple(make(Sample, (i - start, -1, i + 1, None, count, seq.tokens[i + 1])) for i in wanted)

    def _sample(self, seq: Seq, token_index: int, position: int, mask: np.ndarray | None) -> Sample:
        mask = self.masks.of(seq, position, mask) if position < seq.min_length else mask
        return make(Sample, (token_index, seq.slot, position, mask, seq.logprobs, None))


def next_mask(seq: Seq) -> np.ndarray | None:
    """The token mask of the sequence's structured output. The host knows all its tokens if it has one."""
    return None if seq.matcher is None else seq.matcher.mask()


def advance_table(seq: Seq, written: int) -> None:
    """Advances the block table to position `written`, which launched steps, and the next one, write."""
    table = seq.table
    assert table is not None
    if (num_known := table.computed) >= written: return
    holes = table.pruned
    table.advance(seq.tokens[num_known:written])
    if holes != table.pruned: seq.refresh_block_table(table.pool.page_size)


def commit_computed(seq: Seq, written: int) -> None:
    """Advances the block table to position `written` after the step's output was processed, and frees pages
    behind the sliding window."""
    advance_table(seq, written)
    table = seq.table
    assert table is not None
    if not any(table.pool.windows): return
    holes = table.pruned
    table.prune_window(written)
    if holes != table.pruned: seq.refresh_block_table(table.pool.page_size)
