"""The templates of rows of a table and of its gradient on a GPU.

`GradientPlan` has the extents and the workspace of a gradient: u32 words, then float32. `offsets` [V + 1] and
`order` [T]: row v has the tokens order[offsets[v]:offsets[v + 1]], in rising order. `partials` [T / SEGMENT,
H]: sums of SEGMENT tokens of one row each, in the place of the SEGMENT-th part of `order` in which they
begin.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from tinygrad_nv.tile.embedding.program import PROGRAMS, gradient_problems
from tinygrad_nv.tile.embedding.spec import SEGMENT, EmbeddingGradientSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import make_family
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template

VECTOR_BYTES = 16
CTAS = 132          # that sort: an SM of an H100 each. All read all tokens, more of them have more work
MOST_ROWS = 512     # of a tile, where more CTAs sort: a thread has a row at the end


@dataclass(frozen=True)
class GradientPlan:
    """Plan of a spec."""
    spec: EmbeddingGradientSpec

    @staticmethod
    @lru_cache(256)
    def of(spec: EmbeddingGradientSpec) -> GradientPlan:
        """The plan."""
        return GradientPlan(spec)

    # **** the sort ****

    @property
    def tile(self) -> int:
        """Rows whose tokens a CTA sorts."""
        return min(MOST_ROWS, -(-self.spec.rows // (32 * CTAS)) * 32)

    @property
    def tiles(self) -> int:
        return -(-self.spec.rows // self.tile)

    # **** the sums ****

    @property
    def vector(self) -> int:
        """Columns of a thread, side by side."""
        found = VECTOR_BYTES // self.spec.dtype.itemsize
        while self.spec.width % found: found //= 2
        return found

    @property
    def slices(self) -> int:
        """Parts of a row, one of each warp."""
        return -(-self.spec.width // (32 * self.vector))

    @property
    def segments(self) -> int:
        """Parts of `order`; the tokens after the last whole one are no segment."""
        return self.spec.tokens.count // SEGMENT

    # **** the workspace ****

    @property
    def order_at(self) -> int:
        """The word where `order` begins."""
        return self.spec.rows + 1

    @property
    def partials_at(self) -> int:
        """The word where `partials` begin: at a multiple of 16 bytes."""
        return -(-(self.order_at + self.spec.tokens.count) // 4) * 4

    @property
    def words(self) -> int:
        """Words of the workspace."""
        return self.partials_at + self.segments * self.spec.width

    def sort_tokens(self, storage: np.ndarray) -> np.ndarray:
        """`offsets` and `order` of the tokens of a storage, as the first kernel leaves them."""
        lies = self.spec.tokens
        strides = [stride * storage.itemsize for stride in lies.strides]
        tokens = np.lib.stride_tricks.as_strided(storage[lies.offset:], lies.extents, strides).reshape(-1)
        rows = np.where(tokens < 0, tokens + self.spec.rows, tokens)
        known = np.flatnonzero((rows >= 0) & (rows < self.spec.rows))
        order = known[np.argsort(rows[known], kind="stable")]
        offsets = np.searchsorted(rows[order], np.arange(self.spec.rows + 1))
        return np.concatenate([offsets, order]).astype(np.uint32)


@dataclass(frozen=True)
class EmbeddingGradient(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "embedding_gradient"


GRADIENT = make_template(EmbeddingGradientSpec, EmbeddingGradient, gradient_problems,
                 "tinygrad_nv.tile.embedding.gradient", "gradient")
FAMILY = Family("embedding", (*make_family("embedding", PROGRAMS, OVER_ROWS).templates, GRADIENT),
                determinism_class=OVER_ROWS)
