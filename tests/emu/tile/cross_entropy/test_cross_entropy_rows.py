"""Losses of rows by kernels, on the emulated GPU, checks on, and on this processor: against float64, in two
orders of warps; vectors of one element to eight, rows of a program and of a cluster.
Chunks of an output layer's loss share buffers."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tests.support.tile.reference_case import require_same_bits, right, run, storages
from tinygrad_nv import disabled
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.explain import explain
from tinygrad_nv.functional import linear_cross_entropy
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.tile.cross_entropy import program
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec, DistillationSpec, Loss, RowsSpec
from tinygrad_nv.tile.optimizer.spec import SquaresSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, FilterSpec, Number
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
TARGETS = (GPU("sm_80", 108), GPU("sm_90a", 132), host())
ALL = Loss(2, 0.1, 1e-3, 2.0, 2.0)
IN_PLACE: dict[str, Any] = {"gradient": F32, "in_place": True}
SPECS: dict[str, RowsSpec] = {
    "losses": CrossEntropySpec(3, 1100, F32, Loss(2)),
    "in place": CrossEntropySpec(3, 4100, F32, **IN_PLACE),
    "odd": CrossEntropySpec(4, 77, F32, ALL, **IN_PLACE),
    "one class": CrossEntropySpec(2, 1, F32, **IN_PLACE),
    "to bf16": CrossEntropySpec(3, 2052, F32, ALL, BF16), "f16": CrossEntropySpec(3, 600, F16, Loss(5), F32),
    "bf16, scaled": CrossEntropySpec(3, 2056, BF16, ALL, BF16, scaled=True),
    "pairs": CrossEntropySpec(3, 602, BF16, Loss(5), BF16),
    "distilled": DistillationSpec(3, 1100, F32, Loss(2), **IN_PLACE, teacher=BF16, temperature=2.0),
    "distilled, odd": DistillationSpec(3, 77, F32, Loss(2, softcap=5.0), BF16, scaled=True)}
# what ex2.approx (2 units of 2⁻²³) of a few units leaves, of the largest
CUT = 2.0**-18


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS, ids=lambda one: one.instructions)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str, target: GPU | CPU):
    spec = SPECS[name]
    given = storages(spec)
    schedule = TABLE.choose(spec, target)
    first = run(spec, schedule, target, given)
    right(spec, given, first, c=4.0, cut=CUT)
    require_same_bits(spec, schedule, target, given, first)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("arch", "cluster"), [("sm_90a", 2), ("sm_90a", 8)])
@pytest.mark.parametrize("name", ["in place", "bf16, scaled", "distilled", "odd"])
def test_long_rows(name: str, arch: str, cluster: int, monkeypatch: pytest.MonkeyPatch):
    """A cluster shares a row, and some of its programs have no column."""
    monkeypatch.setattr(program, "CLUSTERS", (cluster,))
    spec, target = SPECS[name], GPU(arch)
    given, schedule = storages(spec, 2), replace(TABLE.choose(spec, target), cluster=cluster)
    right(spec, given, run(spec, schedule, target, given), c=4.0, cut=CUT)


def test_sizes_that_int32_does_not_hold_are_refused():
    """Elements are numbered by int32; a specification of many classes makes no list of them."""
    large = (1 << 31) - 5
    for target in TARGETS:
        assert TABLE.why_not(CrossEntropySpec(2, 1 << 30, F32), target) == ""
        for spec in (SquaresSpec((3, large)),
                     FilterSpec(1, large, Number.top_k, True), ChoiceSpec(1, large, True)):
            assert "at most" in TABLE.why_not(spec, target)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2048, 32000, 50257, 128256, 262144])
def test_nothing_spills(size: int):
    for arch in ("sm_80", "sm_89", "sm_90a"):
        for spec in (CrossEntropySpec(8, size, F32, **IN_PLACE), CrossEntropySpec(8, size, F32, ALL, BF16),
                     CrossEntropySpec(8, size, BF16, ALL, BF16),
                     DistillationSpec(8, size, F32, Loss(), **IN_PLACE, teacher=F32)):
            made = TABLE.build(spec, TABLE.choose(spec, GPU(arch)), GPU(arch))
            found = assemble(made.ptx, arch).kernels[made.name]
            assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
            assert found.registers <= 128


def test_a_cluster_shares_a_long_row():
    """L2 holds the rows that all SMs have at once; where there are no clusters a row is read again."""
    spec = CrossEntropySpec(8, 128256, F32, **IN_PLACE)
    assert [TABLE.choose(spec, GPU(arch)).cluster for arch in ("sm_90a", "sm_80")] == [8, 1]
    assert [program.wide_of(CrossEntropySpec(8, size, BF16)) for size in (1, 2, 12, 16)] == [1, 2, 4, 8]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_chunks(dtype: DType):
    random = np.random.default_rng(0)
    given = [random.standard_normal(shape).astype(np.float32) for shape in ((40, 64), (200, 64))]
    hidden, weight = (Tensor(each, device="EMU").cast(dtype).realize() for each in given)
    labels = Tensor(random.integers(0, 200, 40).astype(np.int32), device="EMU").realize()

    def step() -> list[np.ndarray]:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, z_loss=1e-3, chunk=24)
        loss.backward()
        Tensor.realize(loss, hidden.grad, weight.grad)
        return [each.float().numpy() for each in (loss, hidden.grad, weight.grad)]
    assert "24x200 f32" in str(explain(linear_cross_entropy(hidden, weight, labels, chunk=24)))
    got = step()
    with disabled(): plain = step()
    assert got[0] == pytest.approx(plain[0], rel=1e-6)
    # one rounding more or less of the gradient of logits
    for one, other in zip(got[1:], plain[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-8 * np.abs(other).max())
