"""Gated activations by name: torch's numbers and gradients, one kernel each, the same bits when captured."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tests.support.tile.reference_case import right, run, storages
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.programs import CPUProgramSchedule
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import gate_up
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm import spec as specs
from tinygrad_nv.tile.norm.spec import Computed, NormSpec
from tinygrad_nv.tile.templates import TABLE

F32, BF16 = dtypes.float32, dtypes.bfloat16
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
EXTREME = (1e4, -1e4, 0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 12.0, -12.0)
pytestmark = pytest.mark.usefixtures("cpu_device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("activation", specs.ACTIVATIONS)
def test_every_instruction_set(activation: str, level: isa.ISA):
    """Against float64, with NaN beside the rows; the same bits by any number of parts."""
    target = replace(host(), isa=level)
    for dtype, n in ((F32, 37), (BF16, 40)):
        for spec in (specs.apply_gate(5, n, dtype, activation), specs.gate_gradient(5, n, dtype, activation)):
            given, schedule = storages(spec, seed=n), TABLE.choose(spec, target)
            assert isinstance(schedule, CPUProgramSchedule)
            found = [run(spec, replace(schedule, parts=parts), target, given) for parts in (1, 3)]
            assert all(torch.equal(each, other) for each, other in
                       zip(found[0].values(), found[1].values(), strict=True))
            right(spec, given, found[0], cut=2.0**-20)      # exponentials are polynomials


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16, dtypes.float16], ids=str)
@pytest.mark.parametrize("activation", specs.ACTIVATIONS)
def test_gradients_are_those_of_torch(activation: str, dtype: DType):
    """Of usual and of extreme numbers; float32 within 1e-5 of the size of each, else two roundings."""
    random = np.random.default_rng(0)
    both, grad = (random.standard_normal(shape).astype(np.float32) * 3 for shape in ((2, 9, 100), (2, 9, 50)))
    both[1, :4, :len(EXTREME)] = EXTREME
    if dtype == dtypes.float16: both = both.clip(-1e4, 1e4)
    x, g = (Tensor(each).cast(dtype).contiguous().realize() for each in (both, grad))
    y = gate_up(x, activation)
    (dx,) = y.gradient(x, gradient=g)
    assert [each.template for each in explain(y, dx).kernels] == ["gated", "gated"]
    held = torch.from_numpy(x.float().numpy()).double().requires_grad_()
    gate, up = held.chunk(2, -1)
    wanted = ACTIVATIONS[activation](gate) * up
    wanted.backward(torch.from_numpy(g.float().numpy()).double())
    assert held.grad is not None
    error = {F32: 1e-5, BF16: 2.0**-7, dtypes.float16: 2.0**-10}[dtype]
    for mine, true in ((y, wanted.detach()), (dx, held.grad)):
        found, exact = mine.float().numpy().astype(np.float64), true.numpy()
        assert np.isfinite(found[np.abs(exact) < 6e4]).all()
        inside = np.abs(exact) < 6e4
        assert (np.abs(found - exact)[inside] <= error * (1 + np.abs(exact[inside]))).all()
    with disabled(): plain = [each.float().numpy() for each in (gate_up(x, activation), *gate_up(
        x, activation).gradient(x, gradient=g))]
    for mine, other in zip((y, dx), plain, strict=True):
        found = mine.float().numpy()
        inside = np.abs(other) < 6e4
        assert (np.abs(found - other)[inside] <= error * (1 + np.abs(other[inside]))).all()


def test_a_captured_step_has_the_same_bits():
    x = Tensor(np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)).contiguous().realize()

    def step() -> Tensor: return gate_up(x, "silu").sum().gradient(x)[0].realize()
    once, captured = step().numpy(), TinyJit(step)
    for _ in range(4): np.testing.assert_array_equal(captured().numpy(), once)


def test_results_beside_each_other():
    """What a spec refuses: nothing before, other strides, an offset below."""
    spec = specs.gate_gradient(4, 8, F32, "silu")
    first, second = spec.results
    for results in ((second,), (first, replace(second, result=Result(F32, 8, 1, (), 8))),
                    (replace(second, beside=False), replace(first, beside=True))):
        with pytest.raises(SpecError, match="beside"): NormSpec(4, 8, (), results)
    assert spec.outputs == (0, 0)
    assert NormSpec(4, 8, (), (first, second, Computed(first.result, first.value))).outputs == (0, 0, 1)
