"""The template of rows on a GPU (norms, softmax, argmax): how threads share rows, and which rows it takes.

A team of threads has a row. It goes through the row chunk by chunk, each thread a vector of each chunk:
thread t has elements (chunk · team + t) · vector …, so that neighbours read side by side. Up to a warp a team
is a part of one, and a CTA has several rows; above that it is the CTA. What is loaded stays in registers from
the first statistic to the results where it fits in `MOST_WORDS`; else each statistic reads the row again,
from L2.

A thread has two vectors of a row that is longer than a warp's: one row has latency to hide, many have
bandwidth to fill. How many rows there are changes nothing, so that a row's sums are the same beside any
others. Rows without statistics are divided among CTAs (`blocks`), as they need no reduction; on Hopper so are
rows that fit in the registers of a cluster alone.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

from tinygrad_nv.tile.epilogue import problems as refused
from tinygrad_nv.tile.expression import Load, loads
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

VECTOR_BYTES = 16
DEEP = 2                # vectors of a thread, of each operand
APART_DEEP = 4          # without statistics, where there are CTAs enough:
MANY_CTAS = 264         # two for each of 132 SMs
MOST_TEAM = 1024
MOST_APART = 256        # threads of a row without statistics
MOST_WORDS = 48         # registers of loads that a thread holds, of 128
CROWDED = (512, 16)     # above so many threads, which have 64 registers each, so many
SMALL_CTA = 128         # threads that teams of less than a warp fill
CLUSTERS = (2, 4, 8)    # CTAs of a long row
MOST_ELEMENTS = 1 << 17  # of a row with statistics, which one CTA or cluster goes through


@dataclass(frozen=True)
class Norm(Schedule):
    """`team` threads of a row, `vector` elements of a thread side by side, `chunks` of them; `rows` and
    `threads` of a CTA; `held`: loads stay in registers."""
    template: ClassVar[str] = "norm"
    vector: int = 1
    team: int = 32
    chunks: int = 1
    rows: int = 1
    held: bool = True
    blocks: int = 1

    def words(self) -> list[str]:
        words = [f"{self.team} threads a row", f"{self.chunks} x {self.vector} elements a thread"]
        if self.rows > 1: words.append(f"{self.rows} rows a CTA")
        if self.blocks > 1: words.append(f"{self.blocks} CTAs a row")
        return [*words, *([] if self.held else ["read again"])]

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.team * self.rows

    @property
    def span(self) -> int:
        """Elements of a chunk."""
        return self.team * self.vector

    @staticmethod
    @lru_cache(1024)
    def of(spec: NormSpec, arch: str = "") -> Norm:
        """The schedule of a spec. Without an architecture: of one without clusters."""
        vector = _vector(spec)
        vectors = -(-spec.n // vector)
        if not spec.statistics: return _apart(spec, vector, vectors)
        words = sum(-(-vector * load.dtype.itemsize // 4) for load in along(spec))
        # a warp's access is of whole lines, before a thread has several
        team = min(MOST_TEAM, max(_power(-(-vectors // DEEP)), min(32, _power(vectors))))
        for each in (team, CROWDED[0]):
            chunks = -(-vectors // each)
            if words * chunks <= (MOST_WORDS if each <= CROWDED[0] else CROWDED[1]):
                return Norm(vector, each, chunks, _rows(spec, each), True)
        for blocks in CLUSTERS if arch == "sm_90a" else ():
            chunks = -(-vectors // (CROWDED[0] * blocks))
            if words * chunks <= MOST_WORDS: return Norm(vector, CROWDED[0], chunks, 1, True, blocks)
        return Norm(vector, CROWDED[0], -(-vectors // CROWDED[0]), 1, False)


def _apart(spec: NormSpec, vector: int, vectors: int) -> Norm:
    """Returns the schedule of elements without statistics."""
    deep = APART_DEEP if spec.rows * vectors >= MANY_CTAS * MOST_APART * APART_DEEP else 1
    team = min(MOST_APART, _power(-(-vectors // deep)))
    chunks = min(deep, -(-vectors // team))
    return Norm(vector, team, chunks, _rows(spec, team), True, -(-vectors // (team * chunks)))


def along(spec: NormSpec) -> list[Load]:
    """Loads of elements that lie side by side, each once."""
    return [load for load in every(spec) if load.n]


def every(spec: NormSpec) -> list[Load]:
    """All loads, each once."""
    return list(dict.fromkeys(load for root in spec.expressions for load in loads(root)))


def _vector(spec: NormSpec) -> int:
    """Elements of a vector: at most 16 bytes of the widest operand, so that a warp's accesses have no gaps,
    and no element more than there is, at whole multiples of its size."""
    operands: list[Load | Result] = [*along(spec), *(each.result for each in spec.results
                                                     if each.result.n and not each.group)]
    count = VECTOR_BYTES // max((each.dtype.itemsize for each in operands), default=4)
    while count > 1 and not _fits(count, spec.n, operands): count //= 2
    return count


def _fits(count: int, n: int, operands: Iterable[Load | Result]) -> bool:
    strides = [stride for x in operands for stride in (x.m, x.offset, *x.batch)]
    return n % count == 0 and not any(stride % count for stride in strides)


def _rows(spec: NormSpec, team: int) -> int:
    """Rows of a CTA: of teams below a warp as many as fill a CTA, or a warp where there are no more rows."""
    return max(32 // team, min(SMALL_CTA // team, _power(spec.m))) if team <= 32 else 1


def _power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << max(count - 1, 0).bit_length()


def problems(spec: NormSpec, schedule: Norm, gpu: GPU) -> list[str]:
    """Why the template does not take rows, or has another schedule for them; empty when it can. A row has one
    order of its sums, whatever it is beside: one schedule."""
    out = list(dict.fromkeys(words for root in spec.expressions for words in refused(root, gpu.arch)))
    if any(each.result.n not in (0, 1) for each in spec.results if not each.group):
        out.append("elements of a result lie apart")
    apart = sorted({load.parameter for load in every(spec) if load.n not in (0, 1)})
    if apart: out.append(f"elements of x{apart[0]} lie apart")
    if spec.statistics and spec.n > MOST_ELEMENTS:
        out.append(f"a row of {spec.n} elements, at most {MOST_ELEMENTS}: several CTAs are faster")
    if prod(spec.batch) > MOST_GRID: out.append(f"a batch of {prod(spec.batch)}, at most {MOST_GRID}")
    own = Norm.of(spec, gpu.arch)
    out += _groups(spec, own)
    return out if out or schedule == own else [f"{schedule} is not {own}"]


def _groups(spec: NormSpec, schedule: Norm) -> list[str]:
    """A group is that of some lanes of a warp, once in each chunk."""
    if not (found := spec.groups): return []
    if len(found) > 1: return [f"groups of {' and '.join(map(str, sorted(found)))}"]
    lanes, rest = divmod(group := found.pop(), schedule.vector)
    if rest or lanes > 32 or lanes & (lanes - 1) or schedule.team % lanes:
        return [f"groups of {group} by threads of {schedule.vector}: {lanes} lanes of {schedule.team}"]
    return [] if schedule.held else ["groups of a row that is read again"]


NORM = Template("norm", NormSpec, Norm, problems, lambda spec, gpu: (Norm.of(spec, gpu.arch),),
                lazy_build("tinygrad_nv.tile.norm.kernel", "norm"))
FAMILY = Family("norm", (NORM,), determinism_class=BY_ROW)
