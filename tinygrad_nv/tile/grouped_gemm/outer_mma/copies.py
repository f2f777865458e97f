"""How rows that an order names come to shared memory.

Protocol: an `OrderedCopy` is a `TileCopy` whose rows along K lie where slots of the order say. Slots are read
before their rows are copied: those of the first tiles all at once (`begin`), then in each step of the loop
those of the tile after the one that is copied, so that no copy waits for them.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.ops import TileCopy

SLOT_BYTES = 4


@dataclass
class OrderedCopy(TileCopy):
    """Row i of the group is row order[i] // `gather` of the operand. `order` (u64) is where the group's slots
    begin, `tiles` (s32) how many tiles of rows it has."""
    order: Value
    gather: int
    tiles: Value

    def __post_init__(self) -> None:
        super().__post_init__()
        self.column = self.pointer + (self.first * self.size + self.byte).to("u64")
        self.slots_at = advance(self.kb, self.order, self.row, SLOT_BYTES)
        self.left = self.kb.reg("s32", self.tiles)      # tiles whose slots are not read yet
        self.rows = sorted({self.where(i)[0] for i in range(self.passes)})
        self.slots: list[dict[int, Value]] = []         # of the next tile, and at first of those after it
        self.sources: dict[int, Value] = {}

    def ask(self) -> None:
        """Nothing: where rows lie is not known before their slots are."""

    def begin(self, tiles: int) -> None:
        """Reads slots of so many tiles, and of one more."""
        self.slots = [{row: self.kb.reg("u32", 0) for row in self.rows} for _ in range(tiles + 1)]
        for i, slots in enumerate(self.slots): self._read(slots, first=i == 0)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        kb, pitch, last = self.kb, self.operand.k * self.size, len(self.slots) == 1
        slots = self.slots[0] if last else self.slots.pop(0)
        self.sources = {row: advance(kb, self.column, slot // self.gather, pitch)
                        for row, slot in slots.items()}
        super().next(stage, when, first)
        if last: self._read(slots)

    def _read(self, slots: dict[int, Value], first: bool = False) -> None:
        """The slots of the next tile; of rows that are not there, nothing is read."""
        more = None if first else self.left > 0
        for row, slot in slots.items():
            guard = self.row + row < self.residue if more is None else more
            self.kb.emit("ld.global.u32", slot, self.slots_at.at(row * SLOT_BYTES), guard=guard)
        if isinstance(self.residue, Value) and first:
            self.slots_at += self.residue.to("u64") * SLOT_BYTES
        else: self.slots_at += self.block_k * SLOT_BYTES
        self.left -= 1

    def _advance(self, elements: Value | int) -> None:
        """The next tile's rows lie where its slots say."""

    def _at(self, row: int, column: int) -> MemoryOperand: return self.sources[row].at(column)
