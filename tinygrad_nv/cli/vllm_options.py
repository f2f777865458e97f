"""Options of vLLM's command line that a command here has no use of its own for.

Protocol: `add_options(parser)` makes all of them known. Those that are arguments of vLLM's `LLM` are passed
to this package's, which takes or refuses their values (engine/vllm_arguments.py); `FIXED` and `NO_EFFECT`
are those of the server alone, with the same meaning. `normal` spells options as they are declared.
"""
from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from tinygrad_nv.engine import vllm_arguments as engine

# accepted values, and what holds instead of others
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "api_server_count": ((1,), "one process answers requests"),
    "enable_ssl_refresh": ((False,), "certificates are read at the start"),
    "exclude_tools_when_tool_choice_none": ((True,), "templates get no tools then"),
    "headless": ((False,), "one process computes and answers"),
    "log_config_file": ((None,), "logs go to stderr, one event a line"),
    "default_chat_template_kwargs": ((None, {}), "chat_template_kwargs of a request are variables"),
    "grpc": ((False,), "HTTP is served"),
    "tokens_only": ((False,), "texts are served"),
    "middleware": ((), "no code of others runs in the server"),
    "reasoning_parser_plugin": ((), "no code of others runs in the server"),
    "response_role": (("assistant",), "answers are the assistant's"),
    "ssl_ciphers": ((None, "TLSv1"), "the ciphers are those of Python's ssl module"),
    "tool_parser_plugin": ((), "no code of others runs in the server"),
    "tool_server": ((), "tools run at the client")}
NO_EFFECT = frozenset({
    "disable_access_log_for_endpoints", "disable_fastapi_docs", "disable_frontend_multiprocessing",
    "disable_log_requests", "disable_uvicorn_access_log", "enable_log_deltas", "enable_log_outputs",
    "enable_request_id_headers", "enable_server_load_tracking",
    "h11_max_header_count", "h11_max_incomplete_event_size", "log_error_stack", "max_log_len"})
# of those without effect, options that take no value; with a prefix no-, too
FLAGS = frozenset({
    "aggregate_engine_logging", "allow_deprecated_quantization", "async_scheduling",
    "calculate_kv_scales", "cudagraph_metrics", "disable_async_output_proc", "disable_cascade_attn",
    "disable_chunked_mm_input", "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
    "disable_log_stats", "disable_mm_preprocessor_cache", "disable_nccl_for_dp_synchronization",
    "enable_batch_sharded_sampling", "enable_cumem_allocator", "enable_flashinfer_autotune",
    "enable_hc_sp", "enable_layerwise_nvtx_tracing", "enable_log_requests",
    "enable_logging_iteration_details", "enable_mamba_cache_stochastic_rounding",
    "enable_mamba_shared_prefix_checkpoint", "enable_mfu_metrics", "enable_mixed_moe_lora_format",
    "enable_mm_processor_stats", "enable_moe_shared_loras", "enable_multimodal_encoder_data_parallel",
    "enable_nccl_comm_suspend", "enable_shm_tensor_arena", "enable_sleep_mode",
    "enable_tower_connector_lora", "enforce_eager", "fail_on_environ_validation", "fully_sharded_loras",
    "guided_decoding_disable_additional_properties", "guided_decoding_disable_fallback",
    "interleave_mm_strings", "jit_monitor_verbose", "kv_cache_metrics", "language_model_only",
    "long_prefill_token_threshold_adaptive", "mm_device_do_normalize", "mm_encoder_only",
    "multi_step_stream_outputs", "numa_bind", "ray_workers_use_nsight", "scheduler_reserve_full_isl",
    "skip_mm_profiling", "skip_tokenizer_init", "sleep_mode_offload_cudagraph", "specialize_active_lora",
    "swa_bounded_replay", "trust_remote_code", "use_fp64_gumbel", "use_replayssm", "use_tqdm_on_load",
    "use_v2_block_manager"}) | {
    name for name in NO_EFFECT if name.startswith(("disable_", "enable_", "log_error"))} - {
        "disable_access_log_for_endpoints"}
OWN = ("speculative_config", "runner", "tokenizer", *engine.GENERATION)     # of LLM, each with a meaning
SPELLED = ("serve", "run-batch", "generate", "chat", "bench", "train")  # with names of vLLM or TRL
NEAR = 0.6  # how similar an option must be to be suggested


def add_options(parser: argparse.ArgumentParser, server: bool = False) -> None:
    """Adds each option of the engine, and with `server` of the server, that `parser` does not have."""
    fixed = engine.FIXED | (FIXED if server else {})
    names = {*fixed, *(NO_EFFECT if server else ()), *engine.NO_EFFECT, *engine.RENAMED, *OWN}
    for name in sorted(names):
        option = "--" + name.replace("_", "-")
        if option in parser._option_string_actions: continue
        flag = name in FLAGS or any(isinstance(each, bool) for each in fixed.get(name, ((),))[0])
        action = _Flag if flag else _Value
        options = [option, "--no-" + option[2:]] if flag else [option]
        parser.add_argument(*options, dest=name, action=action, default=argparse.SUPPRESS,
                            help=argparse.SUPPRESS)
    parser.set_defaults(vllm={})


def add_generation_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options that say where sampling defaults come from."""
    for option, metavar, words in (
            ("--generation-config", "auto|vllm|DIR", "sampling defaults: those of the model's "
             "generation_config.json (auto, the default), none (vllm), or of a directory with another"),
            ("--override-generation-config", "JSON", 'fields of it, such as {"temperature": 0.5}')):
        group.add_argument(option, action=_Value, default=argparse.SUPPRESS, metavar=metavar, help=words)


class _Value(argparse.Action):
    """An option with a value: JSON, else a text."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        _take(parser, namespace, self.dest, _parse_value(values))


class _Flag(argparse.Action):
    """An option without one."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **more)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: str | None = None) -> None:
        _take(parser, namespace, self.dest, not str(option_string).startswith("--no-"))


def _take(parser: argparse.ArgumentParser, namespace: argparse.Namespace, name: str, value: Any) -> None:
    option = "--" + name.replace("_", "-")
    if (known := (FIXED | engine.FIXED).get(name)) is not None:
        accepted, why = known
        if engine.without_backends(name, value) not in accepted:
            shown = " or ".join(json.dumps(each) for each in accepted if each is not None)
            parser.error(f"{option} is {json.dumps(value)}, and {why}; "
                         + (f"expected: {shown}" if shown else "to fix: leave it out"))
    elif name not in NO_EFFECT | engine.NO_EFFECT: namespace.vllm = {**namespace.vllm, name: value}


def normal(argv: Sequence[str]) -> list[str]:
    """Command-line words with options spelled as they are declared: vLLM and TRL take `_` for `-`, and vLLM
    `--name.key value` for `--name '{"key": value}'`."""
    if not {*argv[:1]} & {*SPELLED}: return list(argv)
    made, folded, words = list[str](), dict[str, dict[str, Any]](), deque(argv)
    while words and words[0] != "--":
        name, equals, value = (word := words.popleft()).partition("=")
        option, dot, keys = name.replace("_", "-").partition(".")
        if not name.startswith("--"): made.append(word)
        elif not dot: made.append(option + equals + value)
        else:
            if not equals: value = words.popleft() if words and not words[0].startswith("--") else "true"
            _put(folded.setdefault(option, {}), keys.replace("-", "_").split("."), _parse_value(value))
    for option, each in folded.items(): made += [option, json.dumps(each)]
    return [*made, *words]


def _put(into: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = into.get(key)
        into[key] = into = inner if isinstance(inner, dict) else {}
    into[keys[-1]] = value


def _parse_value(text: str) -> Any:
    """JSON, else the text itself."""
    try: return json.loads(text)
    except (ValueError, RecursionError): return text


def nearest(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """A suggestion for the first unknown option among `words`, "" if no option is near."""
    unknown = next((word.partition("=")[0] for word in words if word.startswith("--")), "")
    found = get_close_matches(unknown, [*parser._option_string_actions], 1, NEAR)
    return f"; did you mean {found[0]}?" if found else ""
