"""Sums of outer products of the rows of groups, for tests: arguments, and answers in float64 or float32."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from tinygrad.dtype import dtypes

from tests.support.tile.gemm_case import TORCH
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec

UNIT = {dtypes.float32: 2.0**-24, dtypes.bfloat16: 2.0**-8, dtypes.float16: 2.0**-11}
C = 2.0     # times the error of float32 sums from first to last


def given(spec: GroupedOuterSpec, counts: Sequence[int], before: int, whole: bool,
          seed: int = 0) -> dict[str, torch.Tensor]:
    """y, x, offsets, order; rows of no group are NaN."""
    random, kind = torch.Generator().manual_seed(seed), TORCH[spec.dtype]
    offsets = torch.tensor([before, *counts]).cumsum(0)
    order = torch.randperm(spec.rows, generator=random)
    made = {}
    for name, rows, width, gather in (("y", spec.of_y, spec.n, spec.gather_y),
                                      ("x", spec.of_x, spec.k, spec.gather_x)):
        values = torch.randint(-3, 4, (rows, width), generator=random).double() if whole else \
            torch.randn((rows, width), generator=random, dtype=torch.float64)
        used = (order // gather if gather else torch.arange(spec.rows))[before:int(offsets[-1])]
        gone = torch.ones(rows, dtype=torch.bool)
        gone[used] = False
        values[gone] = torch.nan
        made[name] = values.to(kind)
    made["offsets"] = offsets.int()
    return made | ({"order": order.int()} if spec.has_order else {})


def answer(spec: GroupedOuterSpec, there: dict[str, torch.Tensor], kind: torch.dtype) -> torch.Tensor:
    """In a dtype, rows from first to last."""
    sums = torch.zeros(spec.groups, spec.n, spec.k, dtype=kind)
    for e, (first, last) in enumerate(pairwise(there["offsets"].tolist())):
        for i in range(first, last):
            slot = int(there["order"][i]) if spec.has_order else i
            y, x = (there[name][slot // gather if gather else i].to(kind) for name, gather in
                    (("y", spec.gather_y), ("x", spec.gather_x)))
            sums[e] += torch.outer(y, x)
    return sums.double()
