"""The part of `LLM` that computes one result for a prompt: embeddings, hidden states, classes and scores.

Protocol: each method takes prompts, and returns vLLM's outputs in their order (embedding/outputs.py).
Embedding models `embed`, `encode` and `score`, by the cosine of two embeddings. Models for sequence
classification `classify` and `encode`, and `score` pairs of texts if they have a single label: cross-encoders
and rerankers.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tinygrad_nv.engine.embedding.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Output,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    pooling_params,
)
from tinygrad_nv.engine.llm_prompts import PromptMethods
from tinygrad_nv.engine.prompts import Prompt, as_prompts, text_or_tokens
from tinygrad_nv.engine.vllm_arguments import require_no_adapter
from tinygrad_nv.errors import RequestError

if TYPE_CHECKING:
    from tinygrad_nv.engine.embedding.embedder import Embedder
    from tinygrad_nv.models.classifier import Classifier

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


class PoolingMethods(PromptMethods):
    """Methods of `LLM` for models that generate no text."""

    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None,
              normalize: bool | None = None, dimensions: int | None = None, use_tqdm: bool = True,
              pooling_params: PoolingParams | None = None,
              lora_request: None = None) -> list[EmbeddingRequestOutput]:
        """The embeddings of one prompt or of a list of them, in order. Prompts are cut off after
        `truncate_prompt_tokens` tokens (-1: what the context holds); vectors have length 1 if `normalize`
        says so (None: the model), and the first `dimensions` elements. Raises `RequestError`."""
        require_no_adapter(lora_request)
        embedder, own = self._pools(), _params(pooling_params, truncate_prompt_tokens)
        return embedder.embed([*map(text_or_tokens, as_prompts(prompts))],
                              truncate_prompt_tokens=own.truncate_prompt_tokens,
                              normalize=own.normalize if normalize is None else normalize,
                              dimensions=own.dimensions if dimensions is None else dimensions)

    def encode(self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, *,
               truncate_prompt_tokens: int | None = None, use_tqdm: bool = True, lora_request: None = None,
               pooling_task: str | None = None) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Arrays of one prompt or of a list of them: "embed" and "classify" one for each prompt,
        "token_embed" and "token_classify" one with a row for each token. Without a task it is one of the last
        two, whichever the model has."""
        require_no_adapter(lora_request)
        embedder, own = self._pools(), _params(pooling_params, truncate_prompt_tokens)
        classifies = embedder.config.classifier is not None
        task = pooling_task or ("token_classify" if classifies else "token_embed")
        if task not in POOLING_TASKS:
            raise RequestError(f"pooling_task is {pooling_task!r}", f"one of: {', '.join(POOLING_TASKS)}",
                               "change pooling_task")
        head = self._classifier() if task.endswith("classify") else None
        if head is None: embedder.require_dimensions(own.dimensions)
        ids = self._ids(embedder, prompts, own)
        pooled = embedder.pool(ids, task.startswith("token"))
        def finish(x: np.ndarray) -> np.ndarray:
            if head is not None: return head.scores(x, own.activate)
            made = embedder.finish([*np.atleast_2d(x)], own.normalize, own.dimensions)
            return made.reshape(*x.shape[:-1], -1)
        return _outputs([PoolingOutput(finish(each)) for each in pooled], ids)

    def classify(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True,
                 pooling_params: PoolingParams | None = None,
                 lora_request: None = None) -> list[ClassificationRequestOutput]:
        """The probabilities of labels of one prompt or of a list of them."""
        require_no_adapter(lora_request)
        head, embedder, own = self._classifier(), self._pools(), _params(pooling_params)
        ids = self._ids(embedder, prompts, own)
        return _outputs([ClassificationOutput(head.scores(each[None], own.activate)[0].tolist())
                         for each in embedder.pool(ids)], ids)

    def reward(self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None,
               use_tqdm: bool = True, pooling_params: PoolingParams | None = None,
               lora_request: None = None) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The logits of the labels for each token of one prompt or of a list of them."""
        own = _params(pooling_params, truncate_prompt_tokens)
        return self.encode(prompts, PoolingParams(own.truncate_prompt_tokens, use_activation=False),
                           pooling_task="token_classify", lora_request=lora_request)

    def score(self, data_1: str | Sequence[str], data_2: str | Sequence[str], /, *,
              truncate_prompt_tokens: int | None = None, use_tqdm: bool = True,
              pooling_params: PoolingParams | None = None,
              lora_request: None = None) -> list[ScoringRequestOutput]:
        """Scores of pairs of texts: of one text with each of a list, or of two lists' texts one by one."""
        require_no_adapter(lora_request)
        embedder, own = self._pools(), _params(pooling_params, truncate_prompt_tokens)
        firsts, seconds = _pairs(data_1, data_2)
        if (head := embedder.config.classifier) is None:
            one, two = (self.embed(each, normalize=True, pooling_params=own) for each in (firsts, seconds))
            made = [_cosine(a.outputs, b.outputs) for a, b in zip(one, two, strict=True)]
            ids = [a.prompt_token_ids + b.prompt_token_ids for a, b in zip(one, two, strict=True)]
            return _outputs([*map(ScoringOutput, made)], ids)
        if head.labels != 1:
            raise RequestError(f"{self.directory} has {head.labels} labels", "one label for scores",
                               "call classify, or load a reranker")
        pairs = embedder.encode_pairs(firsts, seconds, own.truncate_prompt_tokens)
        return _outputs([ScoringOutput(float(head.scores(each[None], own.activate)[0, 0]))
                         for each in embedder.pool(pairs)], pairs)

    def _pools(self) -> Embedder:
        """The model. Raises `RequestError` for one that generates."""
        if self.embedder is not None: return self.embedder
        raise RequestError(f"{self.directory} was loaded to generate text", "an embedding model",
                           'load it with LLM(directory, task="embed")')

    def _classifier(self) -> Classifier:
        """The head for classification. Raises `RequestError` for a model without one."""
        if (found := self._pools().config.classifier) is not None: return found
        raise RequestError(f"{self.directory} makes embeddings, and has no head for classification",
                           "a model for sequence classification", "call embed, or score")

    def _ids(self, embedder: Embedder, prompts: Prompt | Sequence[Prompt],
             params: PoolingParams) -> list[list[int]]:
        return [embedder.encode(text_or_tokens(each), params.truncate_prompt_tokens)
                for each in as_prompts(prompts)]


_params = pooling_params    # methods have an argument of this name


def _outputs(made: Sequence[Output], ids: Sequence[Sequence[int]]) -> list[PoolingRequestOutput[Output]]:
    return [PoolingRequestOutput(str(at), each, list(its))
            for at, (each, its) in enumerate(zip(made, ids, strict=True))]


def _pairs(first: str | Sequence[str], second: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns as many first texts as second. Raises `RequestError`."""
    one, two = ([each] if isinstance(each, str) else [*each] for each in (first, second))
    if any(not isinstance(text, str) for text in (*one, *two)):
        raise RequestError("score of what is not texts", "texts, or lists of texts", "pass texts")
    if len(one) == 1: one *= len(two)
    if len(one) == len(two) and one: return one, two
    raise RequestError(f"{len(one)} texts to score with {len(two)}", "one with any number, or equally many",
                       "pass as many")


def _cosine(one: EmbeddingOutput, two: EmbeddingOutput) -> float:
    """Returns the cosine of two vectors of length 1."""
    return float(np.dot(one.embedding, two.embedding))
