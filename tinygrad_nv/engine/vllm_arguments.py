"""Arguments of vLLM's `LLM` that are not `LLM`'s own here.

Protocol: `from_vllm(given)` returns the arguments of `LLM` that stand for them. Some have another name here
(`RENAMED`); some can have the values that the engine has, and no other (`FIXED`); some change nothing that
it does (`NO_EFFECT`). Other values, and unknown arguments, are a `ConfigError`.
"""
from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from tinygrad_nv.errors import ConfigError

MOST_WHOLE = 1 << 48         # of numbers of tokens, pages, bytes
MOST_BLOCK = 1 << 16        # limit: tokens of a page of keys and values (--block-size); usual are 8 to 256
RENAMED = {"block_size": "page_size", "num_gpu_blocks_override": "num_pages",
           "kv_cache_memory_bytes": "kv_cache_bytes"}
# accepted values, and what holds instead of others
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "decode_context_parallel_size": ((1,), "a rank has the whole context of its heads"),
    "prefill_context_parallel_size": ((1,), "a rank has the whole context of its heads"),
    "enable_eplb": ((False,), "experts stay on their rank"),
    "kv_transfer_config": ((None,), "an engine keeps its pages"),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank", "data_parallel_address",
                     "data_parallel_rpc_port", "master_addr", "master_port", "kv_events_config",
                     "ec_transfer_config", "weight_transfer_config"),
                    ((None,), "docs/distributed.md says how ranks find each other")),
    **dict.fromkeys(("data_parallel_size_local", "nnodes"),
                    ((None, 1), "docs/distributed.md says how ranks of several hosts are started")),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"),
                    ((False,), "rank 0 gives requests to replicas")),
    **dict.fromkeys(("enable_dbo", "enable_elastic_ep"), ((False,), "a step is one batch, on all ranks")),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "io_processor_plugin",
                     "logits_processor_pattern"), ((None, "auto"), "no code of others runs in the engine")),
    **dict.fromkeys(("hf_config_path", "rope_scaling", "rope_theta", "override_attention_dtype"),
                    ((None, {}), "the configuration is the checkpoint's")),
    **dict.fromkeys(("default_mm_loras", "model_loader_extra_config", "additional_config",
                     "profiler_config"), ((None, {}), "nothing here reads it")),
    **dict.fromkeys(("disable_sliding_window", "kv_sharing_fast_prefill"),
                    ((False,), "layers attend as their checkpoint says")),
    **dict.fromkeys(("kv_offloading_size", "kv_offloading_backend"),
                    ((None,), "swap_space is the host memory for pages")),
    "guided_decoding_disable_any_whitespace": ((False,), "whitespace is as docs/structured.md says"),
    "collect_detailed_traces": ((None,), "a trace is a span of the whole request"),
    "logprobs_mode": (("raw_logprobs",), "log probabilities are of the model's own logits"),
    "node_rank": ((0,), "docs/distributed.md says how ranks of several hosts are started"),
    "enable_mm_embeds": ((False,), "prompts are texts or token ids"),
    "distributed_executor_backend": ((None, "uni", "mp", "external_launcher"), "ranks are processes"),
    "tokenizer_mode": (("auto", "hf", "slow"), "tokenizers are those of the model's directory"),
    "load_format": (("auto", "safetensors", "hf", "gguf"), "weights are safetensors or GGUF files"),
    "config_format": (("auto", "hf"), "configurations are config.json or in a GGUF file"),
    "hf_overrides": ((None, {}), "the configuration is the checkpoint's"),
    "cpu_offload_gb": ((0, 0.0), "weights stay where they are computed with"),
    "enable_prompt_embeds": ((False,), "prompts are texts or token ids"),
    "enable_chunked_prefill": ((None, True), "long prompts are computed in chunks of max_num_batched_tokens"),
    "logits_processors": ((None, []), "logits stay on the device"),
    "revision": ((None, "main"), "a directory has one revision"),
    "tokenizer_revision": ((None, "main"), "a directory has one revision"),
    "code_revision": ((None,), "no code of a checkpoint is run"),
    "convert": (("auto", "none"), "runner and task say what a model does"),
    "pooler_config": ((None,), "a model's files say how it pools"),
    "override_pooler_config": ((None,), "a model's files say how it pools"),
    "structured_outputs_config": ((None, {}), "llguidance enforces structured output"),
    "otlp_traces_endpoint": ((None,), "the server sends traces, and LLM none"),
    "guided_decoding_backend": ((None, "auto", "guidance"), "llguidance enforces structured output"),
    "scheduling_policy": (("fcfs", "priority"), "requests run by priority, then in order")}
GENERATION = ("generation_config", "override_generation_config")
NO_EFFECT = frozenset({
    "trust_remote_code", "enforce_eager", "max_seq_len_to_capture", "disable_custom_all_reduce",
    "disable_log_stats", "compilation_config", "max_parallel_loading_workers", "allowed_local_media_path",
    "limit_mm_per_prompt", "mm_processor_kwargs", "disable_mm_preprocessor_cache", "use_tqdm_on_load",
    "async_scheduling", "max_logprobs", "calculate_kv_scales", "cuda_graph_sizes", "download_dir",
    "show_hidden_metrics_for_version", "collect_metrics", "disable_cascade_attn", "enable_log_requests",
    "hf_token", "served_model_name", "model_impl", "attention_config", "attention_backend", "kernel_config",
    "optimization_level", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_metrics",
    "prefix_caching_hash_algo", "mm_processor_cache_gb", "mm_encoder_tp_mode", "skip_mm_profiling",
    "language_model_only", "allowed_media_domains", "kv_cache_metrics", "aggregate_engine_logging",
    "long_prefill_token_threshold", "max_num_partial_prefills", "max_long_partial_prefills",
    "all2all_backend", "cp_kv_cache_interleave_size", "data_parallel_backend", "dbo_decode_token_threshold",
    "dbo_prefill_token_threshold", "dcp_comm_backend", "dcp_kv_cache_interleave_size",
    "disable_async_output_proc", "disable_chunked_mm_input", "disable_hybrid_kv_cache_manager",
    "disable_nccl_for_dp_synchronization", "enable_layerwise_nvtx_tracing",
    "enable_logging_iteration_details",
    "enable_mfu_metrics", "enable_multimodal_encoder_data_parallel", "eplb_config",
    "expert_placement_strategy", "guided_decoding_disable_additional_properties",
    "guided_decoding_disable_fallback", "ignore_patterns",
    "interleave_mm_strings", "kv_cache_metrics_sample", "mamba_block_size", "mamba_cache_dtype",
    "mamba_cache_mode", "mamba_ssm_cache_dtype", "media_io_kwargs", "mm_encoder_attn_backend",
    "mm_encoder_only", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
    "multi_step_stream_outputs", "num_redundant_experts", "num_scheduler_steps", "pt_load_map_location",
    "ray_workers_use_nsight", "safetensors_load_strategy", "scheduler_delay_factor", "stream_interval",
    "ubatch_size", "video_pruning_rate",
    "use_v2_block_manager", "num_lookahead_slots", "preemption_mode", "skip_tokenizer_init",
    "fully_sharded_loras", "lora_extra_vocab_size", "enable_sleep_mode"})


def from_vllm(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The arguments of `LLM` that `given` ones stand for; `known` are its own."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name in RENAMED:
            if value is not None: made[RENAMED[name]] = value
        elif name in FIXED: _require_fixed(name, value)
        elif name == "speculative_config": made["speculative"] = _speculative(value)
        elif name == "runner": made["task"] = _task(value)
        elif name in GENERATION: made[name] = value
        elif name not in NO_EFFECT: raise _unknown(name, known)
    return made


def whole(name: str, value: Any, default: int, most: int = MOST_WHOLE) -> int:
    """A whole number; the default for None. Raises `ConfigError`."""
    return default if (found := optional_whole(name, value, most)) is None else found


def optional_whole(name: str, value: Any, most: int = MOST_WHOLE) -> int | None:
    """A whole number, or None. Raises `ConfigError`."""
    if value is None or (type(value) is int and 1 <= value <= most): return value
    raise ConfigError(f"{name} is {value!r:.200}", f"a whole number from 1 to {most}", f"change {name}")


def gib(name: str, value: Any) -> float:
    """GiB; none for None. Raises `ConfigError`."""
    if value is None: return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 30: return value
    raise ConfigError(f"{name} is {value!r:.200}", "a number of GiB ≥ 0", f"change {name}")


def flag(name: str, value: Any, default: bool) -> bool:
    """True or False, also 1 or 0; the default for None. Raises `ConfigError`."""
    if value is None: return default
    if isinstance(value, int) and value in (0, 1): return bool(value)
    raise ConfigError(f"{name} is {value!r:.200}", "True or False", f"change {name}")


def require_no_adapter(lora_request: Any) -> None:
    """Raises `ConfigError` for an adapter."""
    if lora_request is not None:
        raise ConfigError(f"lora_request is {lora_request!r}, and embeddings are the base model's",
                          "None", "merge the adapter into the weights")


def _require_fixed(name: str, value: Any) -> None:
    accepted, why = FIXED[name]
    if value in accepted: return
    raise ConfigError(f"{name} is {value!r}, and {why}", " or ".join(map(repr, accepted)),
                      f"leave {name} out")


def _task(runner: Any) -> str:
    found = {"auto": "auto", "generate": "generate", "pooling": "embed"}.get(runner)
    if found is None: raise ConfigError(f"runner is {runner!r}", "auto, generate or pooling", "change runner")
    return found


def _speculative(config: Any) -> str | None:
    """`--speculative` of vLLM's dictionary: prompt lookup, or a draft model."""
    if config is None: return None
    expected = 'a dictionary such as {"method": "ngram", "num_speculative_tokens": 4}, or one with a model'
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config is {config!r}", expected, "change speculative_config")
    given = dict(config)
    tokens, method, model = (given.pop(name, None) for name in ("num_speculative_tokens", "method", "model"))
    for name in ("prompt_lookup_max", "prompt_lookup_min"): given.pop(name, None)
    lookup = model in (None, "ngram", "[ngram]")
    if given or not isinstance(tokens, int) or method not in (None, "ngram", "draft_model") or \
            (method is not None and lookup != (method == "ngram")):
        raise ConfigError(f"speculative_config is {dict(config)}", expected, "change speculative_config")
    return f"ngram:{tokens}" if lookup else f"draft:{model}:{tokens}"


def _unknown(name: str, known: frozenset[str]) -> ConfigError:
    names = [*known, *RENAMED, *FIXED, *NO_EFFECT, *GENERATION, "speculative_config", "runner"]
    near = get_close_matches(name, names, 1)
    return ConfigError(f"LLM has no argument {name!r}", "those of docs/vllm.md",
                       f"did you mean {near[0]}?" if near else f"leave {name} out")
