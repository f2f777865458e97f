"""How `LLM` loads a model: its arguments, with vLLM's names and None replaced by what they stand for."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv.engine.engine_config import EngineConfig


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `LLM`, whose docstring says what they mean. `swap_bytes` are of host memory."""
    dtype: str
    max_model_len: int | None
    progress: Callable[[int, int], None] | None
    stage: Callable[[str], None]
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: str
    page_size: int
    num_pages: int | None
    kv_cache_bytes: int | None
    swap_bytes: int
    enable_prefix_caching: bool
    max_queue: int
    overlap: bool
    speculative: str | None
    quantization: str | None
    tokenizer: Path | None
    lora: dict[str, Any] | None = None      # arguments of adapters (lora/request.py), where there are some
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    generation: tuple[Any, Any] = (None, None)      # source and changes of sampling defaults

    @property
    def ranks(self) -> int:
        """Number of ranks that have a replica of the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.ranks * self.data_parallel_size

    def engine_config(self, length: int, eos: tuple[int, ...], num_speculative_tokens: int) -> EngineConfig:
        """The engine's limits."""
        return EngineConfig(max_seqs=self.max_num_seqs, max_batched_tokens=self.max_num_batched_tokens,
                            max_len=length, queue_limit=self.max_queue, overlap=self.overlap, eos=eos,
                            num_speculative_tokens=num_speculative_tokens,
                            stages=self.pipeline_parallel_size)
