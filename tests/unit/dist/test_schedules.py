"""Pipeline schedules on paper: their bubbles are those of the papers' formulas, what they keep, and
schedules that cannot be; what plans say of them beside the schedules that ranks run, counted to their
end."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.plan.training import bubble, idle, under_way
from tinygrad_nv.dist.train.check import Costs, check
from tinygrad_nv.dist.train.pipeline import Transfer, steps
from tinygrad_nv.dist.train.schedules import (
    Op,
    Schedule,
    gpipe,
    interleave,
    one_f_one_b,
    zero_bubble_h1,
)
from tinygrad_nv.errors import DistError

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 4 * p)]
COSTS = [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 2.0, 1.5)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("f", "b", "w"), COSTS)
def test_bubbles(p: int, m: int, f: float, b: float, w: float) -> None:
    costs: Costs = {"F": f, "B": b, "W": w}
    late = (p - 1) * (b + max(f - w, 0))
    for schedule, share in ((gpipe(p, m), (p - 1) / (m + p - 1)), (one_f_one_b(p, m), (p - 1) / (m + p - 1)),
                             (interleave(p, m, 2), (p - 1) / (2 * m + p - 1)),
                             (interleave(p, m, 3), (p - 1) / (3 * m + p - 1)),
                             (zero_bubble_h1(p, m), late / (m * (f + b + w) + late))):
        report = check(schedule, costs)
        assert report.bubble == pytest.approx(share), (schedule.name, schedule.chunks)


def test_what_is_kept() -> None:
    assert check(gpipe(4, 8)).kept == (8, 8, 8, 8)
    assert check(one_f_one_b(4, 8)).kept == (4, 3, 2, 1)
    assert check(zero_bubble_h1(4, 8)).kept == (4, 4, 4, 4)
    # Megatron-LM: (p - r - 1) 2 + (v - 1) p + 1 of chunks
    assert check(interleave(4, 8, 2)).kept == (11, 9, 7, 5)
    assert "27.3% of it waiting" in str(check(gpipe(4, 8)))


def with_ranks(schedule: Schedule, rank: int, ops: tuple[Op, ...]) -> Schedule:
    return replace(schedule, ranks=tuple(ops if r == rank else own for r, own in enumerate(schedule.ranks)))


def test_schedules_that_do_not_end() -> None:
    good = one_f_one_b(2, 2)
    first, second = good.ranks[1][:2]
    with pytest.raises(DistError, match=r"(?s)does not end:.*rank 0 waits at B0 of stage 0 for B0 of stage 1"
                                        r".*rank 1 waits at B0 of stage 1 for F0 of stage 1"):
        check(with_ranks(good, 1, (second, first, *good.ranks[1][2:])))


def test_schedules_that_are_not_whole() -> None:
    good = zero_bubble_h1(2, 2)
    with pytest.raises(DistError, match="rank 1 of schedule ZB-H1 does not run W1 of stage 1"):
        check(with_ranks(good, 1, good.ranks[1][:-1]))
    with pytest.raises(DistError, match="rank 0 of schedule ZB-H1 runs F0 of stage 1"):
        check(with_ranks(good, 0, (*good.ranks[0], Op("F", 1, 0))))
    with pytest.raises(DistError, match="3 microbatches and 2 chunks over 2 ranks"): interleave(2, 3, 2)
    with pytest.raises(DistError, match="a pipeline of 0 ranks"): gpipe(0, 1)


@pytest.mark.parametrize("schedule", [gpipe(3, 4), one_f_one_b(4, 6), interleave(4, 8, 2),
                                      zero_bubble_h1(4, 5), zero_bubble_h1(1, 2)], ids=lambda each: each.name)
def test_transfers_meet(schedule: Schedule) -> None:
    """With sends that end when they are received, ranks come to their ends: each makes its next step when it
    can. Every stage but the first and last gets and gives each microbatch twice."""
    left = [list(own) for own in steps(schedule)]
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(left):
            if not own: continue
            step = own[0]
            if isinstance(step, Transfer):
                other = left[step.to if rank == step.source else step.source]
                if other and other[0] == step:
                    own.pop(0)
                    other.pop(0)
                    moved = True
            else:
                own.pop(0)
                moved = True
    assert not any(left), [own[:1] for own in left]
    transfers = [one for own in steps(schedule) for one in own if isinstance(one, Transfer)]
    ranks = len(schedule.ranks)
    assert len(transfers) == (2 * 2 * schedule.microbatches * (schedule.stages - 1) if ranks > 1 else 0)


Made = Callable[[int, int], Schedule]
SCHEDULES: list[tuple[str, int, Made]] = [
    ("gpipe", 1, gpipe), ("1f1b", 1, one_f_one_b), ("zero-bubble", 1, zero_bubble_h1),
    *[("interleaved", chunks, lambda p, m, v=chunks: interleave(p, m, v)) for chunks in (1, 2, 3)]]


@pytest.mark.parametrize(("name", "virtual", "made"), SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"),
                         [(1, 3), (2, 2), (4, 4), (4, 9), (4, 40), (8, 3), (8, 24)])
def test_a_schedule_takes_and_keeps_what_is_said(name: str, virtual: int, made: Made, stages: int,
                                                 microbatches: int):
    if name == "interleaved": microbatches += -microbatches % stages
    found, work = check(made(stages, microbatches)), Training(schedule=name, virtual=virtual)
    unit = 3 * virtual      # a forward pass and both halves of a backward pass through a stage
    assert (microbatches + idle(name, stages, microbatches, virtual)) * unit == found.makespan
    assert bubble(name, stages, microbatches, virtual) == pytest.approx(found.bubble)
    assert [under_way(work, stages, stage, microbatches) * virtual for stage in range(stages)] == \
        list(found.kept)


def test_microbatches_of_four_stages():
    """Of eight, by hand: ZB-H1 delays the gradients of parameters, so that no stage keeps fewer."""
    def kept(schedule: str, virtual: int = 1) -> list[float]:
        return [under_way(Training(schedule=schedule, virtual=virtual), 4, stage, 8) for stage in range(4)]
    assert kept("gpipe") == [8, 8, 8, 8]
    assert kept("1f1b") == [4, 3, 2, 1]
    assert kept("interleaved", 2) == [5.5, 4.5, 3.5, 2.5]
    assert kept("zero-bubble") == [4, 4, 4, 4]


def test_chunks_and_split_gradients_shorten_the_bubble():
    assert bubble("interleaved", 8, 16, 4) == 1.75 / 17.75
    assert bubble("1f1b", 8, 16) > bubble("zero-bubble", 8, 16) > bubble("interleaved", 8, 16, 4)
    assert bubble("1f1b", 1, 1) == 0
