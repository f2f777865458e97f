"""Attention of a layer, over whole sequences, a contiguous cache, or pages.

Protocol: `attention(x, batch, cache)` with x (B, T, hidden). Without a cache the sequences are whole
(training, scoring); a `DenseBatch` with a cache appends to it and attends to all of it; a `PagedBatch` has
many sequences in pages, a `PackedBatch` many whole ones, one after the other (paged.py).
"""
from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING

from tinygrad_nv import config
from tinygrad_nv import functional as F
from tinygrad_nv.hooks import enabled
from tinygrad_nv.kvcache.store import LayerPages
from tinygrad_nv.patterns.target import cpu_of, takes
from tinygrad_nv.tile.gemm.spec import FLOAT16S

from .config import ModelConfig
from .dense import DenseBatch, Documents, Position
from .layers import Linear, RMSNorm, StoredLinear, normalise
from .paged import AttentionKind, PackedBatch, PagedBatch, append

if TYPE_CHECKING:   # a program of one device does not load it
    from .parallel import Parallel

Cache: TypeAlias = tuple[Tensor, ...] | LayerPages    # of one layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotates the first 2·cos.shape[-1] dimensions of x (B, H, T, D), pairing i with i + half (RoFormer);
    `interleaved` all of them, pairing 2 i with 2 i + 1."""
    if interleaved:
        a, b = (x[..., i::2].float() for i in range(2))
        return Tensor.stack(a * cos - b * sin, b * cos + a * sin, dim=-1).flatten(-2).cast(x.dtype)
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
    """Grouped-query attention of layer `index`, with or without rotary positions, a sliding window and q/k
    norms.
    """

    def __init__(self, config: ModelConfig, index: int, dtype: DType, device: str | None,
                 parallel: Parallel | None = None) -> None:
        self.parallel, self.index = parallel, index
        self.config, self.window, self.rope = config, config.windows[index], config.rope_indices[index]
        self.scale = config.head_dim ** -0.5 if config.attention_scale is None else config.attention_scale
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # each head's rows of queries are followed by those of its gates, or values by one of each head
        self.gated, self.gate_rows = config.gated_attention is True, 0
        if config.gated_attention == "heads": self.gate_rows = config.num_heads
        rows = q * (1 + self.gated) + 2 * kv + self.gate_rows
        self.qkv = Linear(config.hidden_size, rows, config.qkv_bias, dtype, device)
        self.chunked, self.sinks = config.chunked and self.window is not None, None
        if config.sinks: self.sinks = Tensor.empty(config.num_heads, dtype=dtypes.float32, device=device)
        self.temperature = config.temperature if self.rope is None else None
        self.output = Linear(q, config.hidden_size, config.output_bias, dtype, device)
        self.q_norm = self.k_norm = None
        if config.qk_norm in ("head", "all"):
            widths = (config.head_dim,) * 2 if config.qk_norm == "head" else (q, kv)
            self.q_norm, self.k_norm = (RMSNorm.of(width, config, dtype, device) for width in widths)

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        c, names = self.config, self.config.names
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        rows = (q * (1 + self.gated), kv, kv, *[self.gate_rows] * bool(self.gate_rows))
        return [(self.qkv, names.qkv, rows), (self.output, (names.output,), (c.hidden_size,))]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norms by their names in a checkpoint."""
        names = self.config.names
        both = {names.q_norm: self.q_norm, names.k_norm: self.k_norm}
        return {name: norm for name, norm in both.items() if norm is not None}

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q|k|v (B, T, (H + 2 H_kv) D) as heads (B, T, H, D), q and k normalised where the model does so."""
        c, (B, T, _) = self.config, heads.shape
        if c.qk_norm == "all": return self._split_normalised(heads)
        heads = heads.reshape(B, T, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None: q, k = self.q_norm(q), self.k_norm(k)
        # rotation keeps the norm, so that it does not matter which is first
        if c.qk_norm == "unit" and self.rope is not None:
            q, k = (normalise(each, c.norm_eps).cast(each.dtype).contiguous() for each in (q, k))
        return q, k, v

    def _split_normalised(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`split` where all heads of q, and all of k, are normalised together."""
        c, (B, T, _) = self.config, heads.shape
        assert self.q_norm is not None
        assert self.k_norm is not None
        kv = c.num_kv_heads * c.head_dim
        q, k, v = heads.split([c.num_heads * c.head_dim, kv, kv], dim=-1)
        if self.parallel is None: q, k = self.q_norm(q), self.k_norm(k)
        else: q, k = self._normalise_over_ranks(self.parallel, q, k)
        made = [each.reshape(B, T, -1, c.head_dim) for each in (q, k, v)]
        return made[0], made[1], made[2]

    def _normalise_over_ranks(self, parallel: Parallel, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k (B, T, …) of this rank's heads by the mean of squares over those of all ranks."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        squares = Tensor.cat(*(each.float().square().mean(-1, keepdim=True) for each in (q, k)), dim=-1)
        means = parallel.mean(squares, f"layers.{self.index}.norms")
        return self.q_norm(q, means[..., :1]), self.k_norm(k, means[..., 1:])

    def take_gate(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """q|k|v (B, T, …) of a projection that may have gates, (B, T, H·D) or (B, T, H): of each head its
        query, then its gate, or a gate of each head at the end."""
        c, (B, T, width) = self.config, heads.shape
        if self.gate_rows: return heads.split([int(width) - self.gate_rows, self.gate_rows], dim=-1)
        if not self.gated: return heads, None
        q, rest = heads.split([both := 2 * c.num_heads * c.head_dim, int(width) - both], dim=-1)
        q, gate = (each.reshape(B, T, -1) for each in q.reshape(B, T, c.num_heads, 2, c.head_dim).split(1, 3))
        return q.cat(rest, dim=-1), gate

    def project(self, both: Tensor, batch: DenseBatch) -> tuple[Tensor, Tensor, Tensor]:
        """q|k|v (B, T, …) to rotated q (B, H, T, D) and k, v (B, H_kv, T, D)."""
        if TRAINING and self.rope is not None and self.plain: return self.rotate_heads(both, batch, self.rope)
        q, k, v = (each.transpose(1, 2) for each in self.split(both.contiguous_backward()))
        if self.rope is not None:
            cos, sin = batch.rope_rows(self.rope, both.shape[1])
            q, k = (rotate(each, cos, sin, self.config.rope_interleaved) for each in (q, k))
        if self.temperature is not None:
            q = self.temperature.apply(q, batch.positions(both.shape[1]).unsqueeze(-1))
        return q.contiguous(), k, v

    @property
    def plain(self) -> bool:
        """Whether q and k are rotated as the matmul gives them."""
        c = self.config
        return not c.qk_norm and not c.rope_interleaved and self.temperature is None

    def rotate_heads(self, both: Tensor, batch: DenseBatch, rope: int) -> tuple[Tensor, Tensor, Tensor]:
        """Heads as of `project` of q|k|v, and their gradients, by one kernel each."""
        cos, sin = batch.rope_rows(rope, int(both.shape[1]))
        if cos.ndim == 4: cos, sin = cos.squeeze(1), sin.squeeze(1)
        return F.rotate_heads(both, cos, sin, self.config.num_heads, self.config.num_kv_heads)

    def apply_temperature(self, q: Tensor, start: Position, axis: int) -> Tensor:
        """Queries at places start, start + 1 … along an axis, times the temperature that there is."""
        if self.temperature is None: return q
        places = Tensor.arange(q.shape[axis]) + start
        return self.temperature.apply(q, places.reshape(-1, *(1,) * (q.ndim - axis - 1)))

    def append(self, heads: Tensor, batch: DenseBatch,
               cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q (B, H, T, D); keys and values (B, H_kv, start + T, D), those of q|k|v in the cache
        too."""
        start, end = batch.start, batch.start + heads.shape[1]
        if batch.lengths is not None and takes_kv_append(heads):
            q, k, v = self.split(heads.contiguous())
            # new Tensors over the same storage, so that reads depend on the appends
            keys, values = (Tensor(each.uop) for each in cache)
            tables = None if self.rope is None else batch.ropes[self.rope]
            keys, values, q = append(keys, values, q, k, v, None, batch.lengths, tables,
                                       interleaved=self.config.rope_interleaved)
            q = self.apply_temperature(q, start, 1)
            return q.transpose(1, 2), keys[:, :, :end], values[:, :, :end]
        q, *new = self.project(heads, batch)
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
        if self.window is None: return seen
        return seen & (columns >= rows - rows % self.window if self.chunked else columns > rows - self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, decoding: bool) -> Tensor:
        """softmax(scale · q kᵀ + mask) v as (B, T, H·D); softmax in float32. The mask is (T, keys), or (B, 1,
        T, keys)."""
        c, (B, _, T, _) = self.config, q.shape
        q = q.reshape(B, c.num_kv_heads, c.num_heads // c.num_kv_heads, T, c.head_dim)
        scores = q.matmul(k.unsqueeze(2).transpose(-1, -2), dtype=dtypes.float32) * self.scale
        if c.softcap is not None: scores = (scores / c.softcap).tanh() * c.softcap
        scores = scores.contiguous_backward()
        if mask is not None:
            scores = (mask.unsqueeze(1) if mask.ndim == 4 else mask).where(scores, -float("inf"))
        weights = self.softmax(scores).cast(v.dtype)
        if not takes_matmuls(weights, decoding): weights = weights.contiguous()
        out = weights.contiguous_backward() @ v.unsqueeze(2)
        out = out.reshape(B, c.num_heads, T, c.head_dim).transpose(1, 2)
        return out.reshape(B, T, c.num_heads * c.head_dim).contiguous()

    def softmax(self, scores: Tensor) -> Tensor:
        """Returns the softmax of scores (B, H_kv, G, T, keys), and the sinks that there are."""
        if self.sinks is None: return scores.softmax(-1)
        sinks = self.sinks.reshape(1, self.config.num_kv_heads, -1, 1, 1)
        top = scores.max(-1, keepdim=True).maximum(sinks).detach()
        e = (scores - top).exp()
        return e / (e.sum(-1, keepdim=True) + (sinks - top).exp())

    def flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`attend` for whole sequences with this package's attention kernel and its gradient."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, window=self.window,
                                           scale=self.config.attention_scale, softcap=self.config.softcap,
                                           sinks=self.sinks)
        # the output's matmul and the gradient of its weight read it
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1).contiguous()

    def within(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """`flash` of documents, which do not see each other; what padding gives is 0."""
        first, end = documents.bounds(self.window if self.chunked else None)
        out = F.document_attention(q, k, v, first, end, window=None if self.chunked else self.window,
                                 scale=self.config.attention_scale, softcap=self.config.softcap,
                                 sinks=self.sinks)
        # the output's matmul and the gradient of its weight read it
        return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1).contiguous()

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """Attention of heads (1, T, H, D) over sequences that lie one after the other: (1, T, H·D)."""
        q, k, v = q[0], k[0], v[0]
        if self.rope is not None:
            rows, pairs = batch.ropes[self.rope], self.config.rope_interleaved
            q, k = (rotate(each, *rows, pairs).contiguous() for each in (q, k))
        if self.temperature is not None: q = self.temperature.apply(q, batch.positions.reshape(-1, 1, 1))
        how = AttentionKind(self.rope, self.window, self.scale, self.config.softcap)
        return batch.attend(q, k, v, how).unsqueeze(0)

    def __call__(self, x: Tensor, batch: DenseBatch | PagedBatch | PackedBatch,
                 cache: Cache | None) -> Tensor:
        heads, gate = self.take_gate(self.qkv(x))
        made = self.mix(heads, batch, cache)
        if gate is None: return self.output(made)
        if self.gate_rows: gate = gate.unsqueeze(-1).expand(*gate.shape, self.config.head_dim)
        return self.output((made * gate.sigmoid().reshape(made.shape)).contiguous())

    def mix(self, heads: Tensor, batch: DenseBatch | PagedBatch | PackedBatch, cache: Cache | None) -> Tensor:
        """Attention of q|k|v (B, T, …): (B, T, H·D)."""
        if isinstance(batch, PagedBatch):
            assert isinstance(cache, LayerPages)
            c, rope, (q, k, v) = self.config, self.rope, self.split(heads.contiguous())
            if rope is not None and batch.token_ropes is not None:
                rows, rope = batch.token_ropes[rope], None
                q, k = (rotate(each[0], *rows).unsqueeze(0).contiguous() for each in (q, k))
            how = AttentionKind(rope, self.window, self.scale, c.softcap, self.chunked, self.sinks,
                                c.rope_interleaved, self.temperature)
            return batch.attend(q, k, v, cache, how)
        if isinstance(batch, PackedBatch): return self.attend_packed(*self.split(heads.contiguous()), batch)
        T = int(heads.shape[1])
        if cache is not None:
            assert isinstance(cache, tuple)
            return self.attend(*self.append(heads, batch, cache), self.mask(T, batch.start), True)
        q, k, v = self.project(heads, batch)
        k, v = k.contiguous(), v.contiguous()
        if batch.part is not None:
            made = batch.part.attend(q, k, v, self.config.attention_scale, self.config.softcap)
            return made.transpose(1, 2).reshape(*heads.shape[:2], -1).contiguous()
        documents, ours = batch.documents, takes_matmuls(q, False)
        if documents is not None and ours: return self.within(q, k, v, documents)
        if documents is None and ours and not self.chunked: return self.flash(q, k, v)
        mask = self.mask(T, batch.start) if documents is None else documents.mask(self.window, self.chunked)
        return self.attend(q, k, v, mask, False)
