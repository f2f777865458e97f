"""Arguments of `LLM` that a command line states, whichever command it is."""
from __future__ import annotations

import argparse
from typing import Any

# of the model; the engine's are those of commands that run many sequences
MODEL = ("dtype", "max_model_len", "quantization", "tensor_parallel_size", "pipeline_parallel_size",
         "data_parallel_size", "enable_expert_parallel", "weights", "gpu_memory_utilization")
ENGINE = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype", "swap_space", "speculative",
          "enable_prefix_caching", "task")


def llm_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns what a command line sets; what it leaves out is `LLM`'s default."""
    asked = {name: value for name in (*MODEL, *ENGINE)
             if (value := getattr(arguments, name, None)) is not None}
    return {**asked, "required_key": arguments.require_signed, **getattr(arguments, "vllm", {})}
