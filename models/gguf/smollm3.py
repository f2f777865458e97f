"""SmolLM 3: every fourth layer rotates nothing, which no metadata say."""
from .architecture import Architecture

ARCHITECTURE = Architecture("SmolLM3ForCausalLM", permuted=True, fixed={"no_rope_layer_interval": 4})
