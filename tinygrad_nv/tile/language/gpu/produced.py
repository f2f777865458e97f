"""Loops that a producer warp fills: those whose loads it can find and issue by itself.

Protocol: `produced(program, assignment, stages, arch)` has the loops with the loads that TMA brings for them.
The producer goes through loops and branches around them, too: it computes their bounds and conditions again,
from constants, numbers of programs, indices of loops and scalars of memory that the program does not write.
There is no producer where one loop that has operands to copy ahead cannot be filled: the others would wait
for their copies alone.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.fragments import STEP_BYTES
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.pipelining import Depth, ahead_of, can_recompute, read_ahead
from tinygrad_nv.tile.language.gpu.staged import tile_in_smem
from tinygrad_nv.tile.language.ir import Op, Program, Region, Value
from tinygrad_nv.tile.layout import MAP_DTYPES, MOST_BOX, MOST_RANK


class NotProduced(Exception):
    """A loop that the producer cannot fill."""


def find_produced_loops(program: Program, assignment: Assignment, stages: Depth, arch: str) -> dict[Op,
                                                                                                    list[Op]]:
    """The loops that a producer fills, with their loads; none where one of them cannot be."""
    if arch != "sm_90a": return {}
    try: return dict(_Search(program, assignment, stages).loops(program.body, frozenset()))
    except NotProduced: return {}


class _Search:
    """Finds the loops of a region; `indices` are those of the loops around it."""

    def __init__(self, program: Program, assignment: Assignment, stages: Depth) -> None:
        self.program, self.assignment, self.stages = program, assignment, stages

    def loops(self, region: Region, indices: frozenset[Value]) -> Iterator[tuple[Op, list[Op]]]:
        for op in region.ops:
            if op.name == "for": yield from self._loop(op, indices)
            elif op.name == "if": yield from self._branch(op, indices)
            elif any(self._loads_ahead(each) for inner in op.regions for each in inner.walk()):
                raise NotProduced

    def _loads_ahead(self, op: Op) -> list[Op]:
        if op.name != "for" or self.stages.of(op) < 2: return []
        return ahead_of(op, self.assignment)

    def _branch(self, op: Op, indices: frozenset[Value]) -> Iterator[tuple[Op, list[Op]]]:
        found = [each for region in op.regions for each in self.loops(region, indices)]
        if found and not self._is_known(op.operands[0], indices): raise NotProduced
        yield from found

    def _loop(self, op: Op, indices: frozenset[Value]) -> Iterator[tuple[Op, list[Op]]]:
        own = indices | {op.regions[0].arguments[0]}
        inner, loads = list(self.loops(op.regions[0], own)), self._loads_ahead(op)
        if inner: loads = [one for one in loads if self._by_tma(one, own)]
        if not inner and not loads: return
        kinds = {self.assignment.plans[dot].kind for dot in op.regions[0].walk() if dot.name == "dot"}
        if kinds != {"wgmma"} or not all(self._by_tma(one, own) for one in loads): raise NotProduced
        if not all(self._is_known(each, indices) for each in op.operands[:3]): raise NotProduced
        if not inner and "pipe" not in op.attributes:
            loads += [one for one in read_ahead(op, self.assignment) if self._by_tma(one, own)]
        if loads: yield op, loads
        yield from inner

    def _is_known(self, value: Value, indices: frozenset[Value]) -> bool:
        """Whether the producer can compute a scalar by itself."""
        op = self.assignment.makers.get(value)
        if op is None: return value in indices
        return can_recompute(op, self.program) and all(self._is_known(each, indices) for each in op.operands)

    def _by_tma(self, op: Op, indices: frozenset[Value]) -> bool:
        """Whether TMA can bring a block as the dots want it."""
        tensor, value = self.program.tensor(op.attributes["tensor"]), op.result
        size, sizes = tensor.dtype.itemsize, op.attributes["sizes"]
        if tensor.dtype not in MAP_DTYPES or not 2 <= len(sizes) <= MOST_RANK: return False
        if tensor.of or tensor.among or not tensor.is_dense: return False
        if tensor.symbolic is not None and value not in self.assignment.staged: return False
        if any(stride * size % 16 for stride in tensor.strides[:-1]): return False
        tile = tile_in_smem(*self.assignment.smem_extents(value), value.dtype)
        if (1, *value.shape)[-2:] != (tile.rows, tile.row_bytes // size): return False
        if tile.span < STEP_BYTES or tile.rows > MOST_BOX or tensor.output: return False
        return all(self._is_known(each, indices) for each in op.operands)
