"""Sampler filters that the slots of a batch need.

Protocol: `start_slot` sets the filters of a slot's sequence; `of(batch)` is the union for the samples of a
batch, which says what sampler serves it.
"""
from __future__ import annotations

from tinygrad_nv.engine.sampling import Filters
from tinygrad_nv.engine.scheduling.scheduler_output import SchedulerOutput


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
