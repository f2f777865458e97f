"""Expressions (tile/expression.py) in tiles: what the matched graph computes of an element.

Protocol: `evaluate(expression, leaf)` is a tile of the expression's dtype. `leaf` gives the tiles of loads,
of positions and of sums; they are broadcast where they meet. What is computed goes into `made`, which
expressions of the same elements may share. `read_leaf` is one of a block of rows and columns.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.values import Tile, apply, broadcast, cast, full


def evaluate(expression: Expression, leaf: Callable[[Expression], Tile],
             made: dict[Expression, Tile] | None = None) -> Tile:
    """The tile of an expression. Each node is rounded to its dtype."""
    made = {} if made is None else made

    def of(node: Expression) -> Tile:
        if node not in made: made[node] = find(node)
        return made[node]

    def find(node: Expression) -> Tile:
        if isinstance(node, Constant): return full((), node.value, node.dtype)
        if not isinstance(node, Apply): return leaf(node)
        given = [of(each) for each in node.args]
        return cast(given[0], node.dtype) if node.op == "cast" else apply(node.op, *broadcast(*given))
    return of(expression)


def read_leaf(node: Expression, loads: Mapping[Load, TensorRef], rows: Block, columns: Block) -> Tile:
    """The elements of a block that a load or a position of an expression over [m, n] means: (rows, columns),
    or 1 along an axis that it does not depend on."""
    if isinstance(node, Load):
        where = rows if node.m else Block(0, 1), columns if node.n else Block(0, 1)
        return loads[node][where]
    assert isinstance(node, Position), node
    return rows.indices[:, None] if node.axis == "m" else columns.indices[None, :]
