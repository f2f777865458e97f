"""Pipeline schedules as data: in which order each rank runs forward and backward passes of its stages.

Protocol. A network is cut into stages, `stages = ranks · chunks`; stage s is on rank s mod `ranks`. A batch
is cut into microbatches. A schedule is a list of `Op`s for each rank:

    F   the forward pass of a microbatch through a stage
    B   its backward pass; where a schedule `splits` it, the gradient of the stage's input alone
    W   the gradients of the stage's parameters, where B leaves them out

check.py says whether a schedule can run, how long it takes and how many microbatches it keeps; pipeline.py
runs one. The functions below make the published schedules; any other list of `Op`s may be used instead.

Sources: GPipe, arXiv 1811.06965; 1F1B and interleaved 1F1B, Megatron-LM, arXiv 2104.04473, section 2.2;
ZB-H1, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinygrad_nv.errors import DistError

Kind = Literal["F", "B", "W"]


@dataclass(frozen=True)
class Op:
    """A pass of a microbatch through a stage."""
    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str: return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Order of the passes of each rank. `splits`: the backward pass is in two halves, B and W."""
    name: str
    chunks: int
    microbatches: int
    splits: bool
    ranks: tuple[tuple[Op, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages of the whole network."""
        return len(self.ranks) * self.chunks

    def rank_of(self, stage: int) -> int:
        """Returns the rank of a stage."""
        return stage % len(self.ranks)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forward passes, then all backward passes: every microbatch is kept."""
    _require(ranks, microbatches)
    order = range(microbatches)
    return Schedule("GPipe", 1, microbatches, False, tuple(
        (*(Op("F", r, m) for m in order), *(Op("B", r, m) for m in order)) for r in range(ranks)))


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Forward and backward passes in turn, as soon as a microbatch comes back: rank r keeps `ranks - r`."""
    _require(ranks, microbatches)

    def of_rank(r: int) -> tuple[Op, ...]:
        forward, backward = ([Op(kind, r, m) for m in range(microbatches)] for kind in ("F", "B"))
        return _alternate(forward, backward, ranks - r - 1)
    return Schedule("1F1B", 1, microbatches, False, tuple(map(of_rank, range(ranks))))


def interleave(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` stages a rank: groups of `ranks` microbatches go through one chunk after the other,
    and the pipeline fills in a fraction of the time. `ranks` has to divide `microbatches`."""
    _require(ranks, microbatches)
    if microbatches % ranks or chunks < 1:
        raise DistError(f"{microbatches} microbatches and {chunks} chunks over {ranks} ranks",
                        f"a multiple of {ranks} microbatches, and at least one chunk",
                        "change the number of microbatches, or take 1F1B")

    def passes(kind: Kind, r: int) -> list[Op]:
        order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
        return [Op(kind, chunk * ranks + r, group + m) for group in range(0, microbatches, ranks)
                for chunk in order for m in range(ranks)]

    def of_rank(r: int) -> tuple[Op, ...]:
        ahead = (ranks - r - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * ranks
        return _alternate(passes("F", r), passes("B", r), ahead)
    return Schedule("interleaved 1F1B", chunks, microbatches, False, tuple(map(of_rank, range(ranks))))


def zero_bubble_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose backward passes are split: gradients of parameters, which no other rank waits for, fill the
    time in which a rank would wait. Rank r runs them r passes late, so every rank keeps `ranks` microbatches,
    as the first rank of 1F1B does."""
    _require(ranks, microbatches)

    def of_rank(r: int) -> tuple[Op, ...]:
        made, waiting = list[Op](), list[Op]()
        for op in one_f_one_b(ranks, microbatches).ranks[r]:
            made.append(op)
            if op.kind != "B": continue
            waiting.append(Op("W", r, op.microbatch))
            if len(waiting) > r: made.append(waiting.pop(0))
        return (*made, *waiting)
    return Schedule("ZB-H1", 1, microbatches, True, tuple(map(of_rank, range(ranks))))


def _alternate(forward: list[Op], backward: list[Op], ahead: int) -> tuple[Op, ...]:
    """`ahead` forward passes, then one of each in turn, then what is left."""
    ahead = min(ahead, len(forward))
    pairs = [op for pair in zip(forward[ahead:], backward, strict=False) for op in pair]
    return (*forward[:ahead], *pairs, *backward[len(forward) - ahead:])


def _require(ranks: int, microbatches: int) -> None:
    if ranks < 1 or microbatches < 1:
        raise DistError(f"a pipeline of {ranks} ranks and {microbatches} microbatches",
                        "at least one of each")
