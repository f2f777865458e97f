"""Llama 2 / 3.x: what `ModelConfig` is by itself."""
from .family import Family

FAMILY = Family("LlamaForCausalLM", settings=lambda f: {"mlp_bias": f.flag("mlp_bias")})
