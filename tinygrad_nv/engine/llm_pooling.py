"""The part of `LLM` that computes one result for a prompt: `embed`.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.engine.llm_prompts import PromptMethods
from tinygrad_nv.engine.outputs import EmbeddingRequestOutput
from tinygrad_nv.engine.prompts import Prompt, as_prompts, text_or_tokens
from tinygrad_nv.engine.vllm_arguments import require_no_adapter
from tinygrad_nv.errors import RequestError


class PoolingMethods(PromptMethods):
    """How `LLM` embeds."""

    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate_prompt_tokens: int | None = None,
              normalize: bool | None = None, dimensions: int | None = None, use_tqdm: bool = True,
              lora_request: None = None) -> list[EmbeddingRequestOutput]:
        """The embeddings of one prompt or of a list of them, in order. Prompts are cut off after
        `truncate_prompt_tokens` tokens (-1: what the context holds); vectors have length 1 if `normalize`
        says so (None: the model), and the first `dimensions` elements. Raises `RequestError`."""
        require_no_adapter(lora_request)
        if self.embedder is None:
            raise RequestError(f"{self.directory} was loaded to generate text", "an embedding model",
                               'load it with LLM(directory, task="embed")')
        return self.embedder.embed([*map(text_or_tokens, as_prompts(prompts))],
                                   truncate_prompt_tokens=truncate_prompt_tokens,
                                   normalize=normalize, dimensions=dimensions)
