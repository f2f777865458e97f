"""Which sequences the next step computes, and how much of each.

Protocol. `schedule(settled)` gives a `Step` and counts it as launched, or None when nothing can run. Steps
are launched in this order, each before the next is scheduled. `settled` says that all launched steps were
looked at; otherwise each running sequence is taken to go on, and pages are taken from nobody: `Short` is
raised where that would be needed, and what was reserved until then stays.

Order. A sequence's key is `priority · ageing_s + arrival_s`: a smaller one goes first. Priority is so many
seconds' start and no more, so whoever waits is overtaken for a bounded time only. What goes into a step,
until `max_batched_tokens` rows are computed:

  1. each running sequence that has one token to compute
  2. chunks of running sequences that have more, in their order
  3. waiting sequences, in their order: the first that finds no slot or too few pages ends it
  4. drafts, where rows are left and nobody waits for them

Pages. A waiting sequence begins when there are pages for all its tokens, and one more for each that runs. A
running sequence that finds too few takes those of the last in order, which waits again then with the key it
has: before all that came after it.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.scheduling.batch import GROUP, Batch, Sample, Work
from tinygrad_nv.engine.scheduling.request import Asked, Proposer, Seq, computed_rows, padded
from tinygrad_nv.engine.structured_output.masks import Masks
from tinygrad_nv.kvcache.pool import PagePool

# a named tuple's own constructor takes twice the time
new: Any = tuple.__new__
RETRY = 16      # steps after which pages are asked for again, although not so many came back as lacked


class Short(Exception):
    """There are too few pages, and steps that were launched are not looked at."""


@dataclass
class Step:
    """A batch with the sequences that its works are for, and those of them whose rows but the first are
    `drafted`. Before it, the slots of `begun` are to be set, then those of the branches of `forked`.
    `hosted`: the next one cannot be scheduled before this one is looked at. The pool calls the batch
    `number`."""
    batch: Batch
    seqs: list[Seq]
    drafted: frozenset[Seq]
    begun: list[Seq]
    forked: list[Seq]
    hosted: bool
    number: int


@dataclass
class Plan:
    """A step in the making."""
    budget: int
    single: bool = False        # decodes leave less than a group
    rows: dict[Seq, int] = field(default_factory=dict)
    drafts: dict[Seq, Sequence[int]] = field(default_factory=dict)
    forms: dict[Seq, Sequence[np.ndarray | None]] = field(default_factory=dict)

    def put(self, seq: Seq, rows: int) -> None:
        """The sequence computes so many."""
        self.rows[seq] = rows
        self.budget -= computed_rows(rows)

    def chunk(self, left: int) -> int:
        """How many of `left` tokens may be computed: whole groups, but for the last; one, if decodes leave no
        more; 0 if others have them."""
        if left == 1 or self.single: return min(1, self.budget)
        return min(left, self.budget // GROUP * GROUP)

    def drop(self, seq: Seq) -> None:
        """It does not."""
        if rows := self.rows.pop(seq, 0): self.budget += computed_rows(rows)


class Scheduler:
    """Sequences that wait and run, over the pages of `pool`."""

    def __init__(self, pool: PagePool, config: EngineConfig, masks: Masks,
                 proposer: Proposer | None = None) -> None:
        self.pool, self.config, self.masks, self.proposer = pool, config, masks, proposer
        self.running: list[Seq] = []                # in the order of their keys
        self.waiting = self.new = 0                 # sequences that wait; those of them that never ran
        self.preempted = self.offloaded = 0         # times
        self.prompt_tokens = self.hits = 0          # tokens of prompts that began; those that were there
        self._queue: list[tuple[tuple[float, int, int], Seq]] = []
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._begun: list[Seq] = []
        self._lacking: tuple[Seq, int] | None = None
        self._retry = 0

    # **** who waits and runs ****

    def add(self, seq: Seq) -> None:
        """A new sequence, with its branches, waits."""
        self.new += 1
        self._wait(seq)

    def _wait(self, seq: Seq) -> None:
        seq.waiting = True
        self.waiting += 1
        heappush(self._queue, (seq.key, seq))

    def run(self, seq: Seq) -> None:
        """The sequence has a slot, and runs."""
        seq.waiting = False
        insort(self.running, seq, key=lambda each: each.key)

    def remove(self, seq: Seq) -> None:
        """The sequence is over: its pages and slot are free."""
        if seq.waiting:
            self.waiting -= 1
            self.new -= seq.cached < 0
        elif seq in self.running: self.running.remove(seq)
        if seq in self._begun: self._begun.remove(seq)
        self.leave(seq)
        if seq.table is not None: seq.table.release()
        seq.waiting, seq.finished = False, True
        if self.proposer is not None: self.proposer.forget(seq.name)
        if len(self._queue) > 2 * self.waiting + 64: self._sweep()

    def _sweep(self) -> None:
        """Forgets who waits no more. Many may come and go behind a first who waits long."""
        self._queue = [each for each in self._queue if each[1].waiting]
        heapify(self._queue)

    def leave(self, seq: Seq) -> None:
        """Its slot is free."""
        if seq.slot >= 0: self._slots.append(seq.slot)
        seq.slot = -1

    def _preempt(self, seq: Seq) -> None:
        """Takes a sequence's pages and slots. The host knows all its tokens."""
        table = seq.table
        assert table is not None
        assert not seq.unknown
        assert not seq.forking
        catch_up(seq, seq.scheduled)
        table.truncate(seq.scheduled)
        self.running.remove(seq)
        if seq in self._begun: self._begun.remove(seq)
        self.preempted += 1
        if table.computed > self.config.offload_cost * len(table.pages) and table.offload():
            self.offloaded += 1
        else: table.release()
        for each in (seq, *seq.branches): self.leave(each)
        self._wait(seq)

    def restart(self, seq: Seq) -> None:
        """What a running sequence has computed is what its table says, and its slot is to be set again."""
        assert seq.table is not None
        seq.scheduled = seq.table.computed
        seq.unknown, seq.covered, seq.forking = 0, 0, False
        if seq not in self._begun: self._begun.append(seq)

    # **** a step ****

    def schedule(self, settled: bool) -> Step | None:
        """The next step, or None. Raises `Short`."""
        plan, before = Plan(self.config.max_batched_tokens), self.preempted
        chunked = self._decodes(plan, settled)
        for seq in chunked:
            if not seq.waiting: self._chunk(plan, seq, settled)
        for seq in chunked: self._certain(plan, seq)
        # whoever has just lost pages would take them back
        if before == self.preempted: self._admit(plan)
        if self.config.speculation and not self.waiting: self._draft(plan)
        return self._step(plan) if plan.rows else None

    def _decodes(self, plan: Plan, settled: bool) -> list[Seq]:
        """A row for each that has one token to compute. Who has more is returned."""
        chunked, rows = [], plan.rows
        for seq in self.running[:]:
            known, at = len(seq.tokens) + seq.unknown, seq.scheduled
            # no branches yet; the token on its way is its last; another took its pages
            if seq.forking or known >= seq.limit or seq.waiting: continue
            if known - at > 1: chunked.append(seq)
            elif at < seq.covered or self._room(plan, seq, at + 1, settled): rows[seq] = 1
        plan.budget -= len(rows)
        plan.single = plan.budget < GROUP
        return chunked

    def _room(self, plan: Plan, seq: Seq, end: int, settled: bool) -> bool:
        """Pages for a running sequence up to place `end`, whosever they are; False if they were its own."""
        while not seq.cover(end, self.pool.page_size):
            if not settled: raise Short
            victim = self.running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is seq: return False
        return True

    def _chunk(self, plan: Plan, seq: Seq, settled: bool) -> None:
        rows = plan.chunk(len(seq.tokens) - seq.scheduled)
        if rows and self._room(plan, seq, padded(seq.scheduled, rows), settled): plan.put(seq, rows)

    def _certain(self, plan: Plan, seq: Seq) -> None:
        """Nobody drops the sequence from this step any more: who begins behind it shares what it writes."""
        if rows := plan.rows.get(seq, 0): tell(seq, seq.scheduled + rows)

    # **** who begins ****

    def _admit(self, plan: Plan) -> None:
        while plan.budget and (seq := self._first()) is not None and self._begin(seq, plan):
            heappop(self._queue)
            self.waiting -= 1
            if seq.cached < 0:
                self.new, seq.cached = self.new - 1, seq.scheduled
                self.prompt_tokens, self.hits = self.prompt_tokens + seq.prompt, self.hits + seq.cached
            for each in (seq, *seq.branches): each.slot = self._slots.pop()
            self._begun.append(seq)
            self.run(seq)
            plan.put(seq, plan.chunk(len(seq.tokens) - seq.scheduled))
            self._certain(plan, seq)

    def _first(self) -> Seq | None:
        while self._queue and not self._queue[0][1].waiting: heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _begin(self, seq: Seq, plan: Plan) -> bool:
        """Slots and pages for a sequence that waits, or False."""
        if plan.budget < GROUP and not plan.single: return False
        if len(self._slots) < 1 + len(seq.branches): return False
        lacking = self._lacking
        if self.running and self._retry and lacking is not None and lacking[0] is seq:
            self._retry -= 1
            if self.pool.available < lacking[1]: return False
        pool, spare = self.pool, len(self.running) + len(seq.branches) if self.running else 0
        if (table := seq.table) is None: table = seq.table = pool.open(seq.tokens, seq.request.salt)
        # after a step that failed, what a window left behind may be there
        elif not (table.away or table.pages): table.share(seq.tokens)
        left = len(seq.tokens) - table.computed
        # pages of a sliding window come back while a prompt is computed
        end = padded(table.computed, left if self.config.window is None else plan.chunk(left))
        if not table.away: need = table.missing(end)
        else: need = max(len(table.host_pages), -(-end // pool.page_size) - table.pruned)
        short = need + spare - pool.available
        if short > 0 or (table.away and not table.restore()):
            if not table.away: table.release()
            self._lacking, self._retry = (seq, pool.available + short), RETRY
            return False
        seq.scheduled = table.computed
        seq.covered, self._lacking = 0, None
        covered = seq.cover(end, pool.page_size)
        assert covered
        return True

    # **** speculation ****

    def _draft(self, plan: Plan) -> None:
        """Drafts for sequences that decode, as far as rows and pages are left."""
        asked = {}
        for seq, rows in plan.rows.items():
            most = min(self.config.speculation, seq.limit - len(seq.tokens) - 1)
            if rows > 1 or most < 1 or seq.unknown or seq.branches or not seq.drafted: continue
            if seq.scheduled + 1 < len(seq.tokens) or plan.budget < computed_rows(1 + most) - 1: continue
            asked[seq] = Asked(seq.name, seq.tokens, most, seq.request.params, seq.seed)
            plan.budget -= computed_rows(1 + most) - 1
        if not asked or self.proposer is None: return
        for seq, draft in zip(asked, self.proposer.propose(list(asked.values())), strict=True):
            draft = draft[:asked[seq].most]
            if seq.matcher is not None:
                forms = plan.forms[seq] = seq.matcher.masks(draft)
                draft = draft[:len(forms) - 1]
            if not draft or not all(0 <= token < self.masks.size for token in draft): continue
            spare = len(self.running) + (len(draft) + GROUP) // self.pool.page_size + 1
            if self.pool.available < spare: continue
            if seq.cover(padded(seq.scheduled, 1 + len(draft)), self.pool.page_size):
                plan.rows[seq], plan.drafts[seq] = 1 + len(draft), draft

    # **** the batch ****

    def _step(self, plan: Plan) -> Step:
        works: list[Work] = []
        forked: list[Seq] = []
        hosted, drafts = False, plan.drafts
        for seq, rows in plan.rows.items():
            start, tokens = seq.scheduled, seq.tokens
            seq.scheduled = end = start + rows
            known = len(tokens)
            # what most are: a token that the host does not know, and whatever follows
            if start == known: part: Sequence[int] = ()
            else: part = tokens[start:end] if seq not in drafts else [*tokens[start:], *drafts[seq]]
            samples: tuple[Sample, ...] = ()
            if end >= known:
                if seq.matcher is None and end >= seq.ends_at and not (drafts or seq.branches):
                    samples = (new(Sample, (rows - 1, seq.slot, end, None, seq.logprobs)),)
                else: samples = self._samples(seq, start, rows, plan)
                seq.unknown += 1
                if seq.hosted: hosted = True
                if seq.forking: forked.append(seq)
            works.append(new(Work, (seq.slot, start, part, seq.pages, samples)))
        begun, self._begun = self._begun, []
        number = self.pool.batch
        return Step(Batch(tuple(works), self.pool.take_moves()), list(plan.rows), frozenset(drafts), begun,
                    forked, hosted, number)

    def _samples(self, seq: Seq, start: int, rows: int, plan: Plan) -> tuple[Sample, ...]:
        """What is chosen by a work that has the last known token: the next one, after each row of a draft,
        or for each branch."""
        end = start + rows
        if seq in plan.drafts:
            forms = plan.forms.get(seq) or [None] * rows
            return tuple(self._sample(seq, row, start + row + 1, forms[row]) for row in range(rows))
        if not seq.branches: return (self._sample(seq, rows - 1, end, mask_of(seq)),)
        seq.forking = True
        return tuple(self._sample(each, rows - 1, end, mask_of(each)) for each in (seq, *seq.branches))

    def _sample(self, seq: Seq, row: int, place: int, form: np.ndarray | None) -> Sample:
        mask = self.masks.of(seq, place, form) if place < seq.ends_at else form
        return new(Sample, (row, seq.slot, place, mask, seq.logprobs))


def mask_of(seq: Seq) -> np.ndarray | None:
    """What the form allows that a sequence must have. The host knows its tokens if there is one."""
    return None if seq.matcher is None else seq.matcher.mask()


def tell(seq: Seq, written: int) -> None:
    """Tells the table of tokens before place `written`: steps that were launched write them, and the one that
    is next."""
    table = seq.table
    assert table is not None
    if (known := table.computed) >= written: return
    holes = table.pruned
    table.advance(seq.tokens[known:written])
    if holes != table.pruned: seq.shown(table.pool.page_size)


def catch_up(seq: Seq, written: int) -> None:
    """Tells the table of tokens before place `written`, in a step that was looked at: what no row behind them
    sees is given back."""
    tell(seq, written)
    table = seq.table
    assert table is not None
    if (window := table.pool.window) is None: return
    holes = table.pruned
    table.prune(written - window + 1)
    if holes != table.pruned: seq.shown(table.pool.page_size)
