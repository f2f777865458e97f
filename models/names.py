"""Names of a layer's modules in a checkpoint, which differ from family to family."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Hugging Face names after "model.layers.{i}."; a norm whose name is "" is not there. Several names of a
    matrix are its rows, one after the other. `fused`: experts are stored as fused.py says, gate and up
    "interleaved" or as "halves"."""
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{}"
    expert_matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: str = ""
    shared_expert: str = "mlp.shared_expert"
    sinks: str = "self_attn.sinks"

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms of a layer's hidden states that there are."""
        every = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm,
                 self.feed_forward_post_norm)
        return tuple(name for name in every if name)


LLAMA_NAMES = Names()
