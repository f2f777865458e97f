"""`PoolingParams` and results of models that generate no text, with vLLM's names. Arrays are NumPy's, where
vLLM has torch's."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tinygrad_nv.errors import RequestError

Output = TypeVar("Output")


@dataclass(frozen=True)
class PoolingParams:
    """`truncate_prompt_tokens`: prompts are cut off after so many tokens (-1: what the context holds). Of
    embeddings: the first `dimensions` elements, with length 1 if `normalize` says so (None: the model). Of
    scores and probabilities: logits instead, if `use_activation` is False (`activation` and `softmax` are its
    older names)."""
    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    softmax: bool | None = None

    @property
    def activate(self) -> bool:
        """Whether probabilities are asked for."""
        return False not in (self.use_activation, self.activation, self.softmax)


def pooling_params(given: PoolingParams | None, truncate_prompt_tokens: int | None = None) -> PoolingParams:
    """The options of a call; its own argument comes first. Raises `RequestError`."""
    given = PoolingParams() if given is None else given
    if not isinstance(given, PoolingParams):
        raise RequestError(f"pooling_params of type {type(given).__name__}", "PoolingParams",
                           "pass PoolingParams(…), the same for all prompts")
    if truncate_prompt_tokens is None: return given
    return PoolingParams(**{**vars(given), "truncate_prompt_tokens": truncate_prompt_tokens})


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
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
