"""State of the sampler (sampler.py) on the device: of each slot parameters, biases and token counts;
and which filters a batch needs.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput
from tinygrad_nv.runtime.memory import read_part, write
from tinygrad_nv.tile.sampling.spec import NUMBERS


class SamplerState:
    """The device's state of `count` slots: `numbers` float32 [count, NUMBERS]; `counts` float32 [count,
    width], how often a token is in the output, plus 0.5 if it is in the prompt; `bias` float32 [count,
    width]. The last two are allocated with the first request that needs them. They are of `tokens`, which are
    all of the vocabulary by default."""

    def __init__(self, count: int, vocab_size: int, device: str | None = None,
                 tokens: range | None = None) -> None:
        self.count, self.tokens, self.device = count, tokens or range(vocab_size), device
        self.width, self._end = len(self.tokens), max(vocab_size, self.tokens.stop)
        self._nothing = memoryview(bytes(4 * self.width))
        self._biased = set[int]()   # slots with biases
        self.numbers = Tensor.empty(count, NUMBERS, device=device)
        for slot in range(count): write(self.numbers, self._at(NUMBERS, slot), _bytes(_GREEDY))

    @cached_property
    def counts(self) -> Tensor:
        """Token counts, for penalties."""
        return self._zeros()

    @cached_property
    def bias(self) -> Tensor:
        """logit_bias."""
        return self._zeros()

    def start_slot(self, slot: int, params: SamplingParams, seed: int, prompt: Sequence[int],
                   output: Sequence[int] = ()) -> None:
        """Assigns a slot to a sequence; `output` are the tokens it has generated already."""
        write(self.numbers, self._at(NUMBERS, slot), _bytes(params.numbers(seed)))
        if params.filters.penalty:
            row = np.bincount(np.asarray(output, np.int64), minlength=self._end).astype(np.float32)
            row[np.unique(np.asarray(prompt, np.int64))] += 0.5
            write(self.counts, self._at(self.width, slot), self._own(row))
        if params.filters.bias:
            biases, given = np.zeros(self._end, np.float32), params.logit_bias or {}
            biases[list(given)] = list(given.values())
            write(self.bias, self._at(self.width, slot), self._own(biases))
            self._biased.add(slot)
        elif slot in self._biased:
            write(self.bias, self._at(self.width, slot), self._nothing)
            self._biased.remove(slot)

    def fork(self, source: int, slot: int, params: SamplingParams, seed: int) -> None:
        """Assigns a slot to a copy of the sequence in `source`, with another seed."""
        self.start_slot(slot, params, seed, ())
        if params.filters.penalty:
            size = 4 * self.width
            write(self.counts, slot * size, memoryview(read_part(self.counts, source * size, size)))

    @property
    def assigned_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that steps assign to."""
        return (self.counts,) if "counts" in vars(self) else ()

    def allocate(self, filters: Filters) -> None:
        """Allocates what a sampler with these filters needs."""
        if filters.penalty: _ = self.counts
        if filters.bias: _ = self.bias

    def _zeros(self) -> Tensor:
        made = Tensor.empty(self.count, self.width, dtype=dtypes.float32, device=self.device)
        for slot in range(self.count): write(made, self._at(self.width, slot), self._nothing)
        return made

    def _own(self, row: np.ndarray) -> memoryview:
        """Returns the part of a row of all tokens that this rank has."""
        return _bytes(row[self.tokens.start:self.tokens.stop])

    def _at(self, words: int, slot: int) -> int:
        """The byte offset of a slot's row of `words` words."""
        return 4 * words * slot


_GREEDY = SamplingParams(temperature=0).numbers(0)


def _bytes(x: np.ndarray) -> memoryview: return x.data.cast("B")


def pack_mask(size: int, forbidden: Iterable[int]) -> np.ndarray:
    """Returns a packed token mask, uint32 [⌈size / 32⌉], that allows all tokens but the forbidden."""
    allowed = np.ones(-(-size // 32) * 32, np.uint8)
    allowed[list(forbidden)] = 0
    return np.packbits(allowed, bitorder="little").view(np.uint32)


class SlotFilters:
    """The sampler filters of each slot, and their union for a batch. Each distinct `Filters` has a number,
    since sets of numbers are faster than sets of `Filters`. Used by the thread that launches."""

    def __init__(self, slots: int) -> None:
        self.distinct: list[Filters] = [Filters()]
        self.index_of_slot = [0] * slots
        self.combined: dict[tuple[frozenset[int], bool], Filters] = {}

    def start_slot(self, slot: int, filters: Filters) -> None:
        """Sets the filters of a slot."""
        if filters not in self.distinct: self.distinct.append(filters)
        self.index_of_slot[slot] = self.distinct.index(filters)

    def of(self, batch: SchedulerOutput) -> Filters:
        """The union of the filters of a batch's samples."""
        slot_filters, masked = set(), False
        for seq in batch.seqs:
            for sample in seq.samples:
                if sample.slot >= 0: slot_filters.add(self.index_of_slot[sample.slot])
                masked = masked or sample.mask is not None
        if (made := self.combined.get(key := (frozenset(slot_filters), masked))) is None:
            made = Filters(mask=masked)
            for kind in slot_filters: made |= self.distinct[kind]
            self.combined[key] = made
        return made
