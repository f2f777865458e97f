"""Pipeline schedules, in closed form.

Protocol: of p stages and m microbatches, whose forward and backward pass take one and two units in a stage,
`bubble` is the share of a step in which a stage waits, `under_way` how many microbatches' activations a stage
holds.

    gpipe         (p − 1) idle of m + p − 1               all m
    1f1b          the same                                p − stage
    interleaved   (p − 1) / v of m + (p − 1) / v          p − stage, and (p − 1) / v more
    zero-bubble   (p − 1) / 3 of m + (p − 1) / 3          p − stage

Interleaved is Megatron-LM's (arXiv 2104.04473), zero-bubble ZB-H1 (2401.10241), where the gradients of inputs
and of matrices take a unit each.
"""
from __future__ import annotations

from tinygrad_nv.dist.plan.layout import Training


def idle(schedule: str, stages: int, virtual: int = 1) -> float:
    """Microbatches' time that a stage waits in a step."""
    return (stages - 1) / {"interleaved": virtual, "zero-bubble": 3}.get(schedule, 1)


def bubble(schedule: str, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Share of a step."""
    waits = idle(schedule, stages, virtual)
    return waits / (microbatches + waits)


def under_way(work: Training, stages: int, stage: int, microbatches: int) -> float:
    """Microbatches whose activations a stage holds at most."""
    if work.schedule == "gpipe": return microbatches
    more = (stages - 1) / work.virtual if work.schedule == "interleaved" and stages > 1 else 0.0
    return min(microbatches, stages - stage + more)
