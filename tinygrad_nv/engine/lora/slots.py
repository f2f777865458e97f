"""Slots of the adapters that are on the device.

Protocol: a running sequence with an adapter holds the adapter's slot, from `acquire` until `release`. An
adapter that nothing holds stays in its slot until another needs it; the least recently used goes first.
`acquire` returns None while all slots are held by others: the sequence waits. `take_loads` returns the
adapters to put into slots before the next step is launched. Called by the core's thread alone.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinygrad_nv.models.peft import Adapter



@dataclass
class _Slot:
    adapter: Adapter | None = None
    users: int = 0
    released: int = 0       # when its last user left


@dataclass(frozen=True)
class AdapterUse:
    """How many slots there are, and the names of adapters of sequences that run and that wait."""
    slots: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]

    @staticmethod
    def of(slots: int, running: Sequence[Adapter | None],
           waiting: Sequence[Adapter | None]) -> AdapterUse | None:
        """Counts adapters of sequences; None of a model that is served without adapters."""
        if not slots: return None
        return AdapterUse(slots, *(tuple(sorted({each.name for each in those if each is not None}))
                                   for those in (running, waiting)))

    def labels(self) -> dict[str, str]:
        """Returns the labels of vLLM's metric."""
        return {"max_lora": str(self.slots), "waiting_lora_adapters": ",".join(self.waiting),
                "running_lora_adapters": ",".join(self.running)}


class AdapterSlots:
    """So many slots."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._loads: dict[int, Adapter] = {}
        self._clock = 0

    def find(self, adapter: Adapter) -> int | None:
        """The slot that the adapter has or would get; None while all are held."""
        for number, slot in enumerate(self._slots):
            if slot.adapter is not None and slot.adapter.digest == adapter.digest: return number
        free = [number for number, slot in enumerate(self._slots) if not slot.users]
        return min(free, key=lambda number: self._slots[number].released, default=None)

    def acquire(self, adapter: Adapter) -> int | None:
        """Holds a slot for one more sequence."""
        if (number := self.find(adapter)) is None: return None
        slot = self._slots[number]
        if slot.adapter is None or slot.adapter.digest != adapter.digest:
            slot.adapter = self._loads[number] = adapter
        slot.users += 1
        return number

    def release(self, number: int) -> None:
        """One sequence fewer holds a slot."""
        slot = self._slots[number]
        assert slot.users > 0, "a slot that nothing holds"
        slot.users, self._clock = slot.users - 1, self._clock + 1
        slot.released = self._clock

    def take_loads(self) -> tuple[tuple[int, Adapter], ...]:
        """Slots to fill before the next step, once."""
        loads, self._loads = tuple(self._loads.items()), {}
        return loads

    def invalidate(self) -> None:
        """After a failed step: what slots hold is not known; those in use are filled again."""
        for number, slot in enumerate(self._slots):
            if slot.users and slot.adapter is not None: self._loads[number] = slot.adapter
            elif not slot.users: slot.adapter = None

    @property
    def in_use(self) -> int:
        """Slots that sequences hold."""
        return sum(slot.users > 0 for slot in self._slots)
