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
                     "ec_transfer_config", "weight_transfer_config", "ec_manager_config", "device_ids",
                     "elastic_ep_max_dp_size"),
                    ((None, "127.0.0.1", 29501), "docs/distributed.md says how ranks find each other")),
    **dict.fromkeys(("data_parallel_size_local", "nnodes"),
                    ((None, 1), "docs/distributed.md says how ranks of several hosts are started")),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb",
                     "data_parallel_multi_port_external_lb"),
                    ((False,), "rank 0 gives requests to replicas")),
    **dict.fromkeys(("enable_dbo", "enable_elastic_ep", "enable_fault_tolerance", "enable_ep_weight_filter"),
                    ((False,), "a step is one batch, on all ranks")),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "io_processor_plugin",
                     "logits_processor_pattern"),
                    ((None, "", "auto"), "no code of others runs in the engine")),
    **dict.fromkeys(("hf_config_path", "rope_scaling", "rope_theta", "override_attention_dtype",
                     "model_class_overrides", "quantization_config", "kv_cache_dtype_skip_layers"),
                    ((None, {}, []), "the configuration is the checkpoint's")),
    **dict.fromkeys(("model_weights", "reasoning_parser", "reasoning_parser_plugin", "reasoning_config"),
                    ((None, ""), "a directory has the weights, and the server parses reasoning")),
    **dict.fromkeys(("enable_return_routed_experts", "return_sampling_mask", "enable_trace_replay",
                     "tokens_only"), ((False,), "an output has what docs/vllm.md says")),
    "per_request_spec_decode_metrics": (("none",), "get_metrics and /metrics have those of all requests"),
    **dict.fromkeys(("diffusion_config", "watermark_config", "aux_output_config", "engram_config",
                     "fault_tolerance_config", "default_mm_loras", "model_loader_extra_config",
                     "additional_config", "profiler_config"), ((None, {}), "nothing here reads it")),
    **dict.fromkeys(("max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens",
                     "max_num_scheduled_tokens"), ((None,), "max_num_seqs, max_num_batched_tokens and "
                    "max_queue are the limits")),
    "lora_target_modules": ((None,), "an adapter changes all layers that it has matrices for"),
    **dict.fromkeys(("offload_group_size", "cpu_offload_gb"),
                    ((0, 0.0), "weights stay where they are computed with")),
    **dict.fromkeys(("disable_sliding_window", "kv_sharing_fast_prefill"),
                    ((False,), "layers attend as their checkpoint says")),
    **dict.fromkeys(("kv_offloading_size", "kv_offloading_backend"),
                    ((None, "native"), "swap_space is the host memory for pages")),
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
    "scheduling_policy": (("fcfs", "priority"), "requests run by priority, then in order")}
SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
OF_BACKENDS = frozenset({"backend", "disable_fallback", "disable_additional_properties"})
GENERATION = ("generation_config", "override_generation_config")
NO_EFFECT = frozenset({
    "aggregate_engine_logging", "all2all_backend", "allow_deprecated_quantization",
    "allowed_local_media_path", "allowed_media_domains", "async_scheduling", "attention_backend",
    "attention_config", "calculate_kv_scales", "collect_metrics", "compilation_config",
    "cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds", "cpu_offload_params",
    "cuda_graph_sizes", "cudagraph_capture_sizes", "cudagraph_metrics", "custom_histogram_buckets",
    "data_parallel_backend", "dbo_decode_token_threshold", "dbo_prefill_token_threshold",
    "dcp_comm_backend", "dcp_kv_cache_interleave_size", "dcp_q_replicate", "disable_async_output_proc",
    "disable_cascade_attn", "disable_chunked_mm_input", "disable_custom_all_reduce",
    "disable_hybrid_kv_cache_manager", "disable_log_stats", "disable_mm_preprocessor_cache",
    "disable_nccl_for_dp_synchronization", "distributed_timeout_seconds", "download_dir",
    "dp_sync_interval", "enable_batch_sharded_sampling", "enable_cumem_allocator",
    "enable_flashinfer_autotune", "enable_hc_sp", "enable_layerwise_nvtx_tracing", "enable_log_requests",
    "enable_logging_iteration_details", "enable_mamba_cache_stochastic_rounding",
    "enable_mamba_shared_prefix_checkpoint", "enable_mfu_metrics", "enable_mixed_moe_lora_format",
    "enable_mm_processor_stats", "enable_moe_shared_loras", "enable_multimodal_encoder_data_parallel",
    "enable_nccl_comm_suspend", "enable_shm_tensor_arena", "enable_sleep_mode",
    "enable_tower_connector_lora", "enforce_eager", "eplb_config", "expert_placement_strategy",
    "fail_on_environ_validation", "fully_sharded_loras", "gdn_prefill_backend", "guided_decoding_backend",
    "guided_decoding_disable_additional_properties", "guided_decoding_disable_fallback", "hf_token",
    "ignore_patterns", "interleave_mm_strings", "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose",
    "kda_decode_backend", "kda_prefill_backend", "kernel_config", "kv_cache_metrics",
    "kv_cache_metrics_sample", "language_model_only", "limit_mm_per_prompt", "linear_backend",
    "log_config_file", "log_level", "logging_config", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "lora_extra_vocab_size", "mamba_backend", "mamba_block_size",
    "mamba_cache_dtype", "mamba_cache_mode", "mamba_cache_philox_rounds", "mamba_config",
    "mamba_ssm_cache_dtype", "mamba_ssu_algorithm", "max_cudagraph_capture_size", "max_logprobs",
    "max_long_partial_prefills", "max_lora_cls_labels", "max_num_partial_prefills",
    "max_parallel_loading_workers", "max_seq_len_to_capture", "media_io_kwargs", "mm_device_do_normalize",
    "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path",
    "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_encoder_only",
    "mm_encoder_tp_mode", "mm_hasher_algorithm", "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_processor_device", "mm_processor_kwargs",
    "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "model_impl", "moe_backend",
    "multi_step_stream_outputs", "num_lookahead_slots", "num_redundant_experts", "num_scheduler_steps",
    "numa_bind", "numa_bind_cpus", "numa_bind_nodes", "offload_backend", "offload_num_in_group",
    "offload_params", "offload_prefetch_step", "optimization_level", "performance_mode", "preemption_mode",
    "prefill_schedule_interval", "prefix_cache_retention_interval", "prefix_caching_hash_algo",
    "prefix_match_unit", "pt_load_map_location", "ray_workers_use_nsight", "renderer_num_workers",
    "replayssm_buffer_len", "safetensors_load_strategy", "safetensors_prefetch_block_size",
    "safetensors_prefetch_num_threads", "scheduler_delay_factor", "scheduler_reserve_full_isl",
    "served_model_name", "show_hidden_metrics_for_version", "shutdown_timeout", "skip_mm_profiling",
    "skip_tokenizer_init", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
    "sparse_indexer_topk_backend", "specialize_active_lora", "stream_interval", "swa_bounded_replay",
    "trust_remote_code", "ubatch_size", "use_fp64_gumbel", "use_replayssm", "use_tqdm_on_load",
    "use_v2_block_manager", "video_pruning_method", "video_pruning_rate", "watermark"})


def from_vllm(given: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The arguments of `LLM` that `given` ones stand for; `known` are its own."""
    made: dict[str, Any] = {}
    if any((short := {key: given.get(name) for name, key in SPECULATIVE.items()}).values()):
        made["speculative"] = _speculative(short)
    for name, value in given.items():
        if name in SPECULATIVE: continue
        if name in RENAMED:
            if value is not None: made[RENAMED[name]] = value
        elif name in FIXED: _require_fixed(name, value)
        elif name == "speculative_config": made.setdefault("speculative", _speculative(value))
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


def most_logprobs(value: Any, most: int) -> int:
    """max_logprobs: `most` for None, and for -1, as many as there are. Raises `ConfigError`."""
    if value is None or (type(value) is int and value >= -1): return most if value in (None, -1) else value
    raise ConfigError(f"max_logprobs is {value!r:.200}", f"a whole number from 0 to {most}, or -1",
                      "change max_logprobs")


def require_no_adapter(lora_request: Any) -> None:
    """Raises `ConfigError` for an adapter."""
    if lora_request is not None:
        raise ConfigError(f"lora_request is {lora_request!r}, and embeddings are the base model's",
                          "None", "merge the adapter into the weights")


def _require_fixed(name: str, value: Any) -> None:
    accepted, why = FIXED[name]
    if without_backends(name, value) in accepted: return
    raise ConfigError(f"{name} is {value!r}, and {why}", " or ".join(map(repr, accepted)),
                      f"leave {name} out")


def without_backends(name: str, value: Any) -> Any:
    """The value of an argument; of structured_outputs_config without what says which library enforces it."""
    if name != "structured_outputs_config" or not isinstance(value, dict): return value
    return {key: each for key, each in value.items()
            if key not in OF_BACKENDS and each not in (None, "", False)}


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
    names = [*known, *RENAMED, *FIXED, *NO_EFFECT, *SPECULATIVE, *GENERATION, "speculative_config", "runner"]
    near = get_close_matches(name, names, 1)
    return ConfigError(f"LLM has no argument {name!r}", "those of docs/vllm.md",
                       f"did you mean {near[0]}?" if near else f"leave {name} out")
