"""paged_attention on a CPU, by its body and by a kernel of ours, against float64.

Lengths and pages are read from memory, so that cases of one shape share their compiled kernels.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.patterns.paged_case import attention, case, exact, fetched, near, operands
from tinygrad_nv import explain
from tinygrad_nv.functional import paged_attention

S8, E4M3, E5M2 = dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2
SHAPE = {"rows": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture(autouse=True, scope="module", params=["body", "kernel"])
def ours(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the CPU has kernels of ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NV_CPU", str(int(request.param == "kernel")))
        yield request.param == "kernel"


@pytest.mark.sampled(1)
def test_lengths_up_to_the_tables():
    for lengths in ([0, 1, 2], [7, 8, 9], [31, 32, 0]):
        made = case(lengths, **SHAPE)
        near(made, fetched(attention(made, "CPU")))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 32), min_size=3, max_size=3), st.integers(1, 99))
def test_any_lengths(lengths: list[int], seed: int):
    made = case(lengths, **SHAPE, seed=seed)
    near(made, fetched(attention(made, "CPU")))


@pytest.mark.sampled(1)
def test_window_and_soft_cap():
    """Rows that see nothing are zeros."""
    made = case([0, 1, 3, 20], rows=4, heads=2, window=2, softcap=0.5, scale=0.7)
    got = fetched(attention(made, "CPU"))
    near(made, got)
    for zeros in (got[0], got[1, :3], got[2, 0]): assert (zeros == 0).all()
    assert got[1, 3].abs().min() > 0


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [9, 13, 17])
def test_blocks_of_rows_in_a_window(rows: int):
    """Rows that fill a block up see no page that the request has given back: entries of the table are 2³⁰."""
    made = case([0, 3, rows, rows + 1, 24, 30], rows=rows, window=1, size=4, pages=8)
    near(made, fetched(attention(made, "CPU")))
    made = case([31, 25, 2], rows=rows, window=3, size=1, pages=32)
    near(made, fetched(attention(made, "CPU")))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "kv"), [(dtypes.float16, S8), (dtypes.bfloat16, E4M3),
                                           (dtypes.float32, E5M2)])
def test_quantised(dtype: DType, kv: DType):
    made = case([0, 9, 16], dtype=dtype, kv=kv, d_v=16, pages=2)
    near(made, fetched(attention(made, "CPU")))


@pytest.mark.sampled(1)
def test_very_large_scores():
    made = case([9, 17, 0], **SHAPE, scale=1e30)
    got = fetched(attention(made, "CPU"))
    torch.testing.assert_close(got.double(), exact(made), rtol=0, atol=1e-6)


@pytest.mark.sampled(1)
def test_whose_kernels(ours: bool):
    made = [kernel.template for kernel in explain(attention(case([9, 8, 7], **SHAPE), "CPU")).kernels]
    assert made == ["decode"] if ours else set(made) == {None}


def test_the_bound_is_one():
    """The comparison can fail: a mask that hides one key from each row shows."""
    made = case([9, 16, 32], **SHAPE)
    got = fetched(attention(replace(made, lengths=[8, 15, 31]), "CPU"))
    with pytest.raises(AssertionError, match="above the bound"): near(made, got)


# **** sinks and chunks ****

@pytest.mark.sampled(1)
def test_sinks():
    """One more logit of each head, also in rows that see nothing; −∞ is none, beside a large one nothing is
    left."""
    near(made := case([0, 2, 31], **SHAPE, sinks=True), got := fetched(attention(made, "CPU")))
    assert not got[0].any()
    assert (got - fetched(attention(replace(made, sinks=None), "CPU"))).abs().max() > 0.01
    given = replace(made, sinks=torch.tensor([1e30, 0.0, -torch.inf, 3.4e38]))
    near(given, got := fetched(attention(given, "CPU")))
    assert not got[:, :, [0, 3]].any()


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_chunks():
    """Rows see the keys of their own chunk; pages of the chunks before are 2³⁰."""
    for lengths in ([0, 3, 4], [5, 12, 13], [14, 31, 28]):
        near(made := case(lengths, rows=4, heads=2, window=6, chunked=True, size=4, pages=8, sinks=True),
             fetched(attention(made, "CPU")))


@pytest.mark.sampled(1)
def test_blocks_of_rows_in_chunks(ours: bool):
    if not ours: return     # of the body nothing more is asked than above
    for lengths in ([0, 3, 11], [12, 24, 30]):
        near(made := case(lengths, rows=11, heads=2, window=8, chunked=True, size=4, pages=8),
             fetched(attention(made, "CPU")))


def test_sinks_that_lie_apart(ours: bool):
    """A part of a larger tensor is copied first."""
    if not ours: return
    made = case([9, 17], **SHAPE, sinks=True)
    tensors, wide = operands(made, "CPU"), Tensor.zeros(8, 2).contiguous()
    wide[2:6, 1] = Tensor(made.sinks.numpy())
    near(made, fetched(paged_attention(*tensors, sinks=wide.realize()[2:6, 1])))
