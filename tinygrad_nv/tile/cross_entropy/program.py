"""Losses of rows of logits and their gradient (spec.py) as a program of the tile language.

    a program, or on Hopper a cluster for a long row, has a row; a row that is ignored is 0
        the logit of the row's class, read before anything is written
        for each block, of each lane's few elements (Milakov and Gimelshein, arXiv 1805.02867):
            m' = max(m, x);  s = s · e^(m - m') + Σ e^(x - m')
        of the row: m and s of its lanes, then of its programs, each s rescaled to the largest m
        the loss; then for each block the gradient, over its logits or beside them

The second pass reads a row from L2 where it is still there. The logarithm of a sum near 1 is a series, as
lg2.approx loses digits there.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, Loss, RowsSpec
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.reductions import across_cluster
from tinygrad_nv.tile.language.values import Tile
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = OVER_ROWS
THREADS, ELEMENTS = 256, 16     # of a program; of a thread's block at most, as registers have more than these
HELD_BYTES = 64                 # of each row and thread at most that are held from one pass to the next
DEEP = 4                        # elements of a block that a lane adds up; one with a soft-cap
VECTOR_BYTES = 16
CPU_LANES, CPU_DEEP = 64, 16    # elements of a lane: exponentials that rescale its sum are 1 in 17
# float32 of a row for each program of its cluster on Hopper: L2 then holds the rows of all SMs between passes
CLUSTER_BYTES, CLUSTERS = 72 << 10, (1, 2, 4, 8)
LEAST = -3.4028234663852886e38  # with which a maximum begins: differences of -infinity are NaN
NEAR_ONE = 0.75, 1.5            # where logarithms are a series

State = tuple[Tile, ...]
Slope = Callable[[Block], Tile]


@dataclass(frozen=True)
class Row:
    """The row `at` and its class; of its columns a program of the cluster has those from `begin` to `end`, in
    blocks of `size`, of which each lane has every `lanes`-th element."""
    spec: RowsSpec
    at: Tile
    label: Tile
    begin: Tile | int
    end: Tile | int
    size: int
    lanes: int
    cluster: int
    logits: TensorRef
    teacher: TensorRef | None
    out: TensorRef | None
    held: tuple[Tile, ...] = ()     # logits, and the teacher's, of a row that is one block

    def load(self, tensor: TensorRef, columns: Block) -> Tile:
        """Elements of the row; -infinity beyond it."""
        return tile.load(tensor, self.at, columns, other=-math.inf)

    def x(self, columns: Block, whole: bool = True) -> Tile:
        """x of logits; -infinity beyond the row, of columns that are not `whole`."""
        x = value_of(self.spec.loss, self.held[0] if self.held else self.load(self.logits, columns))
        if whole or self.spec.loss.softcap is None: return x
        return tile.where(columns.indices < self.spec.size, x, -math.inf)

    def pair(self, columns: Block, whole: bool = True) -> tuple[Tile, Tile]:
        """x, and the teacher's logits by the temperature; -infinity beyond the row."""
        assert isinstance(self.spec, DistillationSpec)
        assert self.teacher is not None
        taught = tile.cast(self.held[1] if self.held else self.load(self.teacher, columns), dtypes.float32)
        return self.x(columns, whole), divide(taught, self.spec.temperature)


def cross_entropy(spec: RowsSpec, blocks: Blocks, losses: TensorRef, logits: TensorRef, labels: TensorRef,
                  gradient: TensorRef | None = None, teacher: TensorRef | None = None,
                  scale: TensorRef | None = None) -> None:
    """From rows of logits [rows, size] to losses [rows], and where it is asked for the gradient."""
    at, share = tile.program_id(0), share_of(spec, blocks)
    label = labels[at]
    ignored = label == spec.loss.ignore_index
    begin = tile.program_id(2) * share if blocks.cluster > 1 else 0
    row = Row(spec, at, label, begin, tile.minimum(begin + share, spec.size), blocks.columns, blocks.lanes,
              blocks.cluster, logits, teacher, logits if spec.in_place else gradient)
    if spec.size <= blocks.columns and blocks.cluster == 1:
        tensors = (logits,) if teacher is None else (logits, teacher)
        row = replace(row, held=tuple(row.load(each, Block(0, blocks.columns)) for each in tensors))
    read = replace(row, end=tile.where(ignored, begin, row.end))     # of an ignored row no more is read
    loss, slope_of, own = distill(read) if isinstance(spec, DistillationSpec) else classify(read)
    if row.out is not None:
        w = 1.0 if scale is None else scale[at]
        if ignored: over(row, lambda columns, *_: store(row, columns, tile.zeros(row.size)))
        else:
            over(row, lambda columns, *_: store(row, columns, slope_of(columns) * w))
            if own is not None: store_class(row, own * w)
    if tile.program_id(2) == 0: losses[at] = tile.where(ignored, 0.0, loss)


def over(row: Row, step: Callable[[Block, bool, State], State], state: State = ()) -> State:
    """`step` of each block of a program's columns, whether all of it is there, and what it makes of the
    state."""
    if row.held: return step(Block(0, row.size), row.spec.size == row.size, state)
    whole = row.spec.size // row.size * row.size
    for first in tile.range(row.begin, tile.minimum(row.end, whole), row.size):
        state = step(Block(first, row.size), True, state)
    # the end of the row is the program's that begins at or before it: others of a cluster may have no columns
    if whole < row.spec.size and (row.begin <= whole) & (row.end > whole):
        state = step(Block(whole, row.size), False, state)
    return state


def store(row: Row, columns: Block, value: Tile) -> State:
    """Stores elements of the gradient."""
    assert row.out is not None
    row.out[row.at, columns] = value
    return ()


def store_class(row: Row, value: Tile) -> None:
    """Stores the gradient of the class, over what its block has left there."""
    assert row.out is not None
    if (row.label >= row.begin) & (row.label < row.end): row.out[row.at, row.label] = value


# **** cross entropy ****

def classify(row: Row) -> tuple[Tile, Slope, Tile | None]:
    """The loss of a cross entropy; the gradient of a block, and that of the class."""
    spec, loss = row.spec, row.spec.loss
    known = (row.label >= 0) & (row.label < spec.size)
    own = value_of(loss, row.logits[row.at, tile.where(known, row.label, 0)])
    lanes = tile.zeros(row.lanes)
    near = tile.where((own > LEAST) & (own < math.inf), own, 0.0)   # of which sums lose fewer digits
    most, total, far = over(row, partial(add_up, row, near), (lanes + LEAST, lanes, lanes))
    most, (total,) = join(most, (total,), row.cluster)
    log_total, smoothing = log(total), loss.label_smoothing
    lse = most + log_total
    made = (tile.where(known, most - own, math.nan) + log_total) * (1 - smoothing)
    if smoothing:
        far = across(tile.sum(far, 0), row.cluster)
        made += (most - near + far * (1 / spec.size) + log_total) * smoothing
    if loss.z_loss: made += lse * lse * loss.z_loss
    p, even = exp(own - most) / total, smoothing / spec.size
    z = lse * (2 * loss.z_loss)
    mine = p - (1 - smoothing) + p * z - even       # what z adds is small beside p - 1
    return made, partial(slope_of, row, most, (1 + z) / total, even), multiply_slope(loss, own, mine)


def add_up(row: Row, near: Tile, columns: Block, whole: bool, state: State) -> State:
    """The sums with those of a block."""
    most, total, far = state
    x = by_lane(row, row.x(columns, whole))
    if row.spec.loss.label_smoothing:
        there = near - x
        if not whole: there = tile.where(by_lane(row, columns.indices < row.spec.size), there, 0.0)
        far = far + tile.sum(there, 0)
    most, (total,) = rescale(x, most, (total,))
    return most, total + tile.sum(exp(x - most[None, :]), 0), far


def slope_of(row: Row, most: Tile, factor: Tile, even: float, columns: Block) -> Tile:
    """The gradient of logits that are not the class's."""
    x = row.x(columns)
    made = exp(x - most) * factor
    return multiply_slope(row.spec.loss, x, made - even if even else made)


# **** distillation ****

def distill(row: Row) -> tuple[Tile, Slope, Tile | None]:
    """The loss of a distillation; the gradient of a block."""
    spec = row.spec
    assert isinstance(spec, DistillationSpec)
    t, lanes = spec.temperature, tile.zeros(row.lanes)
    least = lanes + LEAST
    found = over(row, partial(add_up_both, row), (least, lanes, least, lanes, lanes))
    most, (total,) = join(found[0], found[1:2], row.cluster)
    top, (mass, cross) = join(found[2], found[3:], row.cluster)
    made = (cross / mass - (top - most)) + (log(total) - log(mass))
    return made * (t * t), partial(slope_of_both, row, most, t / total, top, t / mass), None


def add_up_both(row: Row, columns: Block, whole: bool, state: State) -> State:
    """The sums with those of a block."""
    assert isinstance(row.spec, DistillationSpec)
    most, total, top, mass, cross = state
    x, y = (by_lane(row, each) for each in row.pair(columns, whole))
    x = divide(x, row.spec.temperature)
    most, (total,) = rescale(x, most, (total,))
    top, (mass, cross) = rescale(y, top, (mass, cross))
    e = exp(y - top[None, :])
    apart = tile.where(e == 0.0, 0.0, e * (y - x))      # 0 times infinity would be NaN
    return (most, total + tile.sum(exp(x - most[None, :]), 0), top, mass + tile.sum(e, 0),
            cross + tile.sum(apart, 0))


def slope_of_both(row: Row, most: Tile, inverse: Tile, top: Tile, taught: Tile, columns: Block) -> Tile:
    """The gradient of logits."""
    assert isinstance(row.spec, DistillationSpec)
    x, y = row.pair(columns)
    made = exp(divide(x, row.spec.temperature) - most) * inverse - exp(y - top) * taught
    return multiply_slope(row.spec.loss, x, made)


# **** sums ****

def by_lane(row: Row, x: Tile) -> Tile:
    """Elements of a block, those of a lane along the first axis."""
    return x.reshape(row.size // row.lanes, row.lanes)


def rescale(x: Tile, most: Tile, sums: State) -> tuple[Tile, State]:
    """The largest of lanes and of x, and sums for it."""
    larger = tile.maximum(most, tile.max(x, 0))
    factor = exp(most - larger)
    return larger, tuple(each * factor for each in sums)


def join(most: Tile, sums: State, cluster: int) -> tuple[Tile, State]:
    """The maximum of a row and its sums, from those of lanes."""
    top = tile.max(most, 0)
    factor = exp(most - top)
    sums = tuple(tile.sum(each * factor, 0) for each in sums)
    if cluster == 1: return top, sums
    largest = across_cluster(top, "max")
    factor = exp(top - largest)
    return largest, tuple(across_cluster(each * factor, "add") for each in sums)


def across(x: Tile, cluster: int) -> Tile:
    """A sum of a cluster's programs."""
    return across_cluster(x, "add") if cluster > 1 else x


# **** numbers ****

def value_of(loss: Loss, logits: Tile) -> Tile:
    """x of logits."""
    x = tile.cast(logits, dtypes.float32)
    if loss.softcap is None: return divide(x, loss.divisor)
    return tanh(divide(x, loss.divisor * loss.softcap)) * loss.softcap


def multiply_slope(loss: Loss, x: Tile, by: Tile) -> Tile:
    """dx / dl times others."""
    if loss.softcap is None: return divide(by, loss.divisor)
    kept = x * (1 / loss.softcap)
    return by * ((1.0 - kept * kept) * (1 / loss.divisor))


def divide(x: Tile, by: float) -> Tile:
    """x / by, within a unit of float32."""
    return x if by == 1 else x * (1 / by)


def exp(x: Tile) -> Tile:
    """e^x of what is at most about 0."""
    return tile.exp2_nonpositive(x * math.log2(math.e))


def tanh(x: Tile) -> Tile:
    """The hyperbolic tangent: of small numbers a series to x^9, where others lose digits (1e-8)."""
    t = x * x
    near = t * 0.021869488 - 0.053968254
    for factor in (0.13333333, -0.33333333): near = near * t + factor
    e = exp(tile.abs(x) * -2.0)
    far = (1.0 - e) * (1.0 / (1.0 + e))
    return tile.where(t < 0.0625, near * t * x + x, tile.where(x < 0, -far, far))


def log(x: Tile) -> Tile:
    """The natural logarithm of a number from 0 on: near 1 the series of that of (1 + s) / (1 - s)."""
    s = (x - 1.0) / (x + 1.0)
    t = s * s
    near = t * (2 / 9) + 2 / 7
    for power in (5, 3, 1): near = near * t + 2 / power
    return tile.where((x > NEAR_ONE[0]) & (x < NEAR_ONE[1]), near * s, tile.log(x))


# **** schedules ****

def grid(spec: RowsSpec, blocks: Blocks) -> Grid:
    """A program, or a cluster, for each row."""
    return spec.rows, 1, blocks.cluster


def share_of(spec: RowsSpec, blocks: Blocks) -> int:
    """Columns of a program: whole blocks."""
    return -(-spec.size // (blocks.columns * blocks.cluster)) * blocks.columns


def wide_of(spec: RowsSpec) -> int:
    """Elements of a vector: at most 16 bytes of the widest operand, and a divisor of a row."""
    kinds = [spec.dtype, spec.gradient or spec.dtype]
    if isinstance(spec, DistillationSpec): kinds.append(spec.teacher)
    return math.gcd(spec.size, VECTOR_BYTES // max(kind.itemsize for kind in kinds))


def cut(spec: RowsSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """The one schedule: the order of a row's sums is the same beside any others."""
    if target.kind == "cpu": return [(Blocks(1, CPU_LANES * CPU_DEEP, lanes=CPU_LANES), 1)]
    wide = wide_of(spec)
    deep = min(DEEP, ELEMENTS // wide) if spec.loss.softcap is None else 1
    one = -(-spec.size // (THREADS * wide))     # that make a row one block
    size = max(spec.dtype.itemsize, spec.teacher.itemsize if isinstance(spec, DistillationSpec) else 0)
    if one * wide * size <= HELD_BYTES: deep = one
    blocks = Blocks(1, THREADS * wide * deep, lanes=THREADS * wide)
    if spec.gradient is None or target.arch != "sm_90a": return [(blocks, THREADS // 32)]
    cluster = next((each for each in CLUSTERS if 4 * spec.size <= each * CLUSTER_BYTES), CLUSTERS[-1])
    return [(replace(blocks, cluster=cluster), THREADS // 32)]


def program(name: str, spec: type) -> TileProgram:
    """The program of a type of spec."""
    return TileProgram(name, spec, cross_entropy, grid, cut, lambda one: one.rows * one.size, fixed=True,
                       vector=wide_of)


PROGRAMS = program("cross_entropy", CrossEntropySpec), program("distillation", DistillationSpec)
