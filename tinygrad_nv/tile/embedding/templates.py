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


EMBEDDING = fixed(EmbeddingSpec, Embedding, None, "tinygrad_nv.tile.embedding.kernel", "embedding")
FAMILY = Family("embedding", (EMBEDDING,))
