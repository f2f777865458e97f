"""dq of a block of rows: products of ds and the CTA's keys, added to what other CTAs have added.

Protocol: ds lies in shared memory as its warps have it, a row of a key: `keep` writes a warp's share. After a
barrier `add` multiplies, each warp its share of rows and of d, and adds to memory. Warps that share rows have
every so many 16 elements of d each. A lane's elements are two neighbours of each row; they are added in one
instruction where there is one for two (sm_90).
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import MOST_OFFSET
from tinygrad_nv.tile.attention.backward_mma.plan import BackwardMmaPlan
from tinygrad_nv.tile.attention.backward_mma.rows import RowBlockPosition
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.score import AccFragment
from tinygrad_nv.tile.fragments import Fragments, instruction
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import Places, swizzle_offset


@dataclass
class QueryGradient:
    """Adds blocks of dq. `keys` is how the keys lie at `memory` (u32), ds is at `weights` (u32); `dq` (u64)
    is where row `low` of the first query head begins; `slope` is what ds lacks."""
    kb: Kernel
    plan: BackwardMmaPlan
    keys: SharedTile
    memory: Value
    weights: Value
    dq: Value
    blocks: RowBlocks
    slope: float

    def __post_init__(self) -> None:
        kb, one, s = self.kb, self.plan.spec.forward, self.plan.schedule
        found = self.plan.dq_warps
        assert found is not None
        self.rows, self.apart = s.block_m // found[0], found[1]
        self.columns = range(0, self.plan.d, 16 * self.apart)  # but for the first
        warp, lane, dtype = kb.tid.x >> 5, kb.special("laneid"), one.q.dtype
        self.tile, steps = SharedTile(s.block_n, s.block_m * 2), s.block_n // 16
        row, column = warp % found[0] * self.rows, warp // found[0] * 16
        self.left = Fragments(kb, dtype, self.tile, True, False, row, self.rows, steps, 0)
        self.right = Fragments(kb, dtype, self.keys, True, True, column,
                               self.plan.d - 16 * (self.apart - 1), steps, 0)
        self.left.move(self.weights)
        self.right.move(self.memory)
        self.row, self.column = row + (lane >> 2), column + ((lane & 3) << 1)
        self.dq = self.dq + (self.row * one.d + self.column).to("u64") * 4
        self.position = RowBlockPosition(self.blocks)
        self.position.follow(self.dq, one.d * 4, one.s_q * one.d * 4)

    def keep(self, weights: list[list[list[Value]]], key: Value, row: Value, to: Value) -> None:
        """Writes a warp's ds, or p, to a tile (u32): from `key` and `row` (u32) on, fragments by 16 keys, by
        16 rows."""
        kb, lane = self.kb, self.kb.special("laneid")
        places = Places(kb, self.tile,
                        swizzle_offset(self.tile, key + (lane >> 2), row * 2 + ((lane & 3) << 2)))
        places.at_stage(to)
        for i, fours in enumerate(weights):
            for step, four in enumerate(fours):
                for r, value in enumerate(four):
                    plain = self.tile.plain(16 * i + 8 * (r % 2), 32 * step + 16 * (r // 2))
                    kb.emit("st.shared.b32", places(plain), value)

    def add(self) -> None:
        """Multiplies and adds the block, and goes on to the next."""
        kb, one = self.kb, self.plan.spec.forward
        shape, types = instruction(one.q.dtype, one.q.dtype)
        cells: AccFragment = [[kb.regs("f32", 4, 0.0) for _ in range(2 * len(self.columns))]
                        for _ in range(self.rows // 16)]
        for step in range(self.left.steps):
            self.left.load(step, left := self.left.registers())
            for j in range(len(self.columns)):
                self.right.load_one(j * self.apart, step, keys := kb.regs("b32", 4))
                for row, four in zip(cells, left, strict=True):
                    for half in range(2):
                        cell = row[2 * j + half]
                        kb.mma(shape, types, cell, four, keys[2 * half:2 * half + 2], cell)
        self._add_cells(cells)
        self.position.advance()

    def _add_cells(self, cells: AccFragment) -> None:
        """Adds cells to memory, where there are rows and columns."""
        kb, one = self.kb, self.plan.spec.forward
        left = None if self.blocks.whole_rows else \
            self.blocks.s_q - self.position.row - self.row.to("s32")
        for i, row in enumerate(cells):
            for h in range(2):
                down = 16 * i + 8 * h
                inside = None if left is None else left > down
                for j, cell in enumerate(row):
                    guard = inside
                    right = self.columns[j // 2] + 8 * (j % 2)
                    if right >= one.d: continue
                    if right + 16 * self.apart > one.d:
                        there = self.column < one.d - right
                        guard = there if guard is None else guard & there
                    at = (down * one.d + right) * 4
                    assert at < MOST_OFFSET
                    two = [value * self.slope for value in cell[2 * h:2 * h + 2]]
                    if kb.hopper: kb.emit("red.global.add.v2.f32", self.dq.at(at), two, guard=guard)
                    else:
                        for e, value in enumerate(two):
                            kb.emit("red.global.add.f32", self.dq.at(at + 4 * e), value, guard=guard)
