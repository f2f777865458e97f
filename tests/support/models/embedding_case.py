"""Random embedding models, as transformers and sentence-transformers save them, and the reference's
vectors."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SIZES = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 66}
DISTILBERT = {"vocab_size": 120, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4,
              "max_position_embeddings": 64}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": SIZES, "Roberta": {**SIZES, "pad_token_id": 1}, "DistilBert": DISTILBERT,
    "XLMRoberta": {**SIZES, "pad_token_id": 1, "hidden_act": "gelu_new", "type_vocab_size": 1},
    "Camembert": {**SIZES, "pad_token_id": 1}, "MPNet": {**SIZES, "max_position_embeddings": 520},
    "NomicBert": {**SIZES, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "Gte": {**SIZES, "type_vocab_size": 0, "hidden_act": "gelu"}, "JinaEmbeddingsV3": SIZES,
    "ModernBert": {**SIZES, "num_hidden_layers": 4, "local_attention": 8, "norm_bias": True,
                   "pad_token_id": 0,
                   "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0,
                                                          "rope_theta": 16e4},
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}}
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
WORDS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{each}" for each in "abcdefghijklmnopqrstuvwxyz")]


def save(directory: Path, cls: str, fields: dict[str, Any]) -> torch.nn.Module:
    """A model of a class, in which every parameter tells."""
    torch.manual_seed(3)
    network = getattr(transformers, cls)
    model = network(network.config_class(**fields)).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name.lower() and parameter.ndim == 1
                              and not name.endswith("bias") else 0.0, 0.3)
    model.save_pretrained(directory)
    return model


def add_modules(directory: Path, pooling: dict[str, Any], normalize: bool = True,
                dense: tuple[torch.nn.Linear, ...] = (), activation: str = "activation.Tanh",
                **own: Any) -> None:
    """modules.json and the folders that it names."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
                "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (directory / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]: (directory / module["path"]).mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(
        {"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, **pooling}))
    (directory / "sentence_bert_config.json").write_text(json.dumps(own))
    for i, each in enumerate(dense):
        folder = directory / f"{i + 2}_Dense"
        (folder / "config.json").write_text(json.dumps(
            {"in_features": each.in_features, "out_features": each.out_features,
             "bias": each.bias is not None, "activation_function": f"torch.nn.modules.{activation}"}))
        state = {f"linear.{name}": tensor.contiguous() for name, tensor in each.state_dict().items()}
        save_file(state, folder / "model.safetensors")


def add_vocabulary(directory: Path) -> None:
    """A vocab.txt for BERT."""
    (directory / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def ragged(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random texts of token ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 120, length).tolist() for length in lengths]


def hidden_states(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """The reference's, of one text."""
    with torch.no_grad(): return model(torch.tensor([ids])).last_hidden_state[0].float().numpy()
