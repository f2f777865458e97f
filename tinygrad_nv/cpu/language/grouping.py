"""Stores of blocks that are one loop.

Protocol: `group_stores(program, ranges)` has, of each region and of each store of a block there, the stores
whose loop it shares, itself among them. They have one shape, nothing lies between them but what is computed
where it is used, and no two of them write the same element.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from tinygrad_nv.tile.language.ir import STORES, Op, Program, Region
from tinygrad_nv.tile.language.ranges import Ranges

Groups = Mapping[Region, Mapping[Op, list[Op]]]
LAZY = {"apply", "cast", "bitcast", "broadcast", "load_block", "load", "iota", "reshape", "interleave",
        "deinterleave", "where_needed"}


def group_stores(program: Program, ranges: Ranges) -> Groups:
    """The group of each store of a block, by regions."""
    ops = list(program.body.walk())
    written = {op.attributes["tensor"] for op in ops if op.name in STORES}
    return {region: _group(region, ranges, written)
            for region in (program.body, *(inner for op in ops for inner in op.regions))}


def _group(region: Region, ranges: Ranges, written: Set[str]) -> dict[Op, list[Op]]:
    made, now = dict[Op, list[Op]](), list[Op]()
    for op in region.ops:
        if op.name == "store_block":
            if not now or not all(_may_share(op, each, ranges) for each in now): now = []
            now.append(op)
            made[op] = now
            continue
        simple = op.name in LAZY or op.name == "constant" or keeps_columns(op)
        if not simple or op.attributes.get("tensor") in written: now = []
    return made


def _may_share(a: Op, b: Op, ranges: Ranges) -> bool:
    """Whether two stores of blocks may be one loop."""
    if a.operands[-1].shape != b.operands[-1].shape: return False
    if a.attributes["tensor"] != b.attributes["tensor"]: return True
    for size, x, y in zip(a.attributes["sizes"], a.operands[:-1], b.operands[:-1], strict=True):
        one, other = ranges.of(x), ranges.of(y)
        if one.high + max(size, 1) <= other.low or other.high + max(size, 1) <= one.low: return True
    return False


def is_in_place(load: Op, loop: Sequence[Op], region: Region) -> bool:
    """Whether what a loop of stores reads of a tensor that the program writes is there until an element's own
    store: nothing else between the load and the loop may write to it."""
    own = load.attributes["tensor"]
    between = region.ops[region.ops.index(load) + 1:region.ops.index(loop[-1]) + 1]
    if any(op.regions or op.name in ("store", "atomic") or keeps_columns(op) for op in between): return False
    writes = [op for op in between if op.name == "store_block" and op.attributes["tensor"] == own]
    return all(op in loop and op.attributes["sizes"] == load.attributes["sizes"]
               and op.operands[:-1] == load.operands for op in writes)


def keeps_columns(op: Op) -> bool:
    """Whether an operation is a transpose of other axes than the last."""
    return op.name == "transpose" and op.attributes["permutation"][-1] == len(op.result.shape) - 1
