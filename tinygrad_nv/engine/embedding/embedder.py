"""`Embedder`: a loaded embedding model, from texts to vectors.

Protocol: `encode(prompt, most)` gives the token ids of a prompt, with the special tokens of the tokenizer
around them, `encode_pair` those of two texts; `submit(ids)` queues them, and `finish` makes vectors of what
its futures give. `pool` submits and waits for any number of prompts; `embed` does all of it for a list of
prompts, and returns vLLM's outputs.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tinygrad_nv.engine.embedding.batching import EmbeddingEngine
from tinygrad_nv.engine.embedding.outputs import EmbeddingOutput, EmbeddingRequestOutput
from tinygrad_nv.engine.load_options import LoadOptions
from tinygrad_nv.engine.loading import optional_tokenizer, resolve_dtype
from tinygrad_nv.engine.memory_planning import require_weights
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.worker.embedding_runner import EmbeddingRunner, Pair
from tinygrad_nv.errors import ModelError, RequestError, TokenizerError
from tinygrad_nv.models.embedding_model import EmbeddingModel, read_embedding_config, require_fitting
from tinygrad_nv.runtime.memory_pool import UTILIZATION

if TYPE_CHECKING:
    from tinygrad_nv.models.classifier import Classifier
    from tinygrad_nv.models.embedding_model import EmbeddingConfig


class Embedder:
    """The model in `directory`, on `device`. Texts have at most `max_model_len` tokens, by default as many as
    the model takes. `stage(name)` is called at the end of each stage of loading."""

    def __init__(self, directory: Path, config: EmbeddingConfig, device: str, *, dtype: str = "auto",
                 max_model_len: int | None = None, max_num_seqs: int = 64, max_num_batched_tokens: int = 512,
                 max_queue: int = 1024, gpu_memory_utilization: float = UTILIZATION,
                 progress: Callable[[int, int], None] | None = None,
                 stage: Callable[[str], None] = lambda name: None) -> None:
        self.config = config
        self.tokenizer, self.tokenizer_error = optional_tokenizer(directory)
        longest = config.network.max_positions
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise ModelError(f"max_model_len is {max_model_len}", f"1 to {longest}, the model's own length",
                             "change --max-model-len")
        self.length = config.default_tokens if max_model_len is None else max_model_len
        self.dtype = resolve_dtype(dtype, config.network, directory, device)
        require_fitting(config, directory)
        require_weights(device, self.weight_bytes, gpu_memory_utilization)
        self.model = EmbeddingModel(config, self.dtype, device, self.length)
        stage("read files")
        self.model.load(directory, progress)
        stage("load weights")
        self.runner = EmbeddingRunner(self.model, max_num_seqs, max_num_batched_tokens)
        self.engine = EmbeddingEngine(self.runner, max_queue)

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self.config.width

    def close(self) -> None:
        """Cancels what waits. Nothing can be embedded afterwards."""
        self.engine.close()

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises the error of loading it if there is none."""
        if self.tokenizer is None: raise self.tokenizer_error or TokenizerError("no tokenizer")
        return self.tokenizer

    def encode(self, prompt: str | Sequence[int], most: int | None = None) -> list[int]:
        """Token ids of a prompt, cut off after `most` tokens (−1: the context's), special tokens kept. Raises
        `RequestError` for one that has none, or more than the context holds."""
        self._require_truncation(most)
        limit = self.length if most == -1 else most
        if isinstance(prompt, str): ids = self._encode(prompt, limit)
        else:
            ids = list(prompt)[:limit]
            self._require_ids(ids)
        if not ids:
            raise RequestError("the prompt has no tokens", "at least one token", "pass a longer prompt")
        self._require_room(ids)
        return ids

    def _require_ids(self, ids: Sequence[int]) -> None:
        for bad in (min(ids, default=0), max(ids, default=0)):
            if 0 <= bad < self.config.network.vocab_size: continue
            raise RequestError(f"token id {bad} is out of vocabulary",
                               f"0 to {self.config.network.vocab_size - 1}",
                               "use ids of this model's tokenizer")

    def encode_pair(self, first: str, second: str, most: int | None = None) -> Pair:
        """Token ids of two texts, with the special tokens around and between them. The longer text is cut off
        first, if there are more than `most` tokens. Raises `RequestError`."""
        [pair] = self.encode_pairs([first], [second], most)
        return pair

    def encode_pairs(self, firsts: Sequence[str], seconds: Sequence[str], most: int | None = None,
                     step: Callable[[], None] = lambda: None) -> list[Pair]:
        """`encode_pair` of the texts of two lists, each of which is tokenized once. `step` is called before
        each."""
        self._require_truncation(most)
        tokenizer, limit = self.require_tokenizer(), self.length if most == -1 else most
        ids: dict[str, list[int]] = {}
        made: list[Pair] = []
        for one, two in zip(firsts, seconds, strict=True):
            for text in (one, two):
                if text in ids: continue
                step()
                tokenizer.require_fitting(text, self.length, truncated=limit is not None)
                ids[text] = tokenizer.encode(text, special=False)[:limit]
            made.append(Pair(*tokenizer.pair(ids[one], ids[two], limit)))
            self._require_room(made[-1])
        return made

    def _require_truncation(self, most: int | None) -> None:
        if most is None or most == -1 or 1 <= most <= self.length: return
        raise RequestError(f"truncate_prompt_tokens is {most}", f"-1, or 1 to {self.length}",
                           "shorten prompts to what the model reads")

    def _require_room(self, ids: Sequence[int]) -> None:
        if len(ids) > self.length:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {self.length}",
                               f"at most {self.length}", "shorten the prompt, or set truncate_prompt_tokens "
                               "to -1, which cuts it off there")

    def _encode(self, text: str, limit: int | None) -> list[int]:
        tokenizer = self.require_tokenizer()
        if self.config.pooling.lowercase: text = text.lower()
        tokenizer.require_fitting(text, self.length, truncated=limit is not None)
        return tokenizer.encode(text) if limit is None else tokenizer.encode_truncated(text, limit)

    @property
    def classifier(self) -> Classifier | None:
        """The head for classification."""
        return self.config.classifier

    def submit(self, prompts: Sequence[Sequence[int]], every: bool = False) -> list[Future[np.ndarray]]:
        """Queues prompts of token ids, with `every` for the hidden states of each token."""
        return self.engine.submit(prompts, every)

    def finish(self, pooled: Sequence[np.ndarray], normalize: bool | None = None,
               dimensions: int | None = None) -> np.ndarray:
        """Vectors, float32 [n, dimensions], of what the futures of `submit` gave."""
        return self.config.pooling.finish(np.stack(pooled), normalize, dimensions)

    def require_dimensions(self, dimensions: int | None) -> None:
        """Raises `RequestError` for a number of elements that embeddings do not have, and of a model that
        makes none."""
        if self.config.classifier is not None:
            raise RequestError("the model classifies, and makes no embeddings", "an embedding model",
                               "call classify or score")
        if dimensions is not None and not 1 <= dimensions <= self.config.width:
            raise RequestError(f"dimensions is {dimensions}", f"1 to {self.config.width}, the model's",
                               "leave dimensions out")

    def embed(self, prompts: Sequence[str | Sequence[int]], *, truncate_prompt_tokens: int | None = None,
              normalize: bool | None = None, dimensions: int | None = None) -> list[EmbeddingRequestOutput]:
        """The embeddings of prompts, in their order."""
        self.require_dimensions(dimensions)
        ids = [self.encode(prompt, truncate_prompt_tokens) for prompt in prompts]
        if not ids: return []
        vectors = self.finish(self.pool(ids), normalize, dimensions)
        return [EmbeddingRequestOutput(str(at), EmbeddingOutput(vector.tolist()), list(its))
                for at, (vector, its) in enumerate(zip(vectors, ids, strict=True))]

    def pool(self, ids: Sequence[Sequence[int]], every: bool = False) -> list[np.ndarray]:
        """Pooled hidden states of prompts, or with `every` those of each token."""
        step = self.engine.queue_limit      # more than may wait are submitted one part after the other
        made: list[np.ndarray] = []
        for first in range(0, len(ids), step):
            futures = self.engine.submit(ids[first:first + step], every)
            try: wait(futures)
            except BaseException:
                for each in futures: each.cancel()
                raise
            made += [each.result() for each in futures]
        return made

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return self.config.network.parameters * int(self.dtype.itemsize)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles and captures every size of a step."""
        self.runner.warm_up(progress)


def open_embedder(directory: Path, device: str, task: str, options: LoadOptions) -> Embedder | None:
    """The embedding model in `directory`, loaded; None of a model that generates. Raises `ModelError`, and
    `RequestError` for options that embedding models do not have."""
    if (config := read_embedding_config(directory, task)) is None: return None
    o = options
    for name, value in (("speculative", o.speculative), ("quantization", o.quantization),
                        ("tokenizer", o.tokenizer)):
        if value is not None:
            raise RequestError(f"{name} is {str(value)!r}, and the model makes embeddings", "no such option",
                               f"leave {name} out")
    if o.world_size > 1:
        raise RequestError(f"{o.world_size} ranks, and the model makes embeddings", "one rank",
                           "leave tensor_parallel_size, pipeline_parallel_size and data_parallel_size out")
    return Embedder(directory, config, device, dtype=o.dtype, max_model_len=o.max_model_len,
                    max_num_seqs=o.max_num_seqs, max_num_batched_tokens=o.max_num_batched_tokens,
                    max_queue=o.max_queue, gpu_memory_utilization=o.gpu_memory_utilization,
                    progress=o.progress, stage=o.stage)
