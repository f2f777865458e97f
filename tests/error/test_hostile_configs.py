"""Values of other types and sizes in a model's JSON files: each is read, or refused in few words."""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.errors import MAX_WORDS, ModelError, NVError, brief
from tinygrad_nv.files import MAX_JSON_DEPTH, parse_json
from tinygrad_nv.models.classifier import score_activation
from tinygrad_nv.models.config import parse_config, read_config
from tinygrad_nv.models.diffusion.config import read_text, read_unet, read_vae
from tinygrad_nv.models.embedding_model import read_embedding_config
from tinygrad_nv.models.encoder_config import parse_encoder_config
from tinygrad_nv.models.peft import read_config as read_adapter
from tinygrad_nv.models.pooling import read_pooling
from tinygrad_nv.models.whisper.config import read_whisper_config
from tinygrad_nv.quant.readers.reader import reader_of
from tinygrad_nv.quant.readers.schemes import cache_of

DEEP: Any = []
for _ in range(150): DEEP = [DEEP]
VALUES = [None, True, -1, 0, 3, 1.5, 1e308, 1e-308, float("nan"), float("inf"), "x", "a" * 300_000,
          "\ud800", [], {}, [[]], [{}], [1] * 10_000, {"a": []}, {"a": {"a": 1}},
          2**31, 2**200, int("9" * 4000), DEEP]
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 128, "hidden_act": "silu", "dtype": "float32",
         "eos_token_id": [1], "head_dim": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
         "model_type": "x",
         "sliding_window": 8, "layer_types": None, "tie_word_embeddings": True, "is_causal": True,
         "use_sliding_window": True, "max_window_layers": 1, "quantization_config": None, "rope_theta": 1e4}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": None, "original_max_position_embeddings": 64, "truncate": True, "type": None}
BY_TYPE = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 48}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {"rope_scaling": {**YARN, "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}},
    "DeepseekV3": {**MIXTURE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
                   r"num_nextn_predict_layers": 1, "num_mtp_layers": 0, "first_k_dense_replace": 1,
                   "rope_scaling": YARN, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                   "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    "DeepseekV2": {**MIXTURE, "rope_parameters": YARN, "topk_method": "greedy", "n_routed_experts": 8},
    "Gemma3": {"rope_parameters": BY_TYPE, "rope_scaling": None, "sliding_window_pattern": 6,
               "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "rope_local_base_freq": 1e4},
    "Phi3": {"rope_scaling": LONG}, "Qwen2": {}, "Olmo3": {"rope_scaling": None, "rope_parameters": BY_TYPE},
    "Qwen2Moe": {**MIXTURE, "num_experts": 4, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    "Llama4": {**MIXTURE, "num_local_experts": 4, "moe_layers": [0], "no_rope_layers": [1, 0],
               "attention_chunk_size": 16, "floor_scale": 12, "attn_scale": 0.1},
    "GptOss": {**MIXTURE, "num_local_experts": 4, "swiglu_limit": 7.0, "rope_scaling": None},
    "SmolLM3": {"no_rope_layers": [1, 0], "rope_scaling": None},
    "OlmoHybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
                   "linear_value_head_dim": None, "linear_conv_kernel_dim": 4, "layer_types": None,
                   "linear_allow_neg_eigval": True, "rope_parameters": {"rope_theta": None},
                   "rope_scaling": None},
    "KimiLinear": {**MIXTURE, "layer_types": None, "mlp_layer_types": None, "linear_attn_config": {
                       "full_attn_layers": [1], "kda_layers": [2], "head_dim": 6, "num_heads": 3},
                   "num_experts": 4, "moe_renormalize": True, "num_shared_experts": 1},
    "BailingHybrid": {**MIXTURE, "mlp_layer_types": ["dense", "sparse"], "layer_group_size": 2,
                      "num_experts": 8, "kda_lower_bound": -5.0, "kda_safe_gate": True,
                      "rope_scaling": None, "n_group": 2, "topk_group": 1},
    "MiniMax": {**MIXTURE, "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"],
                "rotary_dim": None, "mlp_alpha_factor": 1.5, "rope_scaling": None},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 4.0, "attention_multiplier": 0.1}}
ENCODER = {**SIZES, "hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 1,
           "position_embedding_type": "absolute", "rope_scaling": None, "rope_parameters": None,
           "local_attention": 8, "global_attn_every_n_layers": 3, "hidden_activation": "gelu"}
del ENCODER["sliding_window"], ENCODER["quantization_config"]
ENCODERS = ("BertModel", "RobertaModel", "DistilBertModel", "MPNetModel", "NomicBertModel", "GteModel",
            "ModernBertModel", "JinaEmbeddingsV3Model")
SCHEME = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
          "actorder": None, "dynamic": False, "block_structure": [16, 16]}
GROUPS = {"a": {"targets": ["Linear"], "weights": SCHEME, "input_activations": SCHEME, "format": None}}
QUANTISED: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"format": "pack-quantized", "ignore": ["lm_head"], "config_groups": GROUPS,
                           "kv_cache_scheme": {**SCHEME, "num_bits": 8, "strategy": "tensor"},
                           "sparsity_config": {"format": "dense"}, "transform_config": {"config_groups": {}}},
    "gptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "dynamic": {"+:x": {"bits": 8}},
             "checkpoint_format": "gptq"},
    "awq": {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [16, 16]}, "mxfp4": {},
    "modelopt": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}},
                 "kv_cache_quant_algo": "FP8", "quantization": {}},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False}, "fbgemm_fp8": {},
    "torchao": {"quant_type": {"default": {"mapping_type": {"_data": "ASYMMETRIC"}}}},
    "gguf": {"types": {"a.weight": 2}, "heads": {"q_proj": 4}}}


def replace_at(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The data with another value at a path."""
    if not path: return value
    made = data.copy()
    made[path[0]] = replace_at(data[path[0]], path[1:], value)
    return made


def paths(data: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys of objects and lists, and those inside."""
    keys = data if isinstance(data, dict) else range(min(len(data), 1)) if isinstance(data, list) else ()
    return [path for key in keys for path in [(*at, key), *paths(data[key], (*at, key))]]


def sweep(data: dict[str, Any], read: Callable[[Any], Any]) -> None:
    """Reads the data, and with every value at every key: an `NVError` is short, and there is no other."""
    read(data)
    wrong = []
    for path in paths(data):
        for value in VALUES:
            try: read(replace_at(data, path, value))
            except NVError as error:
                longest = max(map(len, (error.found, error.expected, error.fix)))
                if longest > 1500: wrong.append((path, brief(value), longest))
            except Exception as error: wrong.append((path, brief(value), repr(error)[:200]))
    assert not wrong


def test_decoders() -> None:
    for name, fields in DECODERS.items():
        sweep({"architectures": [f"{name}ForCausalLM"], **SIZES, **fields}, lambda data: parse_config(data))
    text = {**SIZES, "model_type": "llama"}
    sweep({"architectures": ["LlavaForConditionalGeneration"], "text_config": text},
          lambda data: parse_config(data))


def test_encoders() -> None:
    for name in ENCODERS:
        sweep(ENCODER, partial(parse_encoder_config, architecture=name, name="config.json"))


def test_schemes_of_quantised_weights() -> None:
    def read(data: Any) -> None:
        config = parse_config({"architectures": ["LlamaForCausalLM"], **SIZES, "quantization_config": data})
        if (found := config.quantization) is None: return
        reader_of(found, "config.json").matrix("b", (64, 64), {"b.weight": ("F32", (64, 64))})
        cache_of(found, "config.json")
    for method, fields in QUANTISED.items(): sweep({"quant_method": method, **fields}, read)


def test_files(tmp_path: Path) -> None:
    def reads(file: str, read: Callable[[Path], Any]) -> Callable[[Any], Any]:
        def written(data: Any) -> None:
            (tmp_path / file).write_text(json.dumps(data))
            read(tmp_path)
        return written
    blocks = {"block_out_channels": [32, 64], "layers_per_block": 1, "norm_num_groups": 8, "act_fn": "silu"}
    sweep({**blocks, "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2,
           "attention_head_dim": 8, "transformer_layers_per_block": 1, "freq_shift": 0,
           "downsample_padding": 1},
          reads("config.json", read_unet))
    sweep({**blocks, "down_block_types": ["DownEncoderBlock2D"], "scaling_factor": 0.2},
          reads("config.json", read_vae))
    sweep({"architectures": ["CLIPTextModel"], "hidden_act": "gelu"}, reads("config.json", read_text))
    sweep({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384,
           "activation_function": "gelu", "decoder_start_token_id": 1},
          reads("config.json", read_whisper_config))
    sweep({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 8}, "bias": "none",
           "alpha_pattern": {"q_proj": 4}, "target_modules": ["q_proj"]},
          reads("adapter_config.json", read_adapter))
    (tmp_path / "modules.json").write_text(json.dumps(
        [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]))
    (tmp_path / "1_Pooling").mkdir()
    sweep({"pooling_mode_mean_tokens": True, "pooling_mode": None, "include_prompt": True},
          reads("1_Pooling/config.json", read_pooling))
    sweep({"max_seq_length": 12}, reads("sentence_bert_config.json", read_pooling))
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "Dense", "path": "a"}] * 33))
    with pytest.raises(ModelError, match="at most 32 modules"): read_pooling(tmp_path)


@pytest.mark.parametrize(("family", "change", "words"), [
    ("DeepseekV3", {"rope_scaling": {**YARN, "mscale_all_dim": 1e308}},
     r"mscale_all_dim is 1e\+308\n.* to 1e\+18"),
    ("Phi3", {"rope_scaling": {**LONG, "partial_rotary_factor": 1e308}}, r"partial_rotary_factor is 1e\+308"),
    ("Phi3", {"rope_scaling": {**LONG, "original_max_position_embeddings": 1}},
     "is 1 with rope type longrope"),
    ("Gemma3", {"rope_scaling": [1]}, r"rope_scaling is \[1\]\n  expected: an object"),
    ("Qwen2Moe", {"max_window_layers": "x"}, "max_window_layers is 'x'\n  expected: a number of layers"),
    ("DeepseekV3", {"num_nextn_predict_layers": 10**9},
     r"num_nextn_predict_layers is 10{9}\n.*at most 2,048"),
    ("Llama", {"rope_theta": 1e-300, "rope_scaling": None}, "rope_theta is 1e-300")])
def test_values_are_named(family: str, change: dict[str, Any], words: str) -> None:
    data = {"architectures": [f"{family}ForCausalLM"], **SIZES, **DECODERS[family], **change}
    with pytest.raises(ModelError, match=words): parse_config(data)


def test_values_that_are_not_used() -> None:
    """Published files have them: layers of windows that no layer has."""
    for family in ("Qwen2", "Qwen2Moe"):
        data = {"architectures": [f"{family}ForCausalLM"], **SIZES, **DECODERS[family],
                "use_sliding_window": False}
        plain = parse_config(data)
        for value in (None, 28, 28.0): assert parse_config({**data, "max_window_layers": value}) == plain
    assert parse_config({**data, "mlp_only_layers": None}) == parse_config({**data, "mlp_only_layers": []})


def test_architectures_that_are_no_names(tmp_path: Path) -> None:
    for listed in ([[]], [{}], [["BertModel"]]):
        (tmp_path / "config.json").write_text(json.dumps({**ENCODER, "architectures": listed}))
        with pytest.raises(ModelError, match=r"architecture .* is not supported"): read_config(tmp_path)
        assert read_embedding_config(tmp_path) is None
    with pytest.raises(ModelError, match=r"hidden_act \[\] is not supported"):
        parse_encoder_config({**ENCODER, "hidden_act": []}, "BertModel", "config.json")
    assert score_activation({"problem_type": []}, 1) == "sigmoid"


def test_words_are_cut() -> None:
    error = ModelError("a" * 9000 + "end", "b" * 10**6, "\ud800" * 9000)
    assert all(len(part) <= MAX_WORDS for part in (error.found, error.expected, error.fix))
    assert error.found == "a" * (MAX_WORDS // 2 - 2) + " … " + "a" * (MAX_WORDS // 2 - 5) + "end"
    assert error.fix.startswith(r"\ud800\ud800")
    assert ModelError("a" * MAX_WORDS).found == "a" * MAX_WORDS
    assert brief("x" * 300) == "'" + "x" * 199 + "…"
    assert brief([10**5000]) == "a list that is too large to be shown"


def test_levels_of_json() -> None:
    assert parse_json("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)
    for text in ("[" * (MAX_JSON_DEPTH + 1) + "]" * (MAX_JSON_DEPTH + 1),
                 '{"a":' * (MAX_JSON_DEPTH + 1) + "1" + "}" * (MAX_JSON_DEPTH + 1)):
        with pytest.raises(ValueError, match="more than 200 objects and lists"): parse_json(text)
