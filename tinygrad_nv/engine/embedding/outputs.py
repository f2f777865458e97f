"""Results of models that generate no text, in vLLM's fields. Arrays are NumPy's, where vLLM has torch's."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingOutput:
    """An array: of the text, or a row for each token."""
    data: np.ndarray


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding: as many numbers as the model has dimensions, or as were asked for."""
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """A probability for each label."""
    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How well two texts fit: what a cross-encoder says, or the cosine of two embeddings."""
    score: float


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """The result of one prompt."""
    request_id: str
    outputs: Output
    prompt_token_ids: tuple[int, ...]
    finished: bool = True
    num_cached_tokens: int = 0


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
