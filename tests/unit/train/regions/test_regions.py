"""Regions beside the same functions without: equal loss and gradients, bit for bit. The memory of
captured steps with regions, by its timeline."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit
from tinygrad.uop.ops import Ops

from tests.support.train.region_case import DENSE, MIXTURE, Case, stack
from tinygrad_nv.errors import HookError
from tinygrad_nv.runtime.observe.memory_timeline import memory_timeline
from tinygrad_nv.train.regions import Policy, checkpoint
from tinygrad_nv.train.regions.values import products

POLICIES = ("full", "selective", "dots", "offload", "0.5")
CASES = {"dense": (DENSE, {}), "mixture": (MIXTURE, {}), "adapter": (DENSE, {"dropout": 0.25}),
         "documents": (DENSE, {"documents": True})}


def others(name: str, policy: str) -> bool:
    """Whether a region has other kernels than the same functions without. Attention with a mask that is not
    derived has one of ours, and is tinygrad's own with a gradient. The sum of a matmul and an adapter is in
    no memory, unless it is kept."""
    return name == "documents" or (name == "adapter" and policy not in ("full", "offload"))


@pytest.mark.parametrize("name", [name if name == "dense" else pytest.param(name, marks=pytest.mark.slow)
                                  for name in CASES])
def test_layers_have_the_same_gradients(tmp_path: Path, name: str):
    """Bit for bit where kernels are the same; else within 1e-5 of the largest, as beside torch."""
    config, options = CASES[name]
    case = Case(tmp_path, config, **options)
    expected = [each.numpy() for each in case.derived()]
    assert all(np.abs(each).max() > 0 for each in expected)
    for policy in POLICIES:
        case.region(Policy.read(policy))
        for parameter, want, found in zip(["loss", *case.parameters], expected, case.derived(), strict=True):
            if others(name, policy): assert np.abs(want - found.numpy()).max() <= 1e-5 * np.abs(want).max()
            else: assert np.array_equal(want, found.numpy()), (policy, parameter)


@pytest.mark.slow
def test_a_function_with_what_it_closes_over():
    """Regions within a region, an input that is read by others, a value that a weight is made of, and a
    gradient that depends on nothing."""
    random = np.random.default_rng(2)
    x, w, u = (Tensor(random.integers(-1, 2, (4, 4)).astype(np.float32)).realize() for _ in range(3))

    def derived(region: Callable[..., Callable[..., Tensor]]) -> list[np.ndarray]:
        shared = (w * u).contiguous()
        def inner(h: Tensor) -> Tensor: return (h @ shared).square().contiguous()
        def outer(h: Tensor, scale: float, by: Tensor) -> Tensor: return region(inner)(h * scale + by) @ w
        h = (x * 2).contiguous()
        made = region(outer)(h, 2.0, by=u) * h
        alone = region(inner)(x).sum().gradient(w)
        return [each.numpy() for each in (made, *made.sum().gradient(x, w, u), *alone)]
    expected = derived(lambda fn: fn)
    for policy in POLICIES[:-1]:
        made = derived(lambda fn, policy=policy: checkpoint(fn, policy))
        for want, found in zip(expected, made, strict=True): assert np.array_equal(want, found)


def test_gradients_go_to_the_parameters_that_are_named():
    x, w, u = (Tensor.ones(4, 4).contiguous().realize() for _ in range(3))
    made = checkpoint(lambda h: ((h @ w).relu() @ u).contiguous(), parameters=[u])(x)
    assert np.array_equal(made.sum().gradient(u)[0].numpy(), np.full((4, 4), 16, np.float32))
    _, _, _, *outside = made.uop.src[0].src     # the body, the result, x
    assert len(outside) == 1
    assert u.uop in outside[0].toposort()


def test_values_that_are_kept():
    """Of x @ a @ b with an activation between, norms and attention: which results are matmuls."""
    x, a = Tensor.empty(8, 16).contiguous(), Tensor.empty(16, 32)
    product, squares = (x @ a), (x * x).sum(-1)
    assert products(next(node for node in product.uop.toposort() if node.op is Ops.REDUCE)) == 8 * 16 * 32
    assert products(next(node for node in squares.uop.toposort() if node.op is Ops.REDUCE)) == 0


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
