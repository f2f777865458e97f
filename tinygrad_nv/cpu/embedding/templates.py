"""The templates of embeddings on a CPU: rows of a table, and the gradient of it."""
from __future__ import annotations

from tinygrad_nv.cpu.embedding import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, EmbeddingSpec
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.template import Family

EMBEDDING = template(EmbeddingSpec, kernel.CPUEmbedding, kernel.default, None, kernel.__name__)
GRADIENT = template(EmbeddingGradientSpec, kernel.CPUEmbeddingGradient, kernel.gradient_default, None,
                    kernel.__name__, "gradient")
FAMILY = Family("embedding", (EMBEDDING, GRADIENT), determinism_class=OVER_ROWS)
