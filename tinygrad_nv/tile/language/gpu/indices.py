"""The least of the indices where a condition holds: `tile.min(tile.where(condition, index, n), axis)`. A
thread takes the last of its registers first, and each before that where its condition holds: a select for
each instead of a select and a minimum.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.lanes import Lanes
from tinygrad_nv.tile.language.gpu import elements
from tinygrad_nv.tile.language.gpu.held import Held
from tinygrad_nv.tile.language.gpu.layout import extents
from tinygrad_nv.tile.language.gpu.values import Values
from tinygrad_nv.tile.language.ir import Op, Value


def find_choice(writer: Values, op: Op) -> Op | None:
    """The choice of indices that a reduction takes the least of; None of other reductions."""
    made, axis = writer.makers.get(op.operands[0]), op.attributes["axis"]
    if op.attributes["fn"] != "min" or made is None or made.attributes.get("fn") != "where": return None
    if made.result.dtype != dtypes.int32: return None
    _, index, other = made.operands
    known = writer.ranges.of(other)
    good = _is_index(writer, index, axis) and known.low == known.high >= made.result.shape[axis] - 1
    return made if good else None


def _is_index(writer: Values, value: Value, axis: int) -> bool:
    """Whether elements are their places along an axis."""
    maker, rank = writer.makers.get(value), len(value.shape)
    if maker is not None and maker.name == "broadcast":
        value, = maker.operands
        maker = writer.makers.get(value)
    padded = (1,) * (rank - len(value.shape)) + value.shape
    if any(extent > 1 and i != axis for i, extent in enumerate(padded)): return False
    while maker is not None and maker.name == "reshape": maker = writer.makers.get(maker.operands[0])
    return maker is not None and maker.name == "iota"


def first_indices(writer: Values, choice: Op, held: Held, axis: int) -> dict[int, Lanes]:
    """The least index of a thread, by the register at which its elements begin."""
    layout, of, kb = held.layout, extents(held.shape), writer.kb
    test, index, other = (writer.value(each, layout) for each in choice.operands)
    bits = sum(1 << bit for bit in of.of_axis(axis))
    made: dict[int, Lanes] = {}
    for register in sorted(held.inside(), key=lambda one: -layout.indices[one]):
        first = layout.numbers[layout.indices[register] & ~bits]
        before = made.get(first) or Lanes(kb, held.dtype, [other.element(register)])
        holds = Lanes(kb, dtypes.bool, [test.element(register)])
        if (there := writer.inside(layout, held.shape, register, (axis,))) is not None:
            holds = elements.apply_row(kb, "and", [holds, Lanes(kb, dtypes.bool, [there])])
        place = Lanes(kb, held.dtype, [index.element(register)])
        made[first] = elements.apply_row(kb, "where", [holds, place, before])
    return made
