"""Rows of timing/table.py: float16 times matrices of 4- and 8-bit integers.

They have no peer: of a launch a few CTAs are recorded, and those of Marlin (Frantar et al. 2024) wait in a
loop for CTAs that are not. sass_quant.py has its main loop's instructions beside ours.
"""
from __future__ import annotations

from collections.abc import Iterator

from bench.lib.specs import F16, QTYPES, quant_matmul
from bench.timing.rows import Row
from tinygrad_nv.quant.types import nbytes

FEW = 64           # rows up to which the matrix's bytes bound it
SHAPES = (*((m, 8192, 8192) for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)), (1, 4096, 4096),
          (1, 28672, 4096), (1, 4096, 14336), (16, 4096, 14336))


def rows() -> Iterator[Row]:
    """int4 in groups, then int8."""
    for name, family, shapes in (("int4", "matmul int4", SHAPES),
                                 ("int8", "matmul int8 weights", [(m, 8192, 8192) for m in (1, 16, 1024)])):
        for m, n, k in shapes:
            few, type = m <= FEW, QTYPES[name]
            yield Row(family, f"{m} x {n} x {k}", quant_matmul(type, m, n, k, F16), (),
                      0 if few else 2 * m * n * k, nbytes(type, n, k) + 2 * m * (n + k) if few else 0)
