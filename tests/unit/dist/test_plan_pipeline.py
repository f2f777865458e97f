"""What plans say of pipeline schedules, beside the schedules that ranks run, counted to their end."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.plan.pipeline import bubble, idle, under_way
from tinygrad_nv.dist.train.check import check
from tinygrad_nv.dist.train.schedules import Schedule, gpipe, interleave, one_f_one_b, zero_bubble_h1

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
