"""Loads of tiles that are copied, ahead of where they are copied to.

Protocol: a program that loads tiles, then scalars which say where stores go, means the tiles to be under way
meanwhile. ptxas puts loads where they are used first: of tiles that are stored as they are, behind the guard
of the store. A barrier of the warp ahead of the first scalar keeps them where they are; it costs nothing, but
ptxas moves ld.global.nc past it. `find_early` has the loads of these tiles, and of the scalars that a barrier
stands ahead of.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinygrad_nv.tile.language.ir import Op, Program, Region, Value

Users = Mapping[Value, Sequence[Op]]


@dataclass
class Early:
    """`tiles`: loads that stay ahead of scalars'; `scalars`: of these the first in a row."""
    tiles: set[Op] = field(default_factory=set)
    scalars: set[Op] = field(default_factory=set)


def find_early(program: Program, users: Users) -> Early:
    """Finds what has to stay ahead in all regions of a program."""
    made = Early()
    for region in (program.body, *(inner for op in program.body.walk() for inner in op.regions)):
        _find(region, users, made)
    return made


def _find(region: Region, users: Users, made: Early) -> None:
    tiles, places = set[Op](), _list_places(region)
    for op in region.ops:
        if op.name == "load_block" and op.result.shape and _is_copied(op.result, users): tiles.add(op)
        elif op.name == "load_block" and op.result in places and tiles:
            made.tiles |= tiles
            made.scalars.add(op)
            tiles = set()
        elif op.name == "store_block" or op.regions: tiles = set()


def _is_copied(value: Value, users: Users) -> bool:
    """Whether a value is stored alone, as it is or in another dtype."""
    return all(op.name == "store_block" or (op.name == "cast" and _is_copied(op.result, users))
               for op in users.get(value, ()))


def _list_places(region: Region) -> set[Value]:
    """Scalars that starts of a region's stores are computed from."""
    found = set[Value]()
    for op in reversed(region.ops):
        if op.name == "store_block": found.update(op.operands[:-1])
        elif len(op.results) == 1 and op.result in found: found.update(op.operands)
    return found
