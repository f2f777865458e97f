"""State of 8 bits: the map, the nearest code, and steps beside those with state of 32 bits."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.train.optimizers import StateOptions, adamw
from tinygrad_nv.train.optimizers.state import BLOCK, BlockwiseSlot, dynamic_map


def test_the_map():
    """As the paper builds it: 0, 1, and for 7 sizes of ten 2ⁱ middles of equal spans, of both signs."""
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert signed[-1] == unsigned[-1] == 1
    assert [(len(set(x.tolist())), x.min() >= 0) for x in (signed, unsigned)] == [(256, False), (256, True)]
    assert sorted(-x for x in signed if x not in (0, 1)) == pytest.approx([x for x in signed
                                                                         if x not in (0, 1)])
    positive = signed[signed > 0]
    counts = [int(((positive > 10.0**e) & (positive <= 10.0**(e + 1))).sum()) for e in range(-7, 0)]
    assert counts == [1, 2, 4, 8, 16, 32, 64 + 1]
    assert positive[0] == pytest.approx(0.55e-6)


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code(signed: bool):
    random = np.random.default_rng(0)
    x = (random.standard_normal(1000) * np.exp(4 * random.standard_normal(1000))).astype(np.float32)
    if not signed: x = np.abs(x)
    slot = BlockwiseSlot.zeros((1000,), "CPU", signed)
    np.testing.assert_array_equal(slot.read().numpy(), np.zeros(1000))
    np.testing.assert_array_equal(slot.write(Tensor(x), None).numpy(), x)
    found, numbers = slot.read().numpy(), dynamic_map(signed).astype(np.float64)
    for first in range(0, 1000, BLOCK):
        block = x[first:first + BLOCK].astype(np.float64)
        scale = np.abs(block).max()
        best = np.abs(block[:, None] / scale - numbers).min(1) * scale
        off = np.abs(found[first:first + BLOCK] - block)
        assert (off <= best + 2e-7 * scale).all()
    assert slot.codes.nbytes() + slot.scales.nbytes() == 1000 + 4 * 4


def test_steps():
    """Weights move as with 32 bits but for a few percent; small parameters have 32 bits; a captured step."""
    random = np.random.default_rng(1)
    start, target = (random.standard_normal((64, 80)).astype(np.float32) for _ in range(2))
    moved = {}
    for bits in (8, 32):
        held = {"w.weight": Tensor(start).contiguous(), "b.bias": Tensor.zeros(8).contiguous()}
        Tensor.realize(*held.values())
        optimizer = adamw(held, 1e-2, weight_decay=0.0, options=StateOptions(bits=bits))
        goal = Tensor(target).realize()

        @TinyJit
        def step(held: dict = held, optimizer: object = optimizer, goal: Tensor = goal) -> Tensor:
            optimizer.zero_grad()
            loss = ((held["w.weight"] - goal).square().sum() + held["b.bias"].sum()).backward()
            return loss.realize(*optimizer.schedule_step())
        for _ in range(25): step()
        moved[bits] = held["w.weight"].numpy() - start
        if bits == 8:
            names = optimizer.state_dict()
            assert {f"state.w.weight.exp_avg.{part}" for part in ("codes", "scales")} <= names.keys()
            assert "state.b.bias.exp_avg" in names
            assert optimizer.state.nbytes < 2.1 * 64 * 80 + 200
    off = np.linalg.norm(moved[8] - moved[32]) / np.linalg.norm(moved[32])
    assert 0 < off < 0.05, off


@pytest.mark.slow
def test_a_poisoned_gradient_changes_nothing():
    held = {"w.weight": Tensor.ones(64, 80).contiguous().realize()}
    optimizer = adamw(held, 1e-2, options=StateOptions(bits=8))
    for poison in (1.0, np.nan):
        before = [x.numpy().tobytes() for key, x in optimizer.state_dict().items() if key != "skipped"]
        Tensor.realize(*optimizer.schedule_step({"w.weight": Tensor.full((64, 80), poison)}))
    assert before == [x.numpy().tobytes() for key, x in optimizer.state_dict().items() if key != "skipped"]
