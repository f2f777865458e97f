"""Attention within documents on the CPU: gradients against float64, each document to the bit as if it were
alone, padding, and any number of parts."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.cpu.cpu_backward_case import here
from tests.support.patterns.documents_case import Documents, bounds
from tinygrad_nv import explain
from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.attention.backward import kernel as backward
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.functional import document_attention, scaled_dot_product_attention
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec

C = 4.0     # of the error of plain float32
LENGTHS = [[100, 1, 1, 1, 130], [7] * 20, [260], []]    # within a tile and beyond it, tiny ones; padding
CASES: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 9},
    "both sides": {"causal": False, "window": 5},
    "softcap and scale": {"softcap": 2.0, "scale": 0.3, "window": 40}}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels of ours."""
    monkeypatch.setenv("NV_CPU", "1")


def values(tensors: list[Tensor]) -> list[np.ndarray]:
    Tensor.realize(*tensors)
    return [x.float().numpy() for x in tensors]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_gradients(how: dict[str, Any], sinks: bool) -> None:
    """At most C times as far from float64 as plain float32 is, or C units of the largest; the gradient of
    sinks, which tinygrad sums over all rows, or C units of the sum of magnitudes."""
    case = Documents.of(LENGTHS, 260, d=24, sinks=sinks)
    wanted, plain = case.plain(torch.float64, **how), case.plain(torch.float32, **how)
    made = case.ours("CPU", **how)
    assert [name for each in explain(*made).kernels if "flash" in (name := each.template or "")] == \
        ["flash", "flash_backward"]
    for got, exact, near in zip(values(made), wanted, plain, strict=True):
        size = exact.abs().max()
        if got.ndim == 1: size, exact, near = exact.abs().sum(), exact.sum((0, 2, 3)), near.sum((0, 2, 3))
        most = C * max((near - exact).abs().max().item(), 2**-24 * size.item())
        assert np.abs(got - exact.numpy()).max() <= most


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_halves(dtype: DType) -> None:
    """Within a unit of the largest, to which results are rounded, and what rounding p costs."""
    case = Documents.of(LENGTHS, 260, dtype=dtype)
    unit = {dtypes.bfloat16: 2**-8, dtypes.float16: 2**-11}[dtype]
    for got, exact in zip(values(case.ours("CPU")), case.plain(torch.float64), strict=True):
        assert np.abs(got - exact.numpy()).max() <= 2 * unit * exact.abs().max()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=["many heads", "one head"])
def test_a_document_is_as_if_it_were_alone(heads: tuple[int, int]) -> None:
    """To the bit; and all one document is the dense kernel."""
    case = Documents.of([[300, 2, 83]], 400, *heads)
    made = values(case.ours("CPU"))
    for at, n in ((0, 300), (300, 2), (302, 83)):
        q, k, v, grad = (Tensor(x[:, :, at:at + n].float().numpy()).realize() for x in case.arrays)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        alone = values([out, *out.gradient(q, k, v, gradient=grad)])
        for got, wanted in zip(made, alone, strict=True):
            np.testing.assert_array_equal(got[:, :, at:at + n], wanted)
    for got in made: assert not got[:, :, 385:].any()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=["many heads", "one head"])
def test_garbage_stays_where_it_is(heads: tuple[int, int]) -> None:
    """NaN in padding and in another document reaches nothing: no bit differs."""
    case = Documents.of([[9, 40, 3, 100], [5]], 200, *heads)
    wanted, poisoned = values(case.ours("CPU", causal=False)), [x.clone() for x in case.arrays]
    for x in poisoned: x[0, :, 9:49] = x[0, :, 152:] = x[1, :, 5:] = torch.nan
    made = values(replace(case, arrays=tuple(poisoned)).ours("CPU", causal=False))
    for got, clean in zip(made, wanted, strict=True):
        for row, columns in ((0, slice(0, 9)), (0, slice(49, None)), (1, slice(None))):
            np.testing.assert_array_equal(got[row, :, columns], clean[row, :, columns])
        assert np.isnan(got[0, :, 9:49]).all()
        assert not got[0, :, 152:].any()
        assert not got[1, :, 5:].any()


def test_bounds_that_are_wrong_touch_nothing_else() -> None:
    """Of any numbers: the kernels end, and write their results alone."""
    case = Documents.of([[64]], 64)
    q, k, v, grad = (Tensor(x.float().numpy()).realize() for x in case.arrays)
    for seed in range(4):
        first, end = np.random.default_rng(seed).integers(-100, 200, (2, 1, 64)).astype(np.int32)
        out = document_attention(q, k, v, Tensor(first), Tensor(end))
        for each in values([out, *out.gradient(q, k, v, gradient=grad)]): assert each.shape[2] == 64


def specs(case: Documents) -> tuple[AttentionSpec, BackwardSpec]:
    found = [each.spec for each in explain(*case.ours("CPU")).kernels
             if "flash" in (each.template or "")]
    assert isinstance(found[0], AttentionSpec)
    assert isinstance(found[1], BackwardSpec)
    return found[0], found[1]


@pytest.mark.slow
def test_no_bit_depends_on_the_parts() -> None:
    """Several numbers of them, in any order: key heads, and blocks."""
    case = Documents.of([[100, 1, 29, 1, 70], [150]], 210)
    forward, gradient = specs(case)
    assert forward.documents
    assert gradient.forward.documents
    inputs = [x.float().numpy() for x in case.arrays]
    q, k, v, grad = (np.ascontiguousarray(x) for x in inputs)
    first, end = bounds(case.lengths, 210)
    wanted: list[np.ndarray] = []
    for parts in (1, 3, 7):
        def launched(kernel: CPUKernel, *arrays: np.ndarray, order: range = range(parts)) -> None:
            load(kernel)(*(x.reshape(-1).view(np.uint8) for x in arrays), order=order[::-1])
        out, logs = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
        how = replace(flash.default(forward, here()), parts=parts)
        launched(flash.build(forward, how), out, logs, q, k, v, first, end)
        delta, made = (grad * out).sum(-1), [np.full_like(x, np.nan) for x in (q, k, v)]
        other = replace(backward.default(gradient, here()), parts=parts)
        launched(backward.build(gradient, other), *made, q, k, v, grad, logs, delta, first, end)
        found = [out, logs, *made]
        assert not any(np.isnan(x).any() for x in found)
        for got, same in zip(found, wanted or found, strict=True): np.testing.assert_array_equal(got, same)
        wanted = wanted or found
