"""config.json or generation_config.json asks for what is not implemented, or for nonsense: refused with the
field."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv.engine.loading import context_length
from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.encoder_config import parse_encoder_config
from tinygrad_nv.models.families import FAMILIES

HAVE = ", ".join(FAMILIES)
ROPES = "expected: one of: default, linear, dynamic, llama3, yarn"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NUMBER = "expected: a number > 0"
INTEGER = "expected: a positive integer"


def rope(**fields):
    return {"rope_parameters": {"rope_theta": 10000.0, **fields}}


@pytest.mark.parametrize("listed", [..., None, [], "LlamaForCausalLM"])
def test_no_architectures(command, spoil, listed):
    directory = spoil(architectures=listed, **({"model_type": "x"} if listed is ... or not listed else {}))
    command("generate", directory, "hello").refused(
        "config.json names no architectures", f"expected: a list with one of: {HAVE}",
        "to fix:   use a causal language model saved by transformers")


@pytest.mark.parametrize("listed", [..., None, []])
def test_a_model_type_names_the_architecture(command, spoil, listed):
    directory = spoil(architectures=listed)
    command("generate", directory, "hello", "--max-tokens", 1).succeeded()


@pytest.mark.parametrize("listed", [["T5ForConditionalGeneration"], [["LlamaForCausalLM"]], [None]])
def test_an_architecture_we_lack_lists_those_we_have(command, spoil, listed):
    command("generate", spoil(architectures=listed), "hello").refused(
        f"config.json: architecture {listed[0]} is not supported", f"expected: one of: {HAVE}",
        "to fix:   convert the model to one of these")


@pytest.mark.parametrize(("quantised", "found", "expected"), [
    ({"bits": 4}, "quant_method is None", "one of awq, gptq, compressed-tensors"),
    ({"quant_method": "hqq"}, "quant_method is 'hqq'", "one of awq, gptq, compressed-tensors"),
    ("gptq", "quantization_config is 'gptq'", "an object with a quant_method")])
def test_quantised_weights_of_no_known_kind(command, spoil, quantised, found: str, expected: str):
    command("generate", spoil(quantization_config=quantised), "hello").refused(
        f"config.json: {found}", f"expected: {expected}")


def test_weights_that_are_not_quantised_as_asked(command, spoil):
    directory = spoil()
    command("generate", directory, "hello", "--quantization", "awq_marlin").refused(
        f"quantization is 'awq_marlin', and the weights in {directory} are not quantised",
        "expected: what the checkpoint's quantization_config says", "one of fp8, fp8_per_channel",
        "to fix:   leave --quantization out")


ROPE_CASES = [
    (rope(rope_type="ntk"), "rope type 'ntk' is not supported", ROPES),
    (rope(rope_type="longrope", short_factor=[1.0]), "short_factor of the rope parameters has 1 factors",
     "one for each pair of dimensions"),
    ({"rope_parameters": None, "rope_scaling": {"type": "su"}}, "rope type 'su' is not supported", ROPES),
    (rope(rope_type=["yarn"]), "rope type ['yarn'] is not supported", ROPES),
    ({"rope_parameters": [1]}, "rope parameters are [1]", "expected: an object"),
    (rope(rope_type="linear"), "rope type linear lacks factor", "expected: factor"),
    (rope(rope_type="llama3", factor=8.0), "lacks low_freq_factor, high_freq_factor", "low_freq_factor"),
    (rope(**{**LLAMA3, "low_freq_factor": 4.0}), "factor 4 is not below high_freq_factor 4", "rotations"),
    (rope(rope_type="linear", factor=0), "factor is 0", NUMBER),
    (rope(rope_type="linear", factor="two"), "factor is 'two'", NUMBER),
    (rope(rope_type="yarn", factor=2.0, beta_fast=0), "beta_fast is 0", NUMBER),
    (rope(rope_type="yarn", factor=2.0, original_max_position_embeddings="x"), "embeddings is 'x'", INTEGER),
    (rope(rope_theta="x"), "rope_theta is 'x'", "expected: a number > 1"),
    (rope(rope_theta=-1.0), "rope_theta is -1.0", "expected: a number > 1"),
    (rope(rope_theta=float("inf")), "rope_theta is inf", "expected: a number > 1"),
    (rope(rope_type="dynamic"), "rope type dynamic lacks factor", "expected: factor"),
    (rope(rope_type="linear", factor=2.0, partial_rotary_factor="x"), "partial_rotary_factor is 'x'", NUMBER),
    (rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
     "partial_rotary_factor is 0.5 with rope type linear", "expected: 1: this family rotates whole heads"),
    ({"rope_scaling": {"type": "su"}, **rope()}, "rope type 'su' is not supported", ROPES),
]


@pytest.mark.parametrize(("fields", "found", "expected"), ROPE_CASES, ids=[case[1] for case in ROPE_CASES])
def test_rope_that_is_not_supported(command, spoil, fields, found: str, expected: str):
    command("generate", spoil(**fields), "hello").refused("config.json: ", found, expected)


MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
FIELD_CASES = [
    ({"hidden_size": ...}, "hidden_size is None", INTEGER),
    ({"hidden_size": 66, "head_dim": None}, "size 66 is not a multiple of num_attention_heads 4", "head_dim"),
    ({"head_dim": "16"}, "head_dim is '16'", INTEGER),
    ({"head_dim": 1}, "head_dim is 1", "expected: an even number: rope rotates pairs"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0", INTEGER),
    ({"num_hidden_layers": True}, "num_hidden_layers is True", INTEGER),
    ({"vocab_size": 300.0}, "vocab_size is 300.0", INTEGER),
    ({"num_key_value_heads": 3}, "heads 4 is not a multiple of num_key_value_heads 3", "each key/value head"),
    ({"rms_norm_eps": None}, "rms_norm_eps is None", NUMBER),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan", NUMBER),
    ({"rms_norm_eps": 10 ** 400}, "rms_norm_eps is 1000", NUMBER),
    ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported", "expected: one of: silu, swish, gelu"),
    ({"hidden_act": {}}, "hidden_act {} is not supported", "expected: one of: silu"),
    ({"dtype": "int8"}, "dtype 'int8' is not supported", "expected: one of: float32, float16, bfloat16"),
    ({"sliding_window": "x"}, "sliding_window is 'x'", INTEGER),
    ({"sliding_window": True}, "sliding_window is True", INTEGER),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 4 experts", "as many, at most"),
    ({**MIXTRAL, "num_experts": 8}, "num_local_experts is 4, num_experts is 8", "one number of experts"),
    ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0, which is not implemented",
     "a model without it"),
    ({**QWEN, "layer_types": 3}, "layer_types is 3", "expected: a list of 2"),
    ({**QWEN, "layer_types": ["full_attention"]}, "layer_types is ['full_", "expected: a list of 2"),
    ({**QWEN, "layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'",
     "expected: full_attention or sliding_attention"),
    ({**QWEN, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
     "layer_types has sliding_attention, but no sliding_window is in use", "use_sliding_window: true"),
    ({"is_causal": False}, "is_causal is False, which is not implemented", "expected: a model without it"),
    ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config is {'1'", "a model without it"),
    ({"embedding_multiplier": 12.0}, "embedding_multiplier is 12.0", "expected: a model without it"),
    ({**QWEN, "layer_types": None, "max_window_layers": "x"}, "window_layers is 'x'", "a number of layers"),
]


@pytest.mark.parametrize("case", FIELD_CASES, ids=[case[1] for case in FIELD_CASES])
def test_a_field_that_makes_no_sense(command, spoil, case):
    fields, found, expected = case
    command("generate", spoil(**fields), "hello").refused("config.json: ", found, expected)


@pytest.mark.parametrize(("file", "value"), [
    ("config.json", "</s>"), ("config.json", -1), ("config.json", [1, 1.5]),
    ("generation_config.json", ["</s>"]), ("generation_config.json", True)])
def test_an_end_token_that_is_no_id(command, spoil, file: str, value):
    command("generate", spoil(file, eos_token_id=value), "hello").refused(
        f"{file}: eos_token_id is {value!r}", "expected: a token id, a list of them, or null",
        "to fix:   correct the file")


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("top_p", 1.5, "a number in (0, 1]"), ("top_p", "0.9", "a number"),
    ("temperature", -1, "a number from 0"),
    ("temperature", float("nan"), "a number from 0"), ("temperature", [1], "a number"),
    ("min_p", True, "a number"),
    ("top_k", 2.5, "a whole number"), ("top_k", 10 ** 400, "a whole number"),
    ("repetition_penalty", 0, "a number > 0"),
])
def test_a_sampling_default_out_of_range(command, spoil, name: str, value, expected: str):
    directory = spoil("generation_config.json", do_sample=True, **{name: value})
    shown = "a number of many digits" if value == 10 ** 400 else repr(value)
    command("generate", directory, "hello").refused(
        f"generation_config.json: {name} is {shown}", f"expected: {expected}",
        "to fix:   correct the file")


LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
                         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "hidden_act": "silu"}


@pytest.mark.parametrize(("key", "value", "limit"), [
    ("num_hidden_layers", 10**9, "at most 2,048"), ("num_hidden_layers", 2049, "at most 2,048"),
    ("vocab_size", 10**15, "at most 67,108,864"), ("hidden_size", 2**62, "at most 67,108,864"),
    ("intermediate_size", 10**12, "at most 67,108,864"), ("num_attention_heads", 10**9, "at most 65,536"),
    ("num_key_value_heads", 10**9, "at most 65,536"), ("max_position_embeddings", 10**18,
                                                       "at most 2,147,483,648"),
    ("head_dim", 10**10, "at most"), ("num_hidden_layers", 10**4000, "at most 2,048"),
    ("num_hidden_layers", 2.0, "a positive integer"), ("num_attention_heads", 0, "a positive integer"),
    ("num_attention_heads", -4, "a positive integer"), ("num_hidden_layers", [0] * 10**6,
                                                        "a positive integer")],
    ids=str)
def test_a_number_beyond_its_limit(key: str, value: Any, limit: str) -> None:
    with pytest.raises(ModelError) as error: parse_config({**LLAMA, key: value}, "config.json")
    assert error.value.found.startswith(f"config.json: {key} is ")
    assert limit in error.value.expected
    assert len(error.value.found) < 400


def test_numbers_at_their_limits_are_read() -> None:
    assert parse_config({**LLAMA, "num_hidden_layers": 2048}).num_layers == 2048
    assert parse_config({**LLAMA, "max_position_embeddings": 10_485_760}).max_positions == 10_485_760


def test_a_context_is_bounded_without_being_asked_for() -> None:
    def longest(**fields: Any) -> int:
        config = parse_config({**LLAMA, "max_position_embeddings": 1 << 31, **fields})
        return context_length(config, dtypes.float32, None)
    # of two dimensions a head 2 GiB of keys and values are 44 million tokens
    assert longest(num_hidden_layers=1, head_dim=2) == 1 << 20
    # tables of 4 bytes for each of 4096 dimensions
    assert longest(num_hidden_layers=1, num_key_value_heads=1, head_dim=4096) == (256 << 20) // (4 * 4096)
    assert longest(num_hidden_layers=1, head_dim=2, max_position_embeddings=4096) == 4096


def test_encoders_have_the_limits_too() -> None:
    bert = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 10**9,
            "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 2,
            "hidden_act": "gelu", "layer_norm_eps": 1e-12}
    with pytest.raises(ModelError, match="num_hidden_layers is 1000000000"):
        parse_encoder_config(bert, "BertModel", "config.json")
