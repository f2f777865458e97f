"""Products of 8 to 64 rows as transposed ones of wgmma: weights are the 64 rows that it multiplies at a time,
activations its columns."""
from __future__ import annotations

import pytest
import torch
from gemm_case import arguments, product, reference, run
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

SWAPPED = Wgmma().block(64, 16).warps(8).swapped()


@pytest.mark.parametrize(("m", "columns"), [(8, 8), (17, 24), (64, 64)])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_weights_are_the_rows(m: int, columns: int, majors: str):
    """As many columns as there are activations, and six steps in a ring of four."""
    spec = product(m, 136, 6 * 64, out=dtypes.float32, majors=majors)
    schedule = SWAPPED.block(64, columns)
    given_ = arguments(spec)
    made = TABLE.build(spec, schedule, GPU("sm_90a", 2))
    assert torch.equal(run(made, spec, given_, "sm_90a", seed=m % 4), reference(spec, given_))


def test_rows_known_at_launch_cannot_be_columns():
    found = TABLE.problems(product(64, 128, 256, symbolic=True), SWAPPED, GPU("sm_90a"))
    assert found == ["swapped: rows known at launch cannot be columns"]
