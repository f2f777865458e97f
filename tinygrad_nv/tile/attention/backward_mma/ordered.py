"""Blocks of dq in turns: the same sum whatever CTAs do first.

Protocol: flags are u32, zero before the launch. The first counts CTAs as they start: a CTA has the keys, the
head and the element of the batch that its number says, whatever its place in the grid. The others, one for
each block of rows of each query head, count how many CTAs have added to the block, which they do in the order
of their keys:

    turns.wait(position) before a barrier: until all with earlier keys have added to the block of `position`
    …                      adds
    turns.passed(when)     after a barrier: the next one's turn, of the block that was waited for last

A CTA waits only for others that began before it, so that some CTA always goes on, and these reach the block
no later than it does: with a causal band the later keys begin at later rows. One thread waits and passes
for all: what barriers order before its store, and after its load, is ordered too.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_mma.plan import NUMBER_BYTES
from tinygrad_nv.tile.attention.backward_mma.rows import RowBlockPosition
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.spec import AttentionSpec


def flags_of(spec: AttentionSpec, block_m: int) -> int:
    """How many flags there are."""
    return 1 + spec.matrices * -(-spec.s_q // block_m)


def count_started(kb: Kernel, turns: Value, heads: int) -> tuple[Value, Value, Value]:
    """Block of keys, head and element of the batch by the number of CTAs that have started before."""
    told = kb.shared("told", NUMBER_BYTES)
    with kb.if_(kb.tid.x == 0):
        number = kb.reg("u32")
        kb.emit("atom.relaxed.gpu.global.add.u32", number, turns.at(), 1)
        kb.st("shared", "u32", told.address().at(), number)
    kb.sync()
    number = kb.ld("shared", "u32", told.address().at())[0]
    matrix = number // kb.nctaid.x
    return number % kb.nctaid.x, matrix % heads, matrix // heads


@dataclass
class OrderedBlocks:
    """The turns of a CTA, that has the keys of `block` (u32) for `batch`."""
    kb: Kernel
    spec: AttentionSpec
    blocks: RowBlocks
    flags: Value
    block: Value
    batch: Sequence[Value]

    def __post_init__(self) -> None:
        kb, (_, heads, group) = self.kb, self.spec.batch
        self.flag, self.turn = kb.reg("u64", self.flags), kb.reg("u32", 0)
        self.matrix = (self.batch[0] * heads + self.batch[1]) * group

    def wait(self, position: RowBlockPosition) -> None:
        """Until all with earlier keys have added to the block."""
        kb, m = self.kb, self.blocks.block_m
        with kb.if_(kb.tid.x == 0):
            number = (self.matrix + position.query) * -(-self.spec.s_q // m) + position.row.to("u32") // m
            self.flag.set(self.flags + (number.to("u64") * 4 + 4))
            self.turn.set(self.block)
            if isinstance(first := self.blocks.first_keys(position.row), Value): self.turn -= first.to("u32")
            now = kb.reg("u32")
            kb.emit("ld.acquire.gpu.global.u32", now, self.flag.at())
            with kb.while_(lambda: now != self.turn):
                kb.emit("ld.acquire.gpu.global.u32", now, self.flag.at())
            self.turn += 1

    def pass_turn(self, when: Value) -> None:
        """Gives the turn to the next one where the predicate holds."""
        kb = self.kb
        kb.emit("st.release.gpu.global.u32", self.flag.at(), self.turn, guard=(kb.tid.x == 0) & when)
