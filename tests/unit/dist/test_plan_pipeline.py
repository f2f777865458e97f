"""Closed forms of pipeline schedules, beside schedules that are carried out operation by operation."""
from __future__ import annotations

import pytest

from tinygrad_nv.dist.plan.layout import Training
from tinygrad_nv.dist.plan.pipeline import bubble, idle, under_way

F, B = 1.0, 2.0     # units of a forward and of a backward pass in a stage


def order(schedule: str, stages: int, stage: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage does, in its order."""
    forward = [("F", i) for i in range(microbatches)]
    backward = [("B", i) for i in range(microbatches)]
    if schedule == "gpipe": return forward + backward
    ahead = min(microbatches, stages - stage)
    made = forward[:ahead]
    for i in range(microbatches): made += [backward[i], *forward[ahead + i:ahead + i + 1]]
    return made


def carried_out(schedule: str, stages: int, microbatches: int) -> tuple[float, list[int]]:
    """When the last operation ends, and the most microbatches that each stage holds at a time."""
    left = [order(schedule, stages, stage, microbatches) for stage in range(stages)]
    ends: dict[tuple[str, int, int], float] = {}
    clock, held, most = [0.0] * stages, [0] * stages, [0] * stages
    while any(left):
        for stage in range(stages):
            while left[stage]:
                kind, i = left[stage][0]
                before = ("F", stage - 1, i) if kind == "F" else ("B", stage + 1, i)
                first = before[1] in (-1, stages)
                if not first and before not in ends: break
                clock[stage] = max(clock[stage], 0.0 if first else ends[before]) + (F if kind == "F" else B)
                ends[kind, stage, i] = clock[stage]
                held[stage] += 1 if kind == "F" else -1
                most[stage] = max(most[stage], held[stage])
                left[stage].pop(0)
    return max(clock), most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 3)])
def test_a_schedule_takes_what_is_said(schedule: str, stages: int, microbatches: int):
    seconds, most = carried_out(schedule, stages, microbatches)
    assert seconds == (microbatches + idle(schedule, stages)) * (F + B)
    assert bubble(schedule, stages, microbatches) == pytest.approx(1 - microbatches * (F + B) / seconds)
    work = Training(schedule=schedule)
    assert most == [under_way(work, stages, stage, microbatches) for stage in range(stages)]


def test_chunks_and_split_gradients_shorten_the_bubble():
    assert bubble("interleaved", 8, 16, 4) == 1.75 / 17.75
    assert bubble("1f1b", 8, 16) > bubble("zero-bubble", 8, 16) > bubble("interleaved", 8, 16, 4)
    assert bubble("1f1b", 1, 1) == 0
