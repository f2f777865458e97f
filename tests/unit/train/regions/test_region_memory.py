"""The memory of captured steps with regions, by its timeline."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import TinyJit

from tests.support.train.region_case import stack
from tinygrad_nv.errors import HookError
from tinygrad_nv.runtime.observe.memory_timeline import memory_timeline

ROWS, WIDTH, LAYERS = 512, 16, 8
INPUT, INNER = ROWS * WIDTH * 4, ROWS * 4 * WIDTH * 4     # bytes of a layer's input, and of its wide values


@pytest.mark.slow
def test_what_a_step_keeps():
    """In bytes of a layer's input: without regions a layer keeps its input and norm, 1 each, and two wide
    values, 4 each: 80 of 8 layers, and a wide gradient. "full" keeps 8 inputs, and of one layer the rest (9)
    and a wide gradient (4): 21 of 84."""
    steps = {policy: stack(policy) for policy in ("none", "full", "dots")}
    lines = {policy: memory_timeline(jit) for policy, (jit, _) in steps.items()}
    for line in lines.values(): assert line.peak.nbytes <= line.arena_bytes
    for policy in ("full", "dots"):
        for want, found in zip(steps["none"][1], steps[policy][1], strict=True):
            assert np.array_equal(want, found)
    none, full, dots = (lines[policy].peak.nbytes for policy in ("none", "full", "dots"))
    assert none >= LAYERS * (INPUT + INNER)
    assert full <= (LAYERS + 9 + 4) * INPUT
    assert lines["full"].arena_bytes <= lines["none"].arena_bytes / 4
    assert full < dots < none


def test_a_region_is_computed_again_after_its_forward_pass_is_free():
    """Each layer's wide matmul, as one of its gradients, runs once more than without regions. When all have
    run forward, inputs alone are alive; then a layer's values are there again."""
    none, full = (memory_timeline(stack(policy)[0]).at for policy in ("none", "full"))
    name = none[1].name
    runs = [number for number, moment in enumerate(full) if moment.name == name]
    assert len(runs) == LAYERS + sum(moment.name == name for moment in none)
    between = [moment.nbytes for moment in full[runs[LAYERS - 1]:runs[LAYERS]]]
    assert min(between) <= (LAYERS + 1) * INPUT
    assert max(moment.nbytes for moment in full[runs[LAYERS]:]) >= min(between) + 2 * INNER


def test_nothing_is_captured():
    with pytest.raises(HookError, match="captured nothing"): memory_timeline(TinyJit(lambda: None))
