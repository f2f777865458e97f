"""A fake executor for engine tests whose tokens reveal bookkeeping errors, and what a request generates
alone.

The content of a position is a hash of its token and of all contents that the token attends to, read through
the block table. With several groups of layers each group has a content there, of its own window and of what
the group before it has. A sampled token is a hash of its position's content, the slot's seed and the
position. So a wrong page, position, slot, seed, copy or order changes all later tokens. Positions that were
never written, or are padding, are poison: reading one is a fault, as are two writers of one position, two
sequences in one slot, and a step over the token budget. `alone` computes the same without pages, slots or
steps.

With `late` the device does nothing until its results are awaited, so host changes in between would show.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.outputs import EngineCoreOutput
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import DraftRequest, Request, pad_tokens
from tinygrad_nv.engine.scheduling.scheduler_output import (
    Logprobs,
    Sample,
    SamplerOutput,
    ScheduledSeq,
    SchedulerOutput,
    max_samples,
)
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.kvcache.pool import PagePool

VOCAB, POISON = 37, -1
BROKEN = 11         # a seed that makes logits not numbers
EOS = 5


def hashed_contents(seen: Sequence[int], x: int) -> int:
    """The content of a position with this token, or content of the group of layers before, that attends to
    the contents `seen`."""
    return hash((tuple(seen), x)) & 0x7FFFFFFFFFFF


def first_visible(position: int, window: int | None) -> int:
    """The first position that a token attends to."""
    return 0 if window is None else max(0, position - window + 1)


def choice(row: int, seed: int, position: int, history: Sequence[int] | None, allowed: Sequence[int]) -> int:
    """The sampled token, from a position's content; `history` for sampling with penalties."""
    if seed == BROKEN: return VOCAB
    return allowed[hash((row, seed, position, tuple(history or ()))) % len(allowed)]


def told(content: int, token: int) -> Logprobs:
    """The log probability of a prompt token after a position of this content."""
    return Logprobs(-float(hash((content, token)) % 9973), 1)


class Rule:
    """A structured output: no two consecutive tokens sum to a multiple of 3; `length` tokens."""

    def __init__(self, length: int) -> None: self.last, self.left = 0, length

    @property
    def is_finished(self) -> bool: return not self.left

    def mask(self) -> np.ndarray: return self.after(self.last)

    def after(self, last: int) -> np.ndarray:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[[token for token in range(VOCAB) if (token + last) % 3]] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def masks(self, draft: Sequence[int]) -> list[np.ndarray]:
        last, found = self.last, [self.mask()]
        for token in draft:
            if not (token + last) % 3 or len(found) == self.left: break
            found.append(self.after(last := token))
        return found

    def accept(self, token: int) -> None:
        assert (token + self.last) % 3
        self.last, self.left = token, self.left - 1


class LateFuture(Future):
    """Waiting for it makes the device run everything queued so far."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self.wake = wake

    def result(self, timeout: float | None = None) -> Any:
        self.wake()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wake()
        return super().exception(timeout)


@dataclass
class Slot:
    """The state of a slot."""
    params: SamplingParams
    seed: int
    history: list[int]
    last: int = POISON


@dataclass
class FakeDevice:
    """`fails`: launches, counted from 0, that raise after part of their work: as many copies as the number
    says, and if these were all, as many sequences."""
    pages: int
    page_size: int
    host_pages: int = 0
    max_seqs: int = 8
    budget: int = 1 << 30
    windows: tuple[int | None, ...] = (None,)
    late: bool = False
    fails: dict[int, int] = field(default_factory=dict)
    vocab_size: int = VOCAB

    def __post_init__(self) -> None:
        self.store = np.full((self.pages, self.page_size), POISON, np.int64)
        self.host = np.full((self.host_pages, self.page_size), POISON, np.int64)
        self.slots: dict[int, Slot] = {}
        self.queue: list[Callable[[], None]] = []
        self.launched: list[SchedulerOutput] = []
        self.faults: list[str] = []

    # **** calls ****

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        self._fault(not 0 <= slot < self.max_seqs, "no such slot")
        self._later(lambda: self.slots.__setitem__(slot, Slot(params, seed, [*prompt, *output])))

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        def run() -> None:
            self._fault(self.slots[source].params is not params, "a fork with other parameters")
            self.slots[slot] = Slot(params, seed, self.slots[source].history[:])
        self._later(run)

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        done: Future[SamplerOutput] = LateFuture(self._wake)
        number = len(self.launched)
        self.launched.append(batch)
        def run() -> None:
            faults = len(self.faults)
            try: done.set_result(self._run(batch, self.fails.get(number)))
            except MemoryError as error: done.set_exception(error)
            # a step launched before the host knew of the failure reads what it left
            if number - 1 in self.fails: del self.faults[faults:]
        self._later(run)
        return done

    def _later(self, task: Callable[[], None]) -> None:
        self.queue.append(task)
        if not self.late: self._wake()

    def _wake(self) -> None:
        queue, self.queue = self.queue, []
        for task in queue: task()

    def _fault(self, wrong: bool, words: str) -> None:
        if wrong: self.faults.append(words)

    # **** a step ****

    def _run(self, batch: SchedulerOutput, fails: int | None) -> SamplerOutput:
        computed = sum(pad_tokens(seq.num_tokens) for seq in batch.seqs)
        self._fault(computed > self.budget, "above the budget")
        slots = [seq.slot for seq in batch.seqs]
        samples = [sample.slot for seq in batch.seqs for sample in seq.samples if not seq.tokens]
        self._fault(len(set(slots)) < len(slots) or len(set(samples)) < len(samples), "a slot twice")
        self._fault(not all(0 <= slot < self.max_seqs for slot in slots), "no such slot")
        for copy in batch.copies[:fails]: self._move(copy)
        if fails is not None:
            # copies come first: a sequence whose page was not copied is not reached
            if fails >= len(batch.copies):
                for seq in batch.seqs[:fails]: self._write(seq, set())
            raise MemoryError("the device has no memory left")
        written: set[tuple[int, int]] = set()
        rows = [self._write(seq, written) for seq in batch.seqs]
        tokens: list[int] = []
        logprobs: dict[int, Logprobs] = {}
        for seq, values in zip(batch.seqs, rows, strict=True):
            for sample in seq.samples:
                content = values[sample.token_index]
                if sample.target is not None:
                    self._fault(sample.slot >= 0, "a slot of what is not sampled")
                    logprobs[len(tokens)] = told(content, sample.target)
                    tokens.append(0)
                    continue
                if sample.logprobs is not None: logprobs[len(tokens)] = Logprobs(-float(content % 97), 1)
                tokens.append(self._choose(sample, content))
        self._fault(len(tokens) > max_samples(self.max_seqs), "more samples than a step has")
        return SamplerOutput(np.array(tokens, np.int32), logprobs)

    def _move(self, copy: PageCopy) -> None:
        source = self.host if copy.where is CopyKind.HOST_TO_DEVICE else self.store
        target = self.host if copy.where is CopyKind.DEVICE_TO_HOST else self.store
        target[copy.target] = source[copy.source]

    def _write(self, seq: ScheduledSeq, written: set[tuple[int, int]]) -> list[int]:
        """Writes a sequence's new positions. Returns the contents of its new tokens."""
        tokens = seq.tokens or [self.slots[seq.slot].last]
        self._fault(POISON in tokens, f"slot {seq.slot} has chosen nothing")
        # a snapshot, as the model runner copies the block table at launch
        count = len(seq.block_table) // len(self.windows)
        rows = list(tokens)
        for group, window in enumerate(self.windows):
            pages = seq.block_table[group * count:(group + 1) * count]
            at = [(pages[position // self.page_size], position % self.page_size)
                  for position in range(seq.start + pad_tokens(len(tokens)))]
            rows = self._write_group(seq, rows, at, window, written)
        return rows

    def _write_group(self, seq: ScheduledSeq, inputs: list[int], at: list[tuple[int, int]],
                     window: int | None, written: set[tuple[int, int]]) -> list[int]:
        """Writes the positions of a group of layers, from the contents of the group before it."""
        positions = at[seq.start:]
        self._fault(not written.isdisjoint(positions), "two writers of a place")
        self._fault(any(page < 0 for page, _ in positions), "a write where there is no page")
        written.update(positions)
        rows: list[int] = []
        for number, place in enumerate(positions):
            if number >= len(inputs): self.store[place] = POISON
            else:
                position = seq.start + number
                seen = [int(self.store[each]) if each[0] >= 0 else POISON
                        for each in at[first_visible(position, window):position]]
                self._fault(POISON in seen, f"slot {seq.slot} place {position} sees poison")
                self.store[place] = hashed_contents(seen, inputs[number])
                rows.append(int(self.store[place]))
        return rows

    def _choose(self, sample: Sample, row: int) -> int:
        slot = self.slots[sample.slot]
        allowed = list(range(VOCAB))
        if sample.mask is not None:
            bits = np.unpackbits(sample.mask.view(np.uint8), bitorder="little")
            allowed = [token for token in allowed if bits[token]]
        history = slot.history if slot.params.filters.penalty else None
        token = choice(row, slot.seed, sample.position, history, allowed)
        slot.history.append(token)
        slot.last = token
        return token


class OracleProposer:
    """Proposes drafts from the known answers, with some wrong tokens."""

    def __init__(self, answers: dict[tuple[str, int], list[int]], wrong: int) -> None:
        self.answers, self.wrong, self.known = answers, wrong, set()

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.known.update(each.key for each in requests)
        return [self._one(each) for each in requests]

    def _one(self, requests: DraftRequest) -> list[int]:
        answer = self.answers[requests.key][len(requests.tokens):][:requests.max_tokens]
        return [(token + 1) % VOCAB if (len(requests.tokens) + i) % self.wrong == 0 else token
                for i, token in enumerate(answer)]

    def forget(self, key: tuple[str, int]) -> None: self.known.discard(key)


def alone(request: Request, index: int, config: EngineConfig, max_len: int, rule: Rule | None = None,
          windows: Sequence[int | None] = (None,)) -> tuple[list[int], str]:
    """Tokens of an answer and its finish reason, if nothing else runs. A request must have a seed."""
    params = request.params
    assert params.seed is not None
    seed, tokens = params.seed + index, list(request.prompt)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos))
    values: list[list[int]] = [[] for _ in windows]     # of each group of layers
    while True:
        for position in range(len(values[-1]), len(tokens)):
            made = tokens[position]
            for each, window in zip(values, windows, strict=True):
                made = hashed_contents(each[first_visible(position, window):], made)
                each.append(made)
        made = len(tokens) - len(request.prompt)
        allowed = [token for token in range(VOCAB) if rule is None or (token + rule.last) % 3]
        if made < params.min_tokens: allowed = [token for token in allowed if token not in ends] or allowed
        history = tokens if params.filters.penalty else None
        token = choice(values[-1][-1], seed, len(tokens), history, allowed)
        if token >= VOCAB: return tokens[len(request.prompt):], "error"
        tokens.append(token)
        answer = tokens[len(request.prompt):]
        if token in ends and made >= params.min_tokens: return answer, "stop"
        if rule is not None:
            rule.accept(token)
            if rule.is_finished: return answer, "stop"
        if len(answer) == params.max_tokens or len(tokens) == max_len: return answer, "length"


def alone_on_prompt(prompt: Sequence[int], windows: Sequence[int | None] = (None,)) -> list[Logprobs]:
    """The log probabilities of a prompt's tokens, if nothing else runs."""
    values: list[list[int]] = [[] for _ in windows]
    for position, made in enumerate(prompt):
        for each, window in zip(values, windows, strict=True):
            made = hashed_contents(each[first_visible(position, window):], made)
            each.append(made)
    return [told(values[-1][i], token) for i, token in enumerate(prompt[1:])]


@dataclass
class Engine:
    """A core over a fake device, driven step by step."""
    pages: int = 64
    page_size: int = 4
    host_pages: int = 0
    max_seqs: int = 4
    max_batched_tokens: int = 32
    late: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    proposer: OracleProposer | None = None
    fails: dict[int, int] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        self.config = EngineConfig(**{"max_seqs": self.max_seqs, "max_len": 256, "eos": (EOS,),
                                      "max_batched_tokens": self.max_batched_tokens, **self.more})
        self.device = FakeDevice(self.pages, self.page_size, self.host_pages, self.max_seqs,
                                 self.max_batched_tokens, self.windows, self.late, self.fails)
        self.pool = PagePool(self.pages, self.page_size, host_pages=self.host_pages, windows=self.windows)
        self.core = EngineCore(self.device, self.pool, self.config, self.proposer)
        self.outputs_seen: list[EngineCoreOutput] = []

    def add(self, name: str, prompt: Sequence[int], priority: int = 0, arrival_s: float = 0.0,
            **params: Any) -> Request:
        """Adds a request. By default the seed is 0 and end tokens are ignored."""
        requests = SamplingParams(**{"seed": 0, "ignore_eos": True, "max_tokens": 8, **params})
        request = Request(name, list(prompt), requests, priority, arrival_s)
        self.core.add(request)
        return request

    def step(self, times: int = 1) -> list[EngineCoreOutput]:
        """The outputs of so many steps."""
        outputs = [each for _ in range(times) for each in self.core.step()]
        self.pool.assert_conserved(self.core._block_tables())
        self.outputs_seen += outputs
        return outputs

    def end(self) -> Engine:
        """Steps until no work is left."""
        while self.core.has_unfinished: self.step()
        assert self.device.faults == []
        assert self.pool.stats().in_use == self.pool.stats().host_in_use == 0
        return self

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """A sequence's output tokens so far."""
        return [token for each in self.outputs_seen if (each.request, each.index) == (name, index)
                for token in each.tokens]

    def last(self, name: str, index: int = 0) -> EngineCoreOutput:
        """The last output of a sequence."""
        return [each for each in self.outputs_seen if (each.request, each.index) == (name, index)][-1]

    @property
    def running(self) -> list[str]:
        """The running requests, in order."""
        return [seq.request.id for seq in self.core.scheduler.running]

    def rows(self, batch: int = -1) -> list[int]:
        """New tokens of each sequence of a batch."""
        return [seq.num_tokens for seq in self.device.launched[batch].seqs]

    def alone(self, request: Request, index: int = 0) -> list[int]:
        """The tokens that a request generates alone."""
        return alone(request, index, self.config, self.core.max_len, windows=self.windows)[0]
