"""Embedding models whose files say something that is not implemented, or cannot be."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.errors import ModelError, NVError, WeightError
from tinygrad_nv.models.embedding_model import read_embedding_config
from tinygrad_nv.models.pooling import read_pooling

BERT = {"architectures": ["BertModel"], "vocab_size": 20, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "dtype": "float32"}
POOLING = {"pooling_mode_mean_tokens": True}


def write(directory: Path, modules: list[Any] | None = None, pooling: dict[str, Any] | None = None,
          **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**BERT, **fields}))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling or POOLING))
    return directory


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
            for i, kind in enumerate(kinds)]


def refused(error: pytest.ExceptionInfo[NVError], *words: str) -> None:
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(("fields", "words"), [
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key', which is not"),
    ({"is_decoder": True}, "is_decoder is True, which is not implemented for BertModel"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is "),
    ({"embedding_size": 4}, "embedding_size is 4"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
    ({"hidden_size": 9}, "hidden_size 9 is not a multiple of num_attention_heads 2"),
    ({"architectures": ["RobertaModel"], "pad_token_id": -1}, "pad_token_id is -1"),
    ({"vocab_size": 0}, "vocab_size is 0"), ({"layer_norm_eps": 0}, "layer_norm_eps is 0")])
def test_fields_that_are_not_implemented(tmp_path: Path, fields: dict[str, Any], words: str):
    with pytest.raises(ModelError) as error: read_embedding_config(write(tmp_path, **fields))
    refused(error, f"{tmp_path / 'config.json'}: {words}", "expected: ")


NOMIC = {"architectures": ["NomicBertModel"]}
MODERN = {"architectures": ["ModernBertModel"], "pad_token_id": 0}


@pytest.mark.parametrize(("fields", "words"), [
    ({**NOMIC, "moe_every_n_layers": 2}, "moe_every_n_layers is 2, which is not implemented for NomicBert"),
    ({**NOMIC, "rotary_scaling_factor": 2}, "rotary_scaling_factor is 2"),
    ({**NOMIC, "rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
    ({**NOMIC, "n_head": 3}, "hidden_size 8 is not a multiple of num_attention_heads 3"),
    ({**MODERN, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is "),
    ({**MODERN, "local_attention": -1}, "local_attention is -1"),
    ({**MODERN, "layer_types": ["chunked_attention"]}, "layer type 'chunked_attention' is not supported"),
    ({"architectures": ["MPNetModel"], "relative_attention_num_buckets": 16},
     "relative_attention_num_buckets is 16, which is not implemented for MPNetModel")])
def test_fields_of_other_encoders(tmp_path: Path, fields: dict[str, Any], words: str):
    with pytest.raises(ModelError) as error: read_embedding_config(write(tmp_path, **fields))
    refused(error, f"{tmp_path / 'config.json'}: {words}", "expected: ")


@pytest.mark.parametrize("name", ["NewModel", "XmodModel", "DebertaV2Model",
                                  "BertForTokenClassification"])
def test_architectures_that_are_not_read(tmp_path: Path, name: str):
    with pytest.raises(ModelError) as error: LLM(write(tmp_path, architectures=[name]), device="CPU")
    refused(error, f"architecture {name} is not supported", "BertModel", "XLMRobertaModel")


@pytest.mark.parametrize(("given", "pooling", "words"), [
    (modules("Transformer", "Pooling", "LayerNorm"), None, "module 2 is LayerNorm, which is not implemented"),
    (modules("Transformer", "Normalize"), None, "module 1 is Normalize"),
    (modules("Transformer"), None, "has no Pooling"),
    (modules("CLIPModel", "Pooling"), None, "module 0 is CLIPModel"),
    (modules("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "the pooling is max, which"),
    (modules("Transformer", "Pooling"), {**POOLING, "pooling_mode_cls_token": True}, "is cls and mean"),
    (modules("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "the pooling is weightedmean"),
    (modules("Transformer", "Pooling"), {"pooling_mode_mean_tokens": False}, "the pooling is none"),
    (modules("Transformer", "Pooling"), {**POOLING, "include_prompt": False}, "include_prompt is false"),
    ([{"type": "x.Transformer", "path": "../elsewhere"}], None, "the path of a folder"),
    ([3], None, "has 3")])
def test_modules_that_are_not_implemented(tmp_path: Path, given: list[Any], pooling: dict[str, Any] | None,
                                          words: str):
    with pytest.raises(ModelError) as error: read_pooling(write(tmp_path, given, pooling))
    refused(error, words, "expected: ")


@pytest.mark.parametrize(("config", "tensors", "words"), [
    ({"activation_function": "torch.nn.modules.activation.GELU"}, {}, "activation_function 'GELU' is not"),
    ({}, {"linear.weight": (4, 8)}, "linear.bias is missing"),
    ({}, {"linear.weight": (8, 4), "linear.bias": (4,)}, "linear.weight is [8, 4] of float32"),
    ({"out_features": -1}, {}, "out_features is -1")])
def test_dense_layers_that_do_not_fit(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any],
                                      words: str):
    write(tmp_path, modules("Transformer", "Pooling", "Dense"))
    (folder := tmp_path / "2_Dense").mkdir()
    whole = {"in_features": 8, "out_features": 4, "bias": True, "activation_function": "x.Identity"}
    (folder / "config.json").write_text(json.dumps({**whole, **config}))
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()},
              folder / "model.safetensors")
    with pytest.raises(ModelError) as error: read_pooling(tmp_path)
    refused(error, words)


def test_weights_that_do_not_fit(tmp_path: Path):
    write(tmp_path)
    tensors = {"bert.embeddings.word_embeddings.weight": np.zeros((20, 9), np.float32),
               "bert.pooler.dense.weight": np.zeros((8, 8), np.float32), "more": np.zeros(1, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as error: LLM(tmp_path, device="CPU")
    refused(error, "wrong shape: bert.embeddings.word_embeddings.weight: [20, 9], expected [20, 8], as "
            "hidden_size is 8", "num_hidden_layers is 1, and the tensors encoder.layer.… are those of 0")
    bias = "bert.encoder.layer.0.output.dense.bias"
    save_file({**tensors, "bert.embeddings.word_embeddings.weight": np.zeros((20, 8), np.float32),
               bias: np.zeros(9, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as error: LLM(tmp_path, device="CPU")
    refused(error, "wrong shape (1): encoder.layer.0.output.dense.bias: [9], expected [8]",
            "unexpected (1): more", "missing (19): embeddings.position_embeddings.weight")


@pytest.mark.parametrize(("options", "words"), [
    ({"tensor_parallel_size": 2}, "2 ranks, and the model makes embeddings"),
    ({"data_parallel_size": 3}, "3 ranks, and the model makes embeddings"),
    ({"speculative": "ngram:2"}, "speculative is 'ngram:2', and the model makes embeddings"),
    ({"quantization": "fp8"}, "quantization is 'fp8'"), ({"max_model_len": 17}, "max_model_len is 17"),
    ({"dtype": "int4"}, "unknown dtype 'int4'")])
def test_options_that_embedding_models_lack(tmp_path: Path, options: dict[str, Any], words: str):
    with pytest.raises(NVError) as error: LLM(write(tmp_path), device="CPU", **options)
    refused(error, words, "expected: ")


def test_a_decoder_with_latent_attention(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 20, "hidden_size": 16, "q_lora_rank": None,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "max_position_embeddings": 16,
        "first_k_dense_replace": 1}))
    with pytest.raises(ModelError) as error: read_embedding_config(tmp_path, "embed")
    refused(error, "multi-head latent attention (DeepseekV3ForCausalLM)", "choose another embedding model")


def test_a_command_that_generates(command, tmp_path: Path):
    command("generate", write(tmp_path), "hello").refused(
        f"{tmp_path} is an encoder (BertModel), which generates no text", "expected: a causal language model",
        "to fix:   serve it for /v1/embeddings, or call LLM(directory).embed(texts)")


def test_a_model_that_generates_is_asked_for_embeddings(tiny: Path):
    llm = LLM(tiny, device="CPU", max_num_seqs=1)
    with pytest.raises(NVError) as error: llm.embed("a fox")
    refused(error, "was loaded to generate text", 'to fix:   load it with LLM(directory, task="embed")')
    llm.close()
