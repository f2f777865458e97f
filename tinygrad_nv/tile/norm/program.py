"""Rows (spec.py) as a program of the tile language: norms, softmax, argmax, and what has no statistics.

    a program has a block of rows, and of rows without statistics of columns:
        load all that is read of them
        for each statistic: its terms, of the row or of each group, added up or the largest
        store the results
    of rows that registers do not hold, for each statistic and the results: a loop over blocks of columns

How a row's numbers are added up depends on the row and on the target alone, not on how many rows there are.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, Sum, loads
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.language.expressions import evaluate
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.reductions import across_cluster
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.operations import OPERATIONS
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = BY_ROW


NOTHING = {("add", dtypes.float32): 0.0, ("add", dtypes.int32): 0, ("max", dtypes.int32): -1 << 31}
VECTOR_BYTES = 16
HELD_THREADS = 256, 512     # most of a row that registers hold; more of 4-byte elements: others are converted
                            # at each use
EARLY_WORDS = 24, 96    # registers of a thread's loads up to which those that no statistic needs come early,
FEW_ROWS = 264          # the second of so few rows: latency counts then, and room for other CTAs does not
LONG = ((1 << 16, 1 << 14, 32), (1, 1 << 13, 16))   # rows that are not held: least elements, of a step, warps
CLUSTERS = (8, 8, 8), (24, 4, 32)   # of long rows that do not fill an H100: at most, programs of each, warps
APART_DEEP = 2          # vectors of a thread without statistics, of two operands, with programs enough:
MANY_PROGRAMS = 264     # two for each of 132 SMs
MOST_APART = 256        # threads of a row without statistics
SMALL = 128             # threads that rows of less than a warp fill
CACHE_BYTES = 1 << 15       # of a program's rows on a CPU, which goes through them more than once
MOST_ELEMENTS = {"gpu": 1 << 17, "cpu": 1 << 18}    # of a row with statistics, which one program goes through


def norm(loads: Mapping[Load, TensorRef], spec: NormSpec, blocks: Blocks, **outs: TensorRef) -> None:
    """From parameters of rows [*batch, m, n] to results, which lie as the spec says."""
    rows = tile.block(tile.program_id(0) * blocks.rows, blocks.rows)
    part = Part(spec, loads, batch_indices(spec.batch), rows, Block(0, min(spec.n, blocks.columns)))
    own = replace(part, columns=part.columns + tile.program_id(2) * blocks.columns)
    if not spec.statistics: store(own, outs)
    elif blocks.cluster > 1: store_cluster(with_statistics(hold(own), blocks.cluster), outs)
    elif blocks.columns >= spec.n: store(with_statistics(hold(part)), outs)
    else: store_long(part, outs)


@dataclass(frozen=True)
class Part:
    """Rows and columns of which expressions are computed. `statistics` are those that are known: (rows, 1),
    or (rows, groups). What is `made` is not computed, or loaded, again."""
    spec: NormSpec
    loads: Mapping[Load, TensorRef]
    batch: Sequence[Operand]
    rows: Block
    columns: Block
    statistics: tuple[Tile, ...] = ()
    made: Mapping[Expression, Tile] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]: return self.rows.size, self.columns.size

    def of_elements(self, root: Expression, made: dict[Expression, Tile]) -> Tile:
        """An expression of each element: (rows, columns)."""
        return evaluate(root, partial(self.leaf, spread=True), made).broadcast_to(*self.shape)

    def of_groups(self, root: Expression, count: int) -> Tile:
        """An expression of statistics, of each row or of each of so many groups: (rows, count)."""
        return evaluate(root, partial(self.leaf, spread=False)).broadcast_to(self.rows.size, count)

    def leaf(self, node: Expression, spread: bool) -> Tile:
        """Returns what an expression is made of: (rows, columns), or 1 along an axis that it does not depend
        on."""
        if isinstance(node, Sum): return self.statistic(node.part, spread)
        if isinstance(node, Load): return self.load(node)
        assert isinstance(node, Position), node
        if node.axis == "m": return self.rows.indices[:, None]
        if node.axis == "n": return self.columns.indices[None, :]
        return tile.full((1, 1), self.batch[int(node.axis)], dtypes.int32)

    def load(self, load: Load) -> Tile:
        """Elements of a parameter."""
        strides = load.batch or [0] * len(self.batch)
        where = [index if stride else 0 for index, stride in zip(self.batch, strides, strict=True)]
        return self.loads[load][*where, self.rows if load.m else Block(0, 1),
                                self.columns if load.n else Block(0, 1)]

    def statistic(self, number: int, spread: bool) -> Tile:
        """A statistic; `spread`: of groups, once for each of their elements."""
        found, group = self.statistics[number], self.spec.statistics[number].group
        if not (group and spread): return found
        rows, groups = found.shape
        return found[:, :, None].broadcast_to(rows, groups, group).reshape(rows, groups * group)


def batch_indices(extents: tuple[int, ...]) -> list[Tile]:
    """A program's place along each dimension of the batch."""
    inner = [prod(extents[i + 1:]) for i in range(len(extents))]
    place = tile.program_id(1)
    return [place // step % extent for step, extent in zip(inner, extents, strict=True)]


def hold(part: Part) -> Part:
    """Loads what statistics read, ahead of the first, and the rest where there are registers enough."""
    spec, vector = part.spec, vector_of(part.spec)
    threads = threads_of(spec, -(-spec.n // vector)) or HELD_THREADS[0]
    each = -(-part.columns.size // threads)
    read = {load for one in spec.statistics for load in loads(one.term)}
    words = sum(each * load.dtype.itemsize // 4 for load in along(spec))
    early = words <= EARLY_WORDS[spec.rows <= FEW_ROWS]
    return replace(part, made={load: part.load(load) for load in part.loads if early or load in read})


def with_statistics(part: Part, cluster: int = 1) -> Part:
    """Computes the statistics of rows that one block has, or so many programs of a cluster."""
    for each in part.spec.statistics:
        made = dict(part.made)
        term = part.of_elements(each.term, made)
        if cluster > 1: term = tile.where(part.columns.indices[None, :] < part.spec.n, term, nothing(each))
        found = reduce(each, term)
        if cluster > 1: found = across_cluster(found, each.op)
        part = replace(part, statistics=(*part.statistics, found), made={**part.made, **costly(made)})
    return part


def costly(made: Mapping[Expression, Tile]) -> dict[Expression, Tile]:
    """Returns what takes more to compute than to hold."""
    return {node: x for node, x in made.items() if isinstance(node, Apply) and OPERATIONS[node.op].series}


def nothing(statistic: Statistic) -> float:
    """Returns the number that a statistic begins with."""
    return NOTHING.get((statistic.op, statistic.dtype), -inf)


def store_cluster(part: Part, outs: Mapping[str, TensorRef]) -> None:
    """Stores a program's elements, and the first program numbers of the row."""
    store(part, outs, others=False)
    if tile.program_id(2) == 0: store(part, outs, elements=False)


def reduce(statistic: Statistic, term: Tile) -> Tile:
    """The statistic of terms (rows, columns): (rows, 1), or (rows, groups)."""
    rows, columns = term.shape
    size = statistic.group or columns
    term = term.reshape(rows, columns // size, size)
    if statistic.op == "add": return tile.sum(term, 2)
    found = tile.max(term, 2)
    return tile.maximum(found, -inf) if dtypes.is_float(found.dtype) else found     # of NaN alone


def store(part: Part, outs: Mapping[str, TensorRef], elements: bool = True, others: bool = True) -> None:
    """Stores the results of a part: `elements`, and `others`, numbers of rows and of groups."""
    made = dict(part.made)
    for number, each in enumerate(part.spec.results):
        if is_along(each) and elements: store_elements(part, outs, number, made)
        elif others and not is_along(each): store_groups(part, outs, number)


def is_along(result: Computed) -> bool:
    """Whether a result has a number for each element of a row."""
    return bool(result.result.n and not result.group)


def store_elements(part: Part, outs: Mapping[str, TensorRef], number: int,
                   made: dict[Expression, Tile]) -> None:
    """Stores a result; of those beside each other in one storage, in its place."""
    spec, out = part.spec, outs[f"out{part.spec.outputs[number]}"]
    place = number - spec.outputs.index(spec.outputs[number])
    beside = [place] * (out.ndim - len(spec.batch) - 2)
    out[*part.batch, part.rows, *beside, part.columns] = part.of_elements(spec.results[number].value, made)


def store_groups(part: Part, outs: Mapping[str, TensorRef], number: int) -> None:
    """Stores a number of each row, or of each of its groups."""
    spec, out, one = part.spec, outs[f"out{part.spec.outputs[number]}"], part.spec.results[number]
    count = spec.n // one.group if one.group else 1
    apart = [0] * (out.ndim - len(spec.batch) - 2)
    out[*part.batch, part.rows, Block(0, count), *apart] = part.of_groups(one.value, count)


# **** rows that registers do not hold ****

def store_long(part: Part, outs: Mapping[str, TensorRef]) -> None:
    """Goes through a row once for each statistic and once for results of elements."""
    for each in part.spec.statistics:
        part = replace(part, statistics=(*part.statistics, reduce_long(part, each)))
    size, n = part.columns.size, part.spec.n
    whole = n // size * size
    if any(is_along(each) for each in part.spec.results):
        for first in tile.range(0, whole, size):
            store(replace(part, columns=Block(first, size)), outs, others=False)
        if whole < n: store(replace(part, columns=Block(whole, n - whole)), outs, others=False)
    store(part, outs, elements=False)


def reduce_long(part: Part, statistic: Statistic) -> Tile:
    """A statistic of a row: of every `columns`-th element, then of these."""
    size, n = part.columns.size, part.spec.n
    whole = n // size * size
    total = tile.full(part.shape, nothing(statistic), statistic.dtype)
    if whole < n:
        last = replace(part, columns=Block(whole, size))
        total = tile.where(last.columns.indices[None, :] < n, last.of_elements(statistic.term, {}), total)
    for first in tile.range(0, whole, size):
        step = replace(part, columns=Block(first, size))
        total = join(statistic, total, step.of_elements(statistic.term, {}))
    return reduce(statistic, total)


def join(statistic: Statistic, a: Tile, b: Tile) -> Tile:
    """Two of a statistic's numbers as one."""
    return a + b if statistic.op == "add" else tile.maximum(a, b)


# **** schedules ****

def grid(spec: NormSpec, blocks: Blocks) -> Grid:
    """A program for each block of rows, of rows without statistics for each block of columns, of each of the
    batch."""
    columns = blocks.cluster if spec.statistics else -(-spec.n // blocks.columns)
    return -(-spec.m // blocks.rows), prod(spec.batch), columns


def cut(spec: NormSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Whole rows where registers hold them, of short rows several. A row's length alone decides, so that its
    sums are the same beside any others, but of rows whose statistics are exact in any order."""
    if target.kind == "cpu": return [(Blocks(rows_on_cpu(spec, target.threads), spec.n), 1)]
    vector = vector_of(spec)
    vectors = -(-spec.n // vector)
    if not spec.statistics: return [cut_apart(spec, vector, vectors)]
    if (threads := threads_of(spec, vectors)) is not None:
        rows = rows_of(spec, threads)
        return [(Blocks(rows, spec.n), max(1, rows * threads // 32))]
    if target.arch == "sm_90a" and all(map(is_exact, spec.statistics)):
        for rows, cluster, warps in CLUSTERS:
            columns = -(-vectors // cluster) * vector
            if spec.rows <= rows: return [(Blocks(1, columns, cluster=cluster), warps)]
    return [next((Blocks(1, columns), warps) for least, columns, warps in LONG if spec.n >= least)]


def rows_on_cpu(spec: NormSpec, threads: int) -> int:
    """Up to eight rows that a cache holds, as many as leave some to each thread, and of which at most an
    eighth is beyond the last."""
    rows, nbytes = 8, spec.n * max((load.dtype.itemsize for load in along(spec)), default=4)
    while rows > 1 and (rows * nbytes > CACHE_BYTES or rows * threads > spec.rows
                        or -spec.m % rows > spec.m // 8): rows //= 2
    return rows


def threads_of(spec: NormSpec, vectors: int) -> int | None:
    """The threads that hold a row of so many vectors, two or more each; None where none do."""
    few, many = HELD_THREADS
    if vectors <= 8 * few: return min(few, max(power(-(-vectors // 2)), min(32, power(vectors))))
    long = spec.groups or all(load.dtype.itemsize == 4 for load in along(spec))
    return many if long and spec.n <= 64 * many else None


def is_exact(statistic: Statistic) -> bool:
    """Whether no order of its terms changes a statistic."""
    return statistic.op == "max" or statistic.dtype == dtypes.int32


def cut_apart(spec: NormSpec, vector: int, vectors: int) -> tuple[Blocks, int]:
    """Blocks of rows without statistics, which need not be whole."""
    many = len(along(spec)) <= 2 and spec.rows * vectors >= MANY_PROGRAMS * MOST_APART * APART_DEEP
    deep = APART_DEEP if many else 1
    threads = min(MOST_APART, power(-(-vectors // deep)))
    rows = rows_of(spec, threads)
    return Blocks(rows, min(spec.n, threads * deep * vector)), max(1, rows * threads // 32)


def rows_of(spec: NormSpec, threads: int) -> int:
    """Rows of a program: where a row takes less than a warp as many as fill one, or `SMALL` threads."""
    return max(32 // threads, min(SMALL // threads, power(spec.m))) if threads <= 32 else 1


def along(spec: NormSpec) -> list[Load]:
    """Loads of elements that lie side by side, each once."""
    return [load for load in every(spec) if load.n]


def every(spec: NormSpec) -> list[Load]:
    """All loads, each once."""
    return list(dict.fromkeys(load for root in spec.expressions for load in loads(root)))


def vector_of(spec: NormSpec) -> int:
    """Elements that a thread has side by side: at most 16 bytes of the widest operand, at whole multiples of
    their size."""
    operands: list[Load | Result] = [*along(spec), *(each.result for each in spec.results
                                                     if each.result.n and not each.group)]
    count = VECTOR_BYTES // max((each.dtype.itemsize for each in operands), default=4)
    strides = [stride for x in operands for stride in (spec.n, x.m, x.offset, *x.batch)]
    while count > 1 and any(stride % count for stride in strides): count //= 2
    return count


def power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << max(count - 1, 0).bit_length()


def problems(spec: NormSpec, kind: str) -> list[str]:
    """Why no kernel can be for a kind of target; empty when one can."""
    out = ["elements of a result lie apart"] * any(each.result.n not in (0, 1) for each in spec.results
                                                   if not each.group)
    apart = sorted({load.parameter for load in every(spec) if load.n not in (0, 1)})
    if apart: out.append(f"elements of x{apart[0]} lie apart")
    if spec.statistics and spec.n > (most := MOST_ELEMENTS[kind]):
        out.append(f"a row of {spec.n} elements, at most {most}: several programs are faster")
    if len(spec.groups) > 1: out.append(f"groups of {' and '.join(map(str, sorted(spec.groups)))}")
    if spec.groups and kind == "gpu" and threads_of(spec, -(-spec.n // vector_of(spec))) is None:
        out.append(f"groups of a row of {spec.n} elements, which is not held")
    return out


PROGRAMS = (TileProgram("norm", NormSpec, norm, grid, cut, lambda spec: spec.rows * spec.n, problems,
                        lambda spec: spec.expressions, fixed=True, vector=vector_of,
                        entry=lambda spec: "norm" if spec.statistics else "elements"),)
