"""Sums of columns on the CPU: by every instruction set against float64, to the same bits by any parts; found
in graphs of norms and biases, with torch's gradients."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes, nn
from tinygrad.dtype import DType

from bench.lib.specs import bias_sum, norm_weight
from tests.support.tile.reference_case import right, run, same, storages
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import Load, Position, Sum
from tinygrad_nv.tile.templates import TABLE

F32, BF16 = dtypes.float32, dtypes.bfloat16
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
EPS = 1e-5
pytestmark = pytest.mark.usefixtures("cpu_device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, dtypes.float16], ids=str)
def test_against_float64_by_any_parts(dtype: DType, level: isa.ISA):
    """Rows beside whole steps, columns beside vectors and blocks; NaN before and after each row."""
    target = replace(host(), isa=level)
    for m, n in ((67, 133), (3, 700)):
        x = Load(0, dtype, n + 5, 1, (), 2)
        spec = ColumnSumSpec(m, n, x.cast(F32) * Load(1, F32, 3, 0) + Load(2, dtype, 0, 1).cast(F32), dtype)
        given, schedule = storages(spec, seed=m), TABLE.choose(spec, target)
        found = [run(spec, replace(schedule, parts=parts), target, given) for parts in (1, 2, 3)]
        assert all(torch.equal(each["out"], found[0]["out"]) for each in found)
        right(spec, given, found[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_whole_numbers_are_exact(level: isa.ISA):
    target = replace(host(), isa=level)
    for spec in (bias_sum(50, 77, F32), norm_weight(40, 64, F32)):
        given = storages(spec, integers=True)
        if spec.parameters[-1] == F32 and len(spec.parameters) == 3: given["x2"].zero_()
        got = run(spec, TABLE.choose(spec, target), target, given)
        if len(spec.parameters) == 1: same(spec, given, got)
        else: right(spec, given, got)


def test_specs_that_cannot_be():
    x = Load(0, F32, 4, 1)
    for term, words in ((x.cast(BF16), "terms of bf16"), (x * Sum(), "a statistic in a term"),
                        (Load(0, F32, 4, 1, (8,)), "loads of a batch")):
        with pytest.raises(SpecError, match=words): ColumnSumSpec(8, 4, term)
    with pytest.raises(SpecError, match="0 rows"): ColumnSumSpec(0, 4, x)
    with pytest.raises(SpecError, match="sums of s32"): ColumnSumSpec(8, 4, x, dtypes.int32)
    assert "column" in str(ColumnSumSpec(8, 4, x + Position("m").cast(F32)))


# **** in graphs ****

def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """LayerNorm with a residual."""
    centred = x - x.mean(-1, keepdim=True)
    return x + centred * (centred.square().mean(-1, keepdim=True) + EPS).rsqrt() * w + b


def rms(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """RMSNorm with a residual."""
    return x + x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w + b


def torch_layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, EPS)


def torch_rms(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + torch.nn.functional.rms_norm(x, x.shape[-1:], w, EPS) + b


def special(rows: np.ndarray) -> np.ndarray:
    """With rows of ±1e4, of zeros, and of one number."""
    rows[1], rows[2], rows[3] = rows[1] * 1e4, 0, 7
    return rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ours", "theirs"), [(layer, torch_layer), (rms, torch_rms)], ids=["layer", "rms"])
def test_gradients_of_norms_are_those_of_torch(ours: Callable[..., Tensor],
                                               theirs: Callable[..., torch.Tensor]):
    """Within 1e-5 of the largest, of each tensor; sums of weights and biases by kernels of ours."""
    random = np.random.default_rng(1)
    x, grad = (random.standard_normal((3, 41, 72)).astype(np.float32) for _ in range(2))
    x[0] = special(x[0])
    w, b = (random.standard_normal(72).astype(np.float32) for _ in range(2))
    held = [Tensor(each).contiguous().realize() for each in (x, w, b)]
    found = ours(*held).gradient(*held, gradient=Tensor(grad).contiguous().realize())
    names = [each.template for each in explain(*found).kernels]
    assert names.count("column_sum") == 2, names
    assert "norm" in names
    tensors = [torch.from_numpy(each).double().requires_grad_() for each in (x, w, b)]
    theirs(*tensors).backward(torch.from_numpy(grad).double())
    for mine, tensor in zip(found, tensors, strict=True):
        assert tensor.grad is not None
        wanted = tensor.grad.numpy()
        assert np.abs(mine.numpy() - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_a_captured_step_has_the_same_bits():
    layers, random = nn.LayerNorm(64), np.random.default_rng(2)
    x = Tensor(random.standard_normal((50, 64)).astype(np.float32)).contiguous().realize()

    def step() -> tuple[Tensor, ...]:
        made = (layers(x) * x).sum().gradient(layers.weight, layers.bias)
        return tuple(each.realize() for each in made)
    once, captured = [each.numpy() for each in step()], TinyJit(step)
    for _ in range(4):
        for mine, wanted in zip(captured(), once, strict=True):
            np.testing.assert_array_equal(mine.numpy(), wanted)


def test_what_stays_with_tinygrad():
    """Sums along rows, few rows, what is not in memory, and NV_NORM=0."""
    x = Tensor(np.ones((64, 64), np.float32)).contiguous().realize()
    few = Tensor(np.ones((8, 64), np.float32)).contiguous().realize()
    for made in (x.sum(1), few.sum(0), (x * 2).max(0)):
        assert "column_sum" not in [each.template for each in explain(made).kernels]
    assert [each.template for each in explain((x * 2).sum(0)).kernels] == ["column_sum"]
    with disabled(): wanted = (x * 2).sum(0).numpy()
    np.testing.assert_array_equal((x * 2).sum(0).numpy(), wanted)
