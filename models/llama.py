"""The LLaMA family as one network: Llama 2 / 3.x, Mistral, Qwen2, Qwen3, Gemma, distinguished by
`ModelConfig`.

Protocol: `Llama(config)` owns its parameters as tensors; q|k|v and gate|up are each stored as one matrix, so
that a layer needs four weight kernels. `model(tokens)` gives the logits of every position (training,
scoring). `model.step(tokens, start, cache, last)` appends tokens at `start` to a `DenseKVCache` and gives the
logits of one of them (decoding); `start` may be a bound variable, so that one captured graph serves every
position. `model.step_paged(tokens, batch, cache)` does so for many sequences, each with its pages
(patterns/decode/paged.py). The engine runs that.

`contiguous()` marks what is computed once: tinygrad fuses everything else into its consumer, where a value
that feeds a matmul is computed again for every output row. `contiguous_backward()` does the same for
gradients. Both were placed by measuring decode and training steps on a CPU (training: 5.0 s a step without,
1.1 s with).

Numerics are those of transformers: RMSNorm and softmax in float32, everything else in the parameters' dtype.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import config
from tinygrad_nv.functional import (
    embedding,
    kv_append,
    quant_matmul,
    quantize,
    scaled_dot_product_attention,
    scaled_matmul,
    sparse_matmul,
)
from tinygrad_nv.hooks import enabled
from tinygrad_nv.kvcache.store import LayerPages, PagedCache
from tinygrad_nv.patterns.target import cpu_of, takes
from tinygrad_nv.quant.activations import QWeight, SparseWeight
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.runtime.observe.ranges import layer
from tinygrad_nv.tile.gemm.spec import FLOAT16S

from .config import ModelConfig
from .embedding import quantised_rows
from .paged import PagedBatch
from .rope import tables

Position: TypeAlias = int | UOp
Cache: TypeAlias = tuple[Tensor, Tensor] | LayerPages    # of one layer


@dataclass(frozen=True)
class DenseKVCache:
    """Keys and values of every layer: two tensors of shape (B, H_kv, capacity, D) each.

    Uninitialised: attention reads [0, end) only, and everything before `end` has been written. A CPU
    therefore holds pages in memory as they are used.
    """
    layers: tuple[tuple[Tensor, Tensor], ...]

    @staticmethod
    def create(config: ModelConfig, capacity: int, dtype: DType, batch: int = 1,
               device: str | None = None) -> DenseKVCache:
        """A cache for `capacity` tokens in each of `batch` sequences."""
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)
        def created() -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        return DenseKVCache(tuple((created(), created()) for _ in range(config.num_layers)))

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers."""
        return [tensor for layer in self.layers for tensor in layer]

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(int(tensor.nbytes()) for tensor in self.tensors)


@dataclass(frozen=True)
class DenseBatch:
    """The positions of the tokens (B, T) of a step: start, start + 1, … `rope` are the tables of all
    positions; `lengths`, int32 (B,) in memory, is start + T for a step with a cache."""
    start: Position
    rope: tuple[Tensor, Tensor]
    lengths: Tensor | None = None

    def rope_rows(self, T: int) -> tuple[Tensor, Tensor]:
        """Rows [start, start + T) of the rope tables."""
        cos, sin = self.rope
        return cos[self.start:self.start + T], sin[self.start:self.start + T]


class Linear:
    """y = x Wᵀ + b with W of shape (out, in), as PyTorch stores it. `out` may be several projections
    stacked. Of a quantised or sparse layer `parts` stand in for W: its rows in order, quantised or not."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: DType, device: str | None) -> None:
        self.weight = Tensor.empty(outputs, inputs, dtype=dtype, device=device)
        self.bias = Tensor.empty(outputs, dtype=dtype, device=device) if bias else None
        self.parts: tuple[QWeight | SparseWeight | Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if not self.parts: return x.linear(self.weight.T, self.bias)
        if len(self.parts) == 1: return multiply(x, self.parts[0], self.bias)
        made = Tensor.cat(*(multiply(x, part) for part in self.parts), dim=-1)
        return made if self.bias is None else made + self.bias


def multiply(x: Tensor, weight: QWeight | SparseWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, of W quantised, sparse, or neither."""
    if isinstance(weight, Tensor): return x.linear(weight.T, bias)
    how = weight.activations
    if how is None and isinstance(weight, SparseWeight): return sparse_matmul(x, weight.matrix, bias)
    if isinstance(weight, QWeight) and (how is None or not weight.codes):
        return quant_matmul(weight.inputs(x), weight.matrix, bias, weight.int8)
    assert how is not None
    codes, scales = quantize(x, how.element, how.scale, weight.input_scale)
    if isinstance(weight, SparseWeight): return sparse_matmul(codes, weight.matrix, bias, scales, x.dtype)
    return scaled_matmul(codes, scales, weight.matrix, bias, x.dtype)


class RMSNorm:
    """x / rms(x) · (w + offset): statistics in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, config: ModelConfig, dtype: DType, device: str | None) -> None:
        self.weight = Tensor.empty(size, dtype=dtype, device=device)
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x: Tensor) -> Tensor:
        f = x.float()
        f = f * (f.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        # Gemma multiplies before it rounds to the model's dtype, the others after
        if self.offset: return (f * (self.weight.float() + self.offset)).cast(x.dtype).contiguous()
        return (f.cast(x.dtype) * self.weight).contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first 2·cos.shape[-1] dimensions of x (B, H, T, D), pairing i with i + half (RoFormer)."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    parts = [a * cos - b * sin, b * cos + a * sin]
    return parts[0].cat(*parts[1:], *([rest] if rest.shape[-1] else []), dim=-1)


def takes_kv_append(x: Tensor) -> bool:
    """Whether a kernel of this package rotates queries and keys and writes the cache. tinygrad's own kernels
    write only the new rows if `start` is a variable; `kv_append` reads it from memory."""
    return enabled() and takes(x.device) and bool(config.get("NV_ATTENTION"))


def takes_matmuls(x: Tensor, decoding: bool) -> bool:
    """Whether matmuls of x run on kernels of this package, which take an attention whole and store its
    inputs. tinygrad's own kernels compute x again for each output element unless it is contiguous. That holds
    for float32 on GPUs, whose gradients need intermediate results of the attention."""
    return enabled() and takes(x.device) and (decoding or x.dtype in FLOAT16S or cpu_of(x.device) is not None)


class Attention:
    """Grouped-query attention with rotary positions, an optional sliding window and optional q/k norms."""

    def __init__(self, config: ModelConfig, window: int | None, dtype: DType, device: str | None) -> None:
        self.config, self.window = config, window
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, q + 2 * kv, config.qkv_bias, dtype, device)
        self.output = Linear(q, config.hidden_size, config.output_bias, dtype, device)
        self.q_norm = RMSNorm(config.head_dim, config, dtype, device) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config, dtype, device) if config.qk_norm else None

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q|k|v (B, T, (H + 2 H_kv) D) as heads (B, T, H, D), q and k normalised where the model does so."""
        c, (B, T, _) = self.config, heads.shape
        heads = heads.reshape(B, T, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None: q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def project(self, x: Tensor, batch: DenseBatch) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, hidden) to rotated q (B, H, T, D) and k, v (B, H_kv, T, D)."""
        cos, sin = batch.rope_rows(x.shape[1])
        q, k, v = (each.transpose(1, 2) for each in self.split(self.qkv(x).contiguous_backward()))
        return rotate(q, cos, sin).contiguous(), rotate(k, cos, sin), v

    def append(self, x: Tensor, batch: DenseBatch,
               cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q (B, H, T, D); keys and values (B, H_kv, start + T, D), those of x in the cache too."""
        start, end = batch.start, batch.start + x.shape[1]
        if batch.lengths is not None and takes_kv_append(x):
            q, k, v = self.split(self.qkv(x).contiguous())
            cos, sin = batch.rope
            # new Tensors over the same storage, so that reads depend on the appends
            keys, values = (Tensor(each.uop) for each in cache)
            keys, values, q = kv_append(keys, values, k, v, None, batch.lengths, cos=cos, sin=sin, q=q,
                                        rounded=True)
            return q.transpose(1, 2), keys[:, :, :end], values[:, :, :end]
        q, *new = self.project(x, batch)
        written = [Tensor(old.uop.after(old[:, :, start:end].uop.store(each.uop)))
                   for old, each in zip(cache, new, strict=True)]
        return q, written[0][:, :, :end], written[1][:, :, :end]

    def mask(self, T: int, start: Position) -> Tensor | None:
        """True where the token at start + i attends to position j of [0, start + T); None where every token
        attends to all."""
        if T == 1 and self.window is None: return None
        rows = Tensor.arange(T).reshape(T, 1) + start
        columns = Tensor.arange(start + T).reshape(1, start + T)
        seen = columns <= rows
        return seen if self.window is None else seen & (columns > rows - self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: Position, decoding: bool) -> Tensor:
        """softmax(q kᵀ / √D + mask) v as (B, T, H·D); softmax in float32."""
        c, (B, _, T, _) = self.config, q.shape
        q = q.reshape(B, c.num_kv_heads, c.num_heads // c.num_kv_heads, T, c.head_dim)
        scores = q.matmul(k.unsqueeze(2).transpose(-1, -2), dtype=dtypes.float32) * c.head_dim ** -0.5
        scores = scores.contiguous_backward()
        if (mask := self.mask(T, start)) is not None: scores = mask.where(scores, -float("inf"))
        weights = scores.softmax(-1).cast(v.dtype)
        if not takes_matmuls(weights, decoding): weights = weights.contiguous()
        out = weights.contiguous_backward() @ v.unsqueeze(2)
        out = out.reshape(B, c.num_heads, T, c.head_dim).transpose(1, 2)
        return out.reshape(B, T, c.num_heads * c.head_dim).contiguous()

    def flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend` for whole sequences, with this package's attention kernel and its gradient."""
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, window=self.window)
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)

    def __call__(self, x: Tensor, batch: DenseBatch | PagedBatch, cache: Cache | None) -> Tensor:
        if isinstance(batch, PagedBatch):
            assert isinstance(cache, LayerPages)
            return self.output(batch.attend(*self.split(self.qkv(x).contiguous()), cache, self.window))
        if cache is not None:
            assert isinstance(cache, tuple)
            return self.output(self.attend(*self.append(x, batch, cache), batch.start, True))
        q, k, v = self.project(x, batch)
        k, v = k.contiguous(), v.contiguous()
        if takes_matmuls(q, False): return self.output(self.flash(q, k, v))
        return self.output(self.attend(q, k, v, batch.start, False))


class FeedForward:
    """Gated feed-forward: down(act(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: DType, device: str | None) -> None:
        self.activation, self.width = config.activation, config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * self.width, config.mlp_bias, dtype, device)
        self.down = Linear(self.width, config.hidden_size, config.mlp_bias, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        both = self.gate_up(x).contiguous_backward().split([self.width, self.width], dim=-1)
        # split: in one kernel each would be computed for all columns of both (15 ms against 10 on a CPU)
        gate, up = (half.contiguous_backward() for half in both)
        # realised: fused into `down` it would be computed again for every output row (212 µs against 13 + 3
        # on a CPU)
        return self.down((self.act(gate) * up).contiguous())

    def act(self, x: Tensor) -> Tensor:
        """The gate's activation."""
        if self.activation == "silu": return x.silu()
        return x.gelu() if self.activation == "gelu_tanh" else 0.5 * x * (1 + (x * 0.5 ** 0.5).erf())


class Block:
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, window: int | None, dtype: DType, device: str | None) -> None:
        self.attention = Attention(config, window, dtype, device)
        self.feed_forward = FeedForward(config, dtype, device)
        self.attention_norm = RMSNorm(config.hidden_size, config, dtype, device)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config, dtype, device)

    def __call__(self, x: Tensor, batch: DenseBatch | PagedBatch, cache: Cache | None) -> Tensor:
        with layer("attention"): x = x + self.attention(self.attention_norm(x), batch, cache)
        with layer("feed_forward"): return (x + self.feed_forward(self.feed_forward_norm(x))).contiguous()


class Llama:
    """The network. Parameters are allocated, not set: `weights.load` or `initialise` fills them."""

    def __init__(self, config: ModelConfig, dtype: DType = dtypes.float32, device: str | None = None,
                 positions: int | None = None) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.positions = config.max_positions if positions is None else positions
        self.embedding = Tensor.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.blocks = [Block(config, window, dtype, device) for window in config.windows]
        self.norm = RMSNorm(config.hidden_size, config, dtype, device)
        self.head = self.embedding
        if not config.tied: self.head = Tensor.empty(*self.embedding.shape, dtype=dtype, device=device)
        self.quantised_head: QWeight | None = None  # instead of `head`
        self.quantised_embedding: QTensor | None = None     # instead of `embedding`
        # of a GGUF file: whether a CPU rounds inputs of its layers to int8, as llama.cpp does
        self.int8_inputs = dtype in FLOAT16S
        # of 8-bit keys and values, by layer: float32 [H_kv] each, those that the checkpoint has
        self.cache_scales: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` positions, (positions, dim/2), rounded to the model's dtype."""
        cos, sin = tables(self.config.rope, self.positions)
        created = [Tensor(t, device=self.device).cast(self.dtype).contiguous() for t in (cos, sin)]
        Tensor.realize(*created)
        return created[0], created[1]

    def batch_at(self, start: Position, shape: tuple[int, ...], cache: DenseKVCache | None,
                 lengths: Tensor | None) -> DenseBatch:
        """The positions of tokens of shape (B, T)."""
        if cache is not None and lengths is None:
            lengths = Tensor.full(shape[:1], start + shape[1], dtype=dtypes.int32, device=self.device)
            lengths = lengths.contiguous()
        return DenseBatch(start, self.rope_tables, lengths)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The first layer's input, (B, T, hidden)."""
        with layer("embedding"):
            table = self.quantised_embedding
            x = embedding(self.embedding, tokens) if table is None else \
                quantised_rows(table, tokens, self.dtype)
            if self.config.embedding_scale != 1.0:
                x = x * Tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
            return x.contiguous()  # gathered once: norms and residuals read it

    def hidden(self, tokens: Tensor, start: Position = 0, cache: DenseKVCache | None = None,
               lengths: Tensor | None = None) -> Tensor:
        """The last layer's normalised output, (B, T, hidden), for tokens (B, T) at positions start, start +
        1, …"""
        x = self.embedded(tokens)
        batch = self.batch_at(start, tokens.shape, cache, lengths)
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch, cache.layers[i] if cache else None)
        with layer("norm"): return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Of normalised outputs of the last layer."""
        return multiply(x, self.head if self.quantised_head is None else self.quantised_head)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of every position, (B, T, vocab), for tokens (B, T)."""
        x = self.hidden(tokens)
        with layer("head"): return self.logits(x)

    def step(self, tokens: Tensor, start: Position, cache: DenseKVCache, last: Position = 0,
             lengths: Tensor | None = None) -> Tensor:
        """Appends tokens (B, T) to `cache` at `start`; float32 logits (B, vocab) of token `last` of these T.
        `lengths`, int32 (B,), is start + T if it is in memory already."""
        row = self.hidden(tokens, start, cache, lengths)[:, last:last + 1]
        with layer("head"):
            return self.logits(row).float().reshape(tokens.shape[0], self.config.vocab_size)

    def step_paged(self, tokens: Tensor, batch: PagedBatch, cache: PagedCache,
                   logits_indices: Tensor | None = None) -> Tensor:
        """Appends tokens (T,) of the sequences in `batch` to their pages; float32 logits (R, vocab) of the
        tokens `logits_indices`, int32 (R,), or of all."""
        x = self.embedded(tokens.reshape(1, -1))
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch, cache.layers[i])
        with layer("norm"):
            if logits_indices is not None: x = embedding(x[0], logits_indices).unsqueeze(0).contiguous()
            x = self.norm(x)
        with layer("head"): return self.logits(x).float().reshape(-1, self.config.vocab_size)
