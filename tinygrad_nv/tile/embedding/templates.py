"""The templates of rows of a table and of its gradient on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.embedding import plan
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template


@dataclass(frozen=True)
class Embedding(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "embedding"


@dataclass(frozen=True)
class EmbeddingGradient(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "embedding_gradient"


def problems(spec: EmbeddingSpec, arch: str) -> list[str]:
    """Why a table has no kernel; empty when it has one."""
    return [f"rows of {spec.row_bytes} bytes"] * (spec.row_bytes % 2)


EMBEDDING = make_template(EmbeddingSpec, Embedding, problems, "tinygrad_nv.tile.embedding.kernel",
                          "embedding")
GRADIENT = make_template(EmbeddingGradientSpec, EmbeddingGradient, plan.problems,
                 "tinygrad_nv.tile.embedding.gradient", "gradient")
FAMILY = Family("embedding", (EMBEDDING, GRADIENT), determinism_class=OVER_ROWS)
