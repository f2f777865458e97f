"""The families of encoders: the record, and `ENCODERS`, one for each architecture of config.json.

BERT (arXiv 1810.04805), RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and MPNet have post-norm layers,
attention to all tokens and learned positions. NomicBERT (arXiv 2402.01613), GTE (arXiv 2407.19669) and Jina's
third embeddings (arXiv 2409.10173) have rotary positions. ModernBERT (arXiv 2412.13663) has norms before both
halves of a layer, and windows in both directions in most layers, which have a rope of their own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import ModelError, brief

from ..fields import Fields
from ..rope import rope_config, rope_parameters
from .family import layer_types, ropes_by_type, windows


@dataclass(frozen=True)
class EncoderNames:
    """Hugging Face names: `prefixes` of a whole model's tensors, of which some may be there; of a layer i
    those after `layer`. `qkv` and `up` are stacked in a network: one name, or one for each of queries, keys
    and values, and of gate and up. Empty names are of tensors that a family does not have. `unread` tensors
    are not the encoder's: heads, and the pooler that no pooling here uses."""
    prefixes: tuple[str, ...] = ("bert.",)
    words: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    layer: str = "encoder.layer.{}"
    qkv: tuple[str, ...] = ("attention.self.query", "attention.self.key", "attention.self.value")
    output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    norm: str = "output.LayerNorm"
    final_norm: str = ""
    distances: str = ""
    unread: tuple[str, ...] = ("pooler.", "cls.", "lm_head.", "vocab_", "embeddings.position_ids",
                               "classifier.", "pre_classifier.")


@dataclass(frozen=True)
class HeadNames:
    """Names of a head for sequence classification (classifier.py), without the model's prefix: `out` of the
    matrix that makes logits, `dense` and `norm` of the layer before it, if there is one, with its activation,
    which config.json may have in `activation_field`."""
    out: str
    dense: str = ""
    activation: str = "tanh"
    norm: str = ""
    activation_field: str = "classifier_activation"


BERT_HEAD = HeadNames("classifier", "pooler.dense")
ROBERTA_HEAD = HeadNames("classifier.out_proj", "classifier.dense")
DECODER_HEAD = HeadNames("score")


@dataclass(frozen=True)
class EncoderFamily:
    """`defaults` are what transformers' config class fills in; `renamed` has BERT's names of fields that it
    calls otherwise. `only` are fields that change what is computed, with the values that are computed;
    `settings(f)` are fields of `EncoderConfig` that differ from BERT's. It raises `ModelError`. `head` is
    that of models for sequence classification, which pool the first token (CLS) unless `pooling_field` of
    config.json names another."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: EncoderNames = EncoderNames()
    settings: Callable[[Fields], dict[str, Any]] = lambda f: {}
    renamed: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    head: HeadNames = BERT_HEAD
    pooling_field: str = ""


BERT_DEFAULTS = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                 "intermediate_size": 3072, "hidden_act": "gelu", "max_position_embeddings": 512,
                 "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}

# **** BERT ****

DISTILBERT_NAMES = EncoderNames(
    ("distilbert.",), layer="transformer.layer.{}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"), output="attention.out_lin",
    attention_norm="sa_layer_norm", up=("ffn.lin1",), down="ffn.lin2", norm="output_layer_norm")
MPNET_NAMES = EncoderNames(
    ("mpnet.",), qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"), output="attention.attn.o",
    attention_norm="attention.LayerNorm", distances="encoder.relative_attention_bias")
BUCKETS = 32    # of distances; transformers' MPNet reads no other number


def roberta(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for RoBERTa: positions begin after the padding token's id, which
    is a row of the table, too; a padding token in a text has that row. Raises `ModelError`."""
    return after_padding(f, f.get("pad_token_id"))


def mpnet(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for MPNet (arXiv 2004.09297): RoBERTa without token types, whose
    scores have a bias for each bucket of distances. transformers' padding token is 1, whatever pad_token_id
    says. Raises `ModelError`."""
    return {**after_padding(f, 1), "distance_buckets": BUCKETS}


def after_padding(f: Fields, pad: Any) -> dict[str, Any]:
    """Positions that begin after the row of a padding token. Raises `ModelError`."""
    rows = f.positive("max_position_embeddings")
    if not isinstance(pad, int) or isinstance(pad, bool) or not 0 <= pad < rows - 2:
        raise ModelError(f"{f.name}: pad_token_id is {brief(pad)}", f"a token id up to {rows - 3}",
                         "correct the file, or download it again")
    return {"first_position": pad + 1, "padding_id": pad, "max_positions": rows - pad - 1}


BERT = EncoderFamily(BERT_DEFAULTS)
ROBERTA = EncoderFamily({**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1},
                        EncoderNames(("roberta.",)), roberta, head=ROBERTA_HEAD)
DISTILBERT = EncoderFamily(
    {"vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "activation": "gelu",
     "max_position_embeddings": 512, "type_vocab_size": None, "layer_norm_eps": 1e-12}, DISTILBERT_NAMES,
    renamed={"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
             "num_attention_heads": "n_heads", "hidden_act": "activation"},
    head=HeadNames("classifier", "pre_classifier", "relu"))
MPNET = EncoderFamily({**BERT_DEFAULTS, "vocab_size": 30527, "type_vocab_size": None}, MPNET_NAMES, mpnet,
                      only={"relative_attention_num_buckets": (BUCKETS,)}, head=ROBERTA_HEAD)

# **** BERT with rotary positions ****

NOMIC_NAMES = EncoderNames(
    ("nomic_bert.", "bert."), embedding_norm="emb_ln", layer="encoder.layers.{}", qkv=("attn.Wqkv",),
    output="attn.out_proj", attention_norm="norm1", up=("mlp.fc12", "mlp.fc11"), down="mlp.fc2", norm="norm2")
GTE_NAMES = EncoderNames(
    ("gte.", "new."), qkv=("attention.qkv_proj",), output="attention.o_proj", attention_norm="attn_ln",
    up=("mlp.up_gate_proj",), down="mlp.down_proj", norm="mlp_ln")
JINA_NAMES = EncoderNames(
    ("jina_embeddings_v3.", "roberta."), embedding_norm="emb_ln", layer="encoder.layers.{}",
    qkv=("mixer.Wqkv",), output="mixer.out_proj", attention_norm="norm1", up=("mlp.fc1",), down="mlp.fc2",
    norm="norm2")


def rotary(f: Fields) -> dict[str, Any]:
    """Heads, and a rope that is the same in all layers. Raises `ModelError`."""
    hidden, heads = f.positive("hidden_size"), f.positive("num_attention_heads")
    if f.get("head_dim") is None and hidden % heads:
        raise ModelError(f"{f.name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                         "a multiple, or an explicit head_dim", "correct the file, or download it again")
    head_dim = hidden // heads if f.get("head_dim") is None else f.positive("head_dim")
    rope = rope_config(f, rope_parameters(f), head_dim)
    return {"head_dim": head_dim, "ropes": (rope,) * f.positive("num_hidden_layers")}


def nomic(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for Nomic's models. Raises `ModelError`."""
    return {**rotary(f), "gated": True, "biases": frozenset({"norm"})}


def gte(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig` for GTE. Raises `ModelError`."""
    return {**rotary(f), "gated": True, "gate_last": True,
            "biases": frozenset({"qkv", "output", "down", "norm"})}


# nomic-embed's own config.json has GPT-2's names of fields
NOMIC = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 30528, "hidden_act": "silu", "max_position_embeddings": 2048,
     "rope_theta": 1000.0}, NOMIC_NAMES, nomic,
    {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
     "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
     "layer_norm_eps": "layer_norm_epsilon", "rope_theta": "rotary_emb_base"},
    {"activation_function": ("swiglu",), "rotary_emb_fraction": (1, 1.0), "rotary_emb_interleaved": (False,),
     "rotary_scaling_factor": (), "prenorm": (False,), "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,),
     "mlp_fc2_bias": (False,), "use_rms_norm": (False,), "parallel_block": (False,), "causal": (False,),
     "moe_every_n_layers": (0,), "scale_attn_weights": (True,)})
GTE = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 250_048, "max_position_embeddings": 8192, "type_vocab_size": 1,
     "rope_theta": 160_000.0}, GTE_NAMES, gte)
JINA = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 250_002, "hidden_size": 1024, "num_hidden_layers": 24,
     "num_attention_heads": 16, "intermediate_size": 4096, "max_position_embeddings": 8194,
     "type_vocab_size": 1, "layer_norm_eps": 1e-5, "rope_theta": 20_000.0}, JINA_NAMES, rotary,
    head=ROBERTA_HEAD)

# **** ModernBERT ****

MODERNBERT_NAMES = EncoderNames(
    ("model.",), words="embeddings.tok_embeddings", embedding_norm="embeddings.norm", layer="layers.{}",
    qkv=("attn.Wqkv",), output="attn.Wo", attention_norm="attn_norm", up=("mlp.Wi",), down="mlp.Wo",
    norm="mlp_norm", final_norm="final_norm", unread=("head.", "decoder.", "classifier."))
GLOBAL, LOCAL = 160_000.0, 10_000.0     # bases of layers without a window and with one


def modernbert(f: Fields) -> dict[str, Any]:
    """Returns the fields of `EncoderConfig`. A token of a layer with a window sees local_attention // 2
    tokens on either side. Raises `ModelError`."""
    every = f.positive("global_attn_every_n_layers")
    types = layer_types(f, lambda i: i % every != 0)
    f = f.within({"head_dim": f.positive("hidden_size") // f.positive("num_attention_heads"),
                  "sliding_window": f.positive("local_attention") // 2 + 1})
    biased = {"norm_bias": ("norm",), "attention_bias": ("qkv", "output"), "mlp_bias": ("up", "down")}
    return {"windows": windows(f, types), "pre_norm": True, "gated": True,
            "ropes": ropes_by_type(f, types, f.get("global_rope_theta", GLOBAL),
                                   f.get("local_rope_theta", LOCAL)),
            "biases": frozenset(name for key, names in biased.items() if f.flag(key) for name in names)}


MODERNBERT = EncoderFamily(
    {**BERT_DEFAULTS, "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152,
     "hidden_activation": "gelu", "max_position_embeddings": 8192, "type_vocab_size": None, "norm_eps": 1e-5,
     "local_attention": 128, "global_attn_every_n_layers": 3}, MODERNBERT_NAMES, modernbert,
    {"hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps"},
    {"rope_scaling": (), "sliding_window": ()}, HeadNames("classifier", "head.dense", "gelu", "head.norm"),
    "classifier_pooling")
ENCODERS: dict[str, EncoderFamily] = {
    f"{name}{kind}": family
    for name, family in {"Bert": BERT, "Roberta": ROBERTA, "XLMRoberta": ROBERTA, "Camembert": ROBERTA,
                         "DistilBert": DISTILBERT, "MPNet": MPNET, "NomicBert": NOMIC, "Gte": GTE,
                         "JinaEmbeddingsV3": JINA, "ModernBert": MODERNBERT}.items()
    for kind in ("Model", "ForMaskedLM", "ForSequenceClassification")}
