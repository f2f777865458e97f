"""The text encoders of CLIP (arXiv 2103.00020).

Protocol: `encoder(tokens)` gives the hidden states of every layer's input and of the last layer, and the
pooled state: at the end of the text, normalised, and projected where there is a projection. Stable Diffusion
1.5 and 2 condition on the last, normalised (`last`), XL on the last but one (`penultimate`) of two encoders.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.functional import embedding, scaled_dot_product_attention

from ..layers import LayerNorm, activate
from .config import TextConfig
from .layers import Linear

OLD_EOS = 2     # of configurations that name no real one: the end is the largest id of a text


@dataclass(frozen=True)
class EncodedText:
    """`last` (B, T, hidden), normalised, `penultimate` (B, T, hidden), `pooled` (B, projection or hidden)."""
    last: Tensor
    penultimate: Tensor
    pooled: Tensor


class TextAttention:
    """Causal self-attention."""
    STORED: ClassVar = {"qkv": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, config: TextConfig, dtype: DType, device: str | None) -> None:
        self.heads = config.num_heads
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, dtype, device)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        B, T, width = x.shape
        heads = self.qkv(x).contiguous().reshape(B, T, 3, self.heads, width // self.heads)
        q, k, v = (heads[:, :, i].transpose(1, 2) for i in range(3))
        made = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(made.transpose(1, 2).reshape(B, T, width).contiguous())


class TextMLP:
    """fc2(act(fc1(x)))."""

    def __init__(self, config: TextConfig, dtype: DType, device: str | None) -> None:
        self.activation = config.activation
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, dtype, device)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc2(activate(self.fc1(x), self.activation).contiguous())


class TextLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TextConfig, dtype: DType, device: str | None) -> None:
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.self_attn = TextAttention(config, dtype, device)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.mlp = TextMLP(config, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        x = (x + self.self_attn(self.layer_norm1(x))).contiguous()
        return (x + self.mlp(self.layer_norm2(x))).contiguous()


class TextEncoder:
    """The network. Parameters are allocated, not set."""
    STORED: ClassVar = {"token_embedding": ("embeddings.token_embedding.weight",),
                        "position_embedding": ("embeddings.position_embedding.weight",),
                        "layers": ("encoder.layers",)}

    def __init__(self, config: TextConfig, dtype: DType = dtypes.float32, device: str | None = None) -> None:
        def table(rows: int) -> Tensor:
            return Tensor.empty(rows, config.hidden_size, dtype=dtype, device=device)
        self.config = config
        self.token_embedding, self.position_embedding = table(config.vocab_size), table(config.max_positions)
        self.layers = [TextLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.final_layer_norm = LayerNorm(config.hidden_size, config.norm_eps, dtype, device)
        self.text_projection: Linear | None = None
        if config.projection:
            self.text_projection = Linear(config.hidden_size, config.projection, dtype, device, bias=False)

    def __call__(self, tokens: Tensor) -> EncodedText:
        """The states of tokens (B, T), int32."""
        B, T = tokens.shape
        x = (embedding(self.token_embedding, tokens) + self.position_embedding[:T]).contiguous()
        penultimate = x
        for block in self.layers: penultimate, x = x, block(x)
        last = self.final_layer_norm(x)
        ends = (Tensor.arange(B, dtype=dtypes.int32) * T + self._ends(tokens)).contiguous()
        pooled = embedding(last.reshape(B * T, -1), ends)
        if self.text_projection is not None: pooled = self.text_projection(pooled)
        return EncodedText(last, penultimate, pooled)

    def _ends(self, tokens: Tensor) -> Tensor:
        """Returns where each text ends, int32 (B,): at its first eos."""
        if self.config.eos_token_id == OLD_EOS: return tokens.argmax(-1).cast(dtypes.int32)
        return (tokens == self.config.eos_token_id).int().argmax(-1).cast(dtypes.int32)
