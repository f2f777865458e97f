"""The template of rows of a table on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.embedding.spec import EmbeddingSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, fixed


@dataclass(frozen=True)
class Embedding(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "embedding"


def problems(spec: EmbeddingSpec, arch: str) -> list[str]:
    """Why a table has no kernel; empty when it has one."""
    return [f"rows of {spec.row_bytes} bytes"] * (spec.row_bytes % 2)


EMBEDDING = fixed(EmbeddingSpec, Embedding, problems, "tinygrad_nv.tile.embedding.kernel", "embedding")
FAMILY = Family("embedding", (EMBEDDING,))
