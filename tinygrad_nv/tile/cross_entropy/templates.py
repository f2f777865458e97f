"""The templates of cross entropy on a GPU, and how threads share a row.

A row that is read once is kept in shared memory, in a cluster's where it is long: of 128256 float32 logits a
CTA of 8 has 64 KB. sm_80 and sm_89 have no clusters: there a long row is read again, from L2 or memory.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, RowsSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

FOLDER = "tinygrad_nv.tile.cross_entropy.rows"
THREADS = 256
CLUSTERS = (2, 4, 8)
VECTOR_BYTES = 16
KEPT_BYTES = 72 << 10       # of a CTA: three of them in an SM
MOST_KEPT_BYTES = 216 << 10     # where no cluster is larger


@dataclass(frozen=True)
class Rows(Schedule):
    """`blocks` CTAs have a row; `kept`: in shared memory from the first pass to the second."""
    template: ClassVar[str] = "cross_entropy"
    blocks: int = 1
    kept: bool = False

    def words(self) -> list[str]:
        words = [f"{self.blocks} CTAs a row"] if self.blocks > 1 else []
        return [*words, *(["kept in shared memory"] if self.kept else [])]


@dataclass(frozen=True)
class DistilledRows(Rows):
    """Schedule of a distillation, whose teacher is read again."""
    template: ClassVar[str] = "distillation"


def wide_of(spec: RowsSpec) -> int:
    """Elements of a vector: at most 16 bytes of the widest operand, and a divisor of a row."""
    kinds = [spec.dtype, spec.gradient or spec.dtype]
    if isinstance(spec, DistillationSpec): kinds.append(spec.teacher)
    return gcd(spec.size, VECTOR_BYTES // max(kind.itemsize for kind in kinds))


def blocks_of(spec: RowsSpec, arch: str) -> tuple[int, bool]:
    """CTAs of a row, and whether they keep it."""
    nbytes = 4 * spec.size
    if spec.gradient is None: return 1, False
    if nbytes <= KEPT_BYTES: return 1, True
    if arch != "sm_90a": return 1, False
    for blocks in CLUSTERS:
        if nbytes <= blocks * KEPT_BYTES: return blocks, True
    return CLUSTERS[-1], nbytes <= CLUSTERS[-1] * MOST_KEPT_BYTES


def candidates(spec: CrossEntropySpec, gpu: GPU) -> tuple[Rows]:
    """The one schedule: the order of a row's sums is the same beside any others."""
    return Rows(*blocks_of(spec, gpu.arch)),


def candidates_distilled(spec: DistillationSpec, gpu: GPU) -> tuple[DistilledRows]:
    """Returns the candidates of a distillation."""
    return DistilledRows(*blocks_of(spec, gpu.arch)),


def problems(spec: RowsSpec, schedule: Rows, gpu: GPU) -> list[str]:
    """Why a schedule is not that of a spec; empty when it is."""
    own = blocks_of(spec, gpu.arch)
    return [] if (schedule.blocks, schedule.kept) == own else [f"{schedule} is not {type(schedule)(*own)}"]


ROWS = Template("cross_entropy", CrossEntropySpec, Rows, problems, candidates,
                lazy_build(FOLDER, "cross_entropy"))
DISTILLATION = Template("distillation", DistillationSpec, DistilledRows, problems, candidates_distilled,
                        lazy_build(FOLDER, "distillation"))
FAMILY = Family("cross_entropy", (ROWS, DISTILLATION), determinism_class=OVER_ROWS)
