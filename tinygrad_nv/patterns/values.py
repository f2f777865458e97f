"""Values of nodes that are made of constants and variables, at points, and the affine form through them.

Protocol: `form` is what positions.py keeps. This module needs numpy, which is imported when a graph
has positions.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp, sint, sym_infer

from tinygrad_nv.patterns.positions import AffineForm, is_variable

EVERYWHERE = 256   # dimensions up to here are evaluated at every index
EDGE = 6           # of larger ones, so many at each end
SAMPLES = 12       # and so many between
MOST_POINTS = 1 << 14
MOST_VALUES = 1 << 25

Values = Mapping[str, int]
BINARY: dict[Ops, Any] = {Ops.ADD: np.add, Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.MAX: np.maximum,
                          Ops.FLOORDIV: np.floor_divide, Ops.FLOORMOD: np.mod}


class NotFitted(Exception):
    """A node is not evaluated; the text says why."""


# **** values at points ****

def evaluate(node: UOp, at: Sequence[np.ndarray], values: Values) -> np.ndarray:
    """Returns the values of a node made of constants, at indices that broadcast to one shape. Raises
    `NotFitted`, also for numbers that the dtype does not hold: an affine form would not have their wrap or
    rounding."""
    found = _evaluate(node, at, values)
    if node.dtype in dtypes.weaks or node.dtype == dtypes.bool: return found
    if dtypes.is_int(node.dtype): least, most = int(node.dtype.min), int(node.dtype.max)
    else: least, most = -2**(bits := dtypes.finfo(node.dtype)[1] + 1), 2**bits
    if not np.all((found >= least) & (found <= most)): raise NotFitted(f"beyond {node.dtype.name}")
    if node.op is Ops.CAST and np.any(found != np.trunc(found)): raise NotFitted("a cast of fractions")
    return found


def _evaluate(node: UOp, at: Sequence[np.ndarray], values: Values) -> np.ndarray:
    if node.op in GroupOp.Movement: return _through_movement(node, at, values)
    if node.op is Ops.CONST: return np.asarray(node.val)
    if is_variable(node): return np.asarray(values[node.expr])
    if node.op is Ops.CAST: return evaluate(node.src[0], at, values)
    if node.op in BINARY:
        x, y = (evaluate(s, _over(node, s, at, values), values) for s in node.src)
        return np.asarray(BINARY[node.op](x, y))
    if node.op is not Ops.REDUCE or node.arg[0] is not Ops.ADD: raise NotFitted(node.op.name)
    extents = [_extent(x, values) for x in node.src[0].shape[:node.arg[1]]]
    rank = max((x.ndim for x in at), default=0)
    if np.prod([*extents, *np.broadcast_shapes(*(x.shape for x in at))]) > MOST_VALUES:
        raise NotFitted("a sum of too many values")
    axes = [np.arange(extent).reshape([-1] + [1] * (rank + len(extents) - 1 - i))
            for i, extent in enumerate(extents)]
    inner = evaluate(node.src[0], [*axes, *at], values)
    whole = np.broadcast_to(inner, np.broadcast_shapes(inner.shape, *(x.shape for x in (*axes, *at))))
    return np.asarray(whole.sum(axis=tuple(range(len(extents)))))


def _extent(x: sint, values: Values) -> int: return int(sym_infer(x, dict(values)))


def _over(node: UOp, source: UOp, at: Sequence[np.ndarray], values: Values) -> list[np.ndarray]:
    kept = at[len(at) - len(source.shape):]
    return [x if _extent(extent, values) != 1 else np.zeros_like(x)
            for x, extent in zip(kept, source.shape, strict=True)]


def _through_movement(node: UOp, at: Sequence[np.ndarray], values: Values) -> np.ndarray:
    source, arg = node.src[0], node.marg
    shape = [_extent(x, values) for x in source.shape]
    if node.op is Ops.PERMUTE: return evaluate(source, [at[arg.index(i)] for i in range(len(arg))], values)
    if node.op is Ops.EXPAND: return evaluate(source, at[len(arg):], values)
    if node.op is Ops.RESHAPE:
        flat = np.zeros((), np.int64)
        for x, extent in zip(at, arg, strict=True): flat = flat * _extent(extent, values) + x
        digits: list[np.ndarray] = []
        for extent in reversed(shape):
            digits.append(flat % extent)
            flat = flat // extent
        return evaluate(source, digits[::-1], values)
    if node.op is Ops.FLIP:
        at = [n - 1 - x if flip else x for x, n, flip in zip(at, shape, arg, strict=True)]
        return evaluate(source, at, values)
    offsets = [_extent(offset, values) for offset, _ in arg]
    if node.op is Ops.SHRINK:
        return evaluate(source, [x + offset for x, offset in zip(at, offsets, strict=True)], values)
    inside = np.asarray(True)
    moved = []
    for x, offset, extent in zip(at, offsets, shape, strict=True):
        inside = inside & (x >= offset) & (x < offset + extent)
        moved.append(np.clip(x - offset, 0, extent - 1))
    return np.asarray(np.where(inside, evaluate(source, moved, values), 0))


# **** forms ****

def form(node: UOp) -> AffineForm | None:
    """The affine form of a node made of constants and variables."""
    variables = [v for v in node.toposort() if is_variable(v)]
    if node.dtype == dtypes.bool or len(variables) > 2: return None
    try:
        cases = [dict(zip((v.expr for v in variables), chosen, strict=True)) for chosen in
                 itertools.product(*(_few(v) for v in variables))]
        points = [point for values in cases for point in _points(node, values)]
    except NotFitted: return None
    return _fit(len(node.shape), [v.expr for v in variables], points)


def _few(variable: UOp) -> list[int]:
    """Some values of a variable, near the least for short shapes."""
    least, most = int(variable.vmin), int(variable.vmax)
    return sorted({min(least + step, most) for step in (0, 1, 2, 5, 11)})


def _points(node: UOp, values: Values) -> list[tuple[np.ndarray, np.ndarray]]:
    """Columns (indices…, variables…) and the value at each."""
    shape = [_extent(x, values) for x in node.shape]
    if 0 in shape: return []
    axes = [_sample_indices(extent, len([n for n in shape if n > 1])) for extent in shape]
    if np.prod([len(axis) for axis in axes]) > MOST_POINTS: raise NotFitted("too many points")
    grid = [x.reshape(-1) for x in np.meshgrid(*axes, indexing="ij")] if axes else [np.zeros(1, np.int64)][:0]
    found = evaluate(node, grid, values)
    count = len(grid[0]) if grid else 1
    fixed = (np.full(count, value) for value in (*values.values(), 1))
    return [(np.stack([*grid, *fixed]), np.broadcast_to(found, (count,)))]


def _sample_indices(extent: int, dimensions: int) -> np.ndarray:
    whole = EVERYWHERE if dimensions < 2 else 24
    if extent <= whole: return np.arange(extent)
    between = np.random.default_rng(extent).integers(0, extent, SAMPLES)
    return np.unique(np.concatenate([np.arange(EDGE), np.arange(extent - EDGE, extent), between]))


def _fit(rank: int, names: list[str], points: list[tuple[np.ndarray, np.ndarray]]) -> AffineForm | None:
    if not points: return None
    columns = np.concatenate([c for c, _ in points], axis=1).astype(np.float64)
    found = np.concatenate([v for _, v in points]).astype(np.float64)
    factors = np.round(np.linalg.lstsq(columns.T, found, rcond=None)[0])
    if not np.array_equal(factors @ columns, found): return None
    whole = [int(x) for x in factors]
    used = tuple(sorted((n, f) for n, f in zip(names, whole[rank:-1], strict=True) if f))
    return AffineForm(whole[-1], tuple(whole[:rank]), used)
