"""kv_append on a CPU by its body, which is tinygrad's own kernels, against what the definition says."""
from __future__ import annotations

import pytest
import torch
from tinygrad import dtypes

from tests.support.patterns.append_case import append, run, same, wanted
from tinygrad_nv import disabled


@pytest.fixture(autouse=True)
def body(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of ours."""
    monkeypatch.setenv("NV_CPU", "0")


def test_copies_are_exact():
    case = append([0, 1, 9, 24, 30], rows=3, dtype=dtypes.float32, d_v=8)
    same(run(case, "CPU"), wanted(case))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations(interleaved: bool):
    case = append([0, 9, 24], rows=2, dtype=dtypes.float32, half=6, q_heads=3, interleaved=interleaved)
    found = run(case, "CPU")
    for name, x in wanted(case).items(): torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)


def test_quantised():
    case = append([0, 9, 24], kv=dtypes.int8)
    same(run(case, "CPU"), wanted(case))
    assert (wanted(case)["k_pages"] != case.given["k_pages"]).sum() > 100


def test_without_tinygrad_nv():
    case = append([0, 9], rows=2, dtype=dtypes.float32)
    with disabled(): same(run(case, "CPU"), wanted(case))
