"""Positions found once for each node: values.py, without loading it where there are none."""
from __future__ import annotations

import functools

from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns.positions import AffineForm


@functools.lru_cache(256)
def fit_form(node: UOp) -> AffineForm | None:
    """The affine form of a node made of constants and variables."""
    from tinygrad_nv.patterns.values import form  # numpy takes as long as all of this package
    return form(node)
