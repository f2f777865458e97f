"""Sizes of config.json that are not those of the tensors: refused by headers, before memory is taken."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.error.limited_case import limit_process
from tinygrad_nv import LLM
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models.config import parse_config, read_config
from tinygrad_nv.models.embedding_model import read_embedding_config, require_fitting
from tinygrad_nv.models.encoder import Encoder
from tinygrad_nv.models.encoder_config import read_encoder_config
from tinygrad_nv.models.encoder_weights import encoder_slots
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.qwen_vl import weights as vision
from tinygrad_nv.models.qwen_vl.config import ImageConfig, parse_vision
from tinygrad_nv.models.qwen_vl.tower import VisionTower
from tinygrad_nv.models.tied import load_config
from tinygrad_nv.models.weights import slots
from tinygrad_nv.models.whisper import weights as whisper
from tinygrad_nv.models.whisper.config import read_whisper_config
from tinygrad_nv.models.whisper.network import Whisper

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "hidden_act": "silu",
         "rms_norm_eps": 1e-6, "dtype": "float32"}
LLAMA = {"architectures": ["LlamaForCausalLM"], **SIZES}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], **SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"], **SIZES, "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 10, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
BERT = {"architectures": ["BertModel"], **SIZES, "hidden_act": "gelu", "type_vocab_size": 2,
        "layer_norm_eps": 1e-12}
NOMIC = {**BERT, "architectures": ["NomicBertModel"], "head_dim": 6}
WHISPER = {"architectures": ["WhisperForConditionalGeneration"], "vocab_size": 40, "d_model": 16,
           "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2,
           "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_source_positions": 10,
           "max_target_positions": 12, "decoder_start_token_id": 1, "num_mel_bins": 8}
TOWER = {"depth": 2, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "out_hidden_size": 16,
         "patch_size": 2, "window_size": 8}


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    with limit_process(1 << 30, 10): yield


def write(directory: Path, config: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> None:
    """A directory of the tensors that a network wants, and its config.json."""
    save_file({prefix + name: np.zeros(slot.shape, np.float32) for name, slot in wanted.items()},
              directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))


def refuse(directory: Path, config: dict[str, Any], cases: list[tuple[dict[str, Any], str]],
           read: Callable[[Path], Any]) -> None:
    """The directory is read; with changes of its config.json it is refused in words."""
    read(directory)
    for change, words in cases:
        (directory / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(WeightError, match=words): read(directory)


def test_dense_decoders(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, slots(Llama(parse_config(LLAMA))))
    tensor = r"model\.layers\.0\.self_attn"
    cases = [({"hidden_size": 1 << 20}, r"model.embed_tokens.weight: \[32, 16\], expected \[32, 1048576\], "
              "as hidden_size is 1048576\n"),
             ({"vocab_size": 1 << 26}, r"\[32, 16\], expected \[67108864, 16\], as vocab_size is 67108864"),
             ({"num_hidden_layers": 2048}, "num_hidden_layers is 2048, and the tensors model.layers.… are "
              "those of 2\n"),
             ({"num_hidden_layers": 1}, "num_hidden_layers is 1, and .* are those of 2\n"),
             ({"intermediate_size": 1 << 26}, "gate_proj.*, as intermediate_size is 67108864"),
             ({"num_attention_heads": 1 << 16, "head_dim": 4}, rf"{tensor}\.q_proj\.weight: \[16, 16\], "
              r"expected \[262144, 16\], as num_attention_heads × head_dim is 262144"),
             ({"num_key_value_heads": 4}, rf"{tensor}\.k_proj.* as num_key_value_heads × head_dim is 16\n")]
    refuse(tmp_path, LLAMA, cases, load_config)
    with pytest.raises(WeightError, match=r"num_key_value_heads × head_dim is 16.*\n.*sizes in config.json"):
        LLM(tmp_path, device="CPU")
    assert read_config(tmp_path).num_kv_heads == 4


def test_mixtures(tmp_path: Path) -> None:
    write(tmp_path, MIXTRAL, slots(Llama(parse_config(MIXTRAL))))
    refuse(tmp_path, MIXTRAL, [
        ({"num_local_experts": 1 << 16}, r"is 65536, and the tensors .*experts\.… are those of 3"),
        ({"intermediate_size": 48}, r"\(intermediate_size\) is 48")], load_config)
    wanted = slots(Llama(parse_config(DEEPSEEK)))
    extra = {"model.layers.2.enorm.weight": wanted["model.norm.weight"]}    # a layer that drafts
    write(tmp_path, DEEPSEEK, {**wanted, **extra})
    refuse(tmp_path, DEEPSEEK, [
        ({"kv_lora_rank": 9}, r"kv_a_proj_with_mqa.weight: \[12, 16\], expected \[13, 16\], as kv_lora"),
        ({"v_head_dim": 7}, "as num_attention_heads × v_head_dim is 28"),
        ({"n_routed_experts": 8}, "n_routed_experts.* is 8, and the tensors mlp.experts.… are those of 4"),
        ({"num_nextn_predict_layers": 0}, "num_hidden_layers is 2, .* are those of 3"),
        ({"first_k_dense_replace": 0}, "mlp.experts.… are those of 0")], load_config)


def test_encoders(tmp_path: Path) -> None:
    def read(directory: Path) -> None:
        config = read_embedding_config(directory)
        assert config is not None
        require_fitting(config, directory)
    for config in (BERT, NOMIC):
        (tmp_path / "config.json").write_text(json.dumps(config))
        network = read_encoder_config(tmp_path)
        assert network is not None
        write(tmp_path, config, encoder_slots(Encoder(network)), "bert.")
        refuse(tmp_path, config, [
            ({"hidden_size": 1 << 20}, "as hidden_size is 1048576"),
            ({"vocab_size": 33}, "as vocab_size is 33"), ({"num_hidden_layers": 2000}, "are those of 2"),
            ({"intermediate_size": 25}, "as intermediate_size is 25")], read)


def test_whisper_and_vision(tmp_path: Path) -> None:
    def read(directory: Path) -> None:
        config = read_whisper_config(directory)
        assert config is not None
        whisper.require_whisper_sizes(config, directory)
    (tmp_path / "config.json").write_text(json.dumps(WHISPER))
    found = read_whisper_config(tmp_path)
    assert found is not None
    write(tmp_path, WHISPER, whisper.slots(Whisper(found, Llama(parse_config(LLAMA)).dtype)), "model.")
    refuse(tmp_path, WHISPER, [
        ({"d_model": 1 << 20}, "as d_model is 1048576"), ({"encoder_layers": 2000}, "encoder_layers is 2000"),
        ({"max_source_positions": 1 << 30}, "as max_source_positions is 1073741824"),
        ({"num_mel_bins": 9}, "conv1.weight.* num_mel_bins is 9"), ({"vocab_size": 1 << 26},
        "vocab_size is 67"),
        ({"decoder_ffn_dim": 25}, "as decoder_ffn_dim is 25")], read)

    def read_tower(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        data = {"vision_config": config, "rope_scaling": {"mrope_section": [1, 1, 0]}}
        made = parse_vision(data, "config.json", ImageConfig())
        if not (directory / "model.safetensors").is_file():
            write(directory, config, vision.slots(VisionTower(made)), "visual.")
        vision.require_vision_sizes(made, directory)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(TOWER))
    refuse(tmp_path, TOWER, [
        ({"hidden_size": 1 << 20}, "hidden_size is 1048576"), ({"depth": 2000}, "depth is 2000"),
        ({"patch_size": 4}, "patch_size is 4"), ({"spatial_merge_size": 4}, "spatial_merge_size² is 256"),
        ({"out_hidden_size": 17}, "out_hidden_size is 17")], read_tower)
