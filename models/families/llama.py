"""Llama 2 / 3.x: what `ModelConfig` is by itself. EuroBERT (arXiv 2503.05500): LLaMA's layers, in which
tokens attend in both directions.
"""
from .family import Family

FAMILY = Family("LlamaForCausalLM", settings=lambda f: {"mlp_bias": f.flag("mlp_bias")})
EUROBERT = Family("EuroBertModel", {"vocab_size": 128_256, "hidden_size": 768, "intermediate_size": 3072,
                                    "num_hidden_layers": 12, "num_attention_heads": 12, "rms_norm_eps": 1e-5,
                                    "max_position_embeddings": 8192},
                  settings=lambda f: {"causal": False})
