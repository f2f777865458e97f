"""Multi-head latent attention of a layer (MLA; DeepSeek-V2, arXiv 2405.04434, §2.1).

Protocol: as `Attention` (attention.py). The cache has one vector for each token: the rotated key that heads
share, then the normalised latent. Two forms compute the same:

    expanded   keys and values of all heads are computed of the latents, and attention is that of any model:
               without a cache
    absorbed   queries are multiplied by each head's key matrix, attention is over latents themselves
               (`latent_attention`), and results are multiplied by the head's value matrix: with a cache

With DeepSeek-V3's sizes the absorbed form takes 2 · (576 + 512) operations for a query head and a key, the
expanded 2 · (192 + 128), and 2 · 512 · 256 more for each key of a step, whatever its number of queries. The
absorbed form is thus the cheaper one up to 170 queries of a sequence in a step, needs no memory for expanded
keys and values, and makes a token's result the same in chunks of any size.
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.kvcache.store import LayerPages

from .attention import Cache, rotate, takes_kv_append, takes_matmuls
from .config import ModelConfig
from .dense import DenseBatch, Position
from .layer_config import LatentConfig
from .layers import Linear, RMSNorm, StoredLinear
from .paged import PackedBatch, PagedBatch, RopeTables

NORM_EPS = 1e-6     # of norms between ranks, whatever rms_norm_eps is


class LatentAttention:
    """The attention of layer `index`."""

    def __init__(self, config: ModelConfig, latent: LatentConfig, index: int, dtype: DType,
                 device: str | None) -> None:
        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias, dtype, device)

        def norm(width: int) -> RMSNorm:
            return RMSNorm.of(width, replace(config, norm_eps=NORM_EPS), dtype, device)
        assert config.attention_scale is not None
        self.latent, self.heads, self.scale = latent, config.num_heads, config.attention_scale
        self.rope = config.rope_indices[index]
        hidden, rank, q_rank = config.hidden_size, latent.rank, latent.q_rank
        self.q_a = linear(hidden, q_rank, latent.bias) if q_rank else None
        self.q_norm = norm(q_rank) if q_rank else None
        self.q = linear(q_rank or hidden, self.heads * latent.head)
        self.kv_a = linear(hidden, rank + latent.rope, latent.bias)
        self.kv_norm = norm(rank)
        # of each head the rows of keys, then those of values
        self.kv_b = linear(rank, self.heads * (latent.nope + latent.value))
        self.gate = linear(hidden, self.heads) if latent.gated else None
        self.output = linear(self.heads * latent.value, hidden, config.output_bias)

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        q = "q_b_proj" if self.q_a is not None else "q_proj"
        made = [(self.q, q), (self.kv_a, "kv_a_proj_with_mqa"), (self.kv_b, "kv_b_proj"),
                (self.output, "o_proj")]
        if self.q_a is not None: made.insert(0, (self.q_a, "q_a_proj"))
        if self.gate is not None: made.append((self.gate, "g_proj"))
        return [(each, (f"self_attn.{name}",), (int(each.weight.shape[0]),)) for each, name in made]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norms by their names in a checkpoint."""
        made = {"self_attn.kv_a_layernorm": self.kv_norm}
        return made if self.q_norm is None else {"self_attn.q_a_layernorm": self.q_norm, **made}

    # **** queries and latents ****

    def queries(self, x: Tensor) -> Tensor:
        """(B, T, H, nope + rope) of x (B, T, hidden), not rotated."""
        if self.q_a is not None and self.q_norm is not None: x = self.q_norm(self.q_a(x).contiguous())
        return self.q(x).contiguous().reshape(*x.shape[:2], self.heads, self.latent.head)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The key that heads share (B, T, rope), not rotated, and the latent (B, T, rank)."""
        latent, rope = self.kv_a(x).contiguous().split([self.latent.rank, self.latent.rope], dim=-1)
        return rope, self.kv_norm(latent)

    def dequantize(self) -> None:
        """Has the matrix of keys and values in floats, if a checkpoint has quantised it: steps with a cache
        take it apart by heads."""
        if not self.kv_b.parts: return
        # rows of one 1, which no rounding of inputs changes
        one, old = Tensor.eye(self.latent.rank), self.kv_b.weight
        made = self.kv_b(one.to(old.device).cast(old.dtype).contiguous().realize())
        self.kv_b.weight, self.kv_b.parts = made.T.contiguous().realize(), ()

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Returns the matrices of each head, for keys (H, nope, rank) and values (H, value, rank)."""
        c = self.latent
        both = self.kv_b.weight.reshape(self.heads, c.nope + c.value, c.rank)
        return both[:, :c.nope], both[:, c.nope:]

    def absorb(self, q: Tensor) -> Tensor:
        """Queries (B, T, H, rope + rank) for the cache's vectors, not rotated."""
        (B, T, *_), c = q.shape, self.latent
        nope, rope = q.split([c.nope, c.rope], dim=-1)
        moved = nope.reshape(B * T, self.heads, c.nope).transpose(0, 1) @ self.matrices()[0]
        return rope.cat(moved.transpose(0, 1).reshape(B, T, self.heads, c.rank), dim=-1).contiguous()

    def project_out(self, x: Tensor, out: Tensor) -> Tensor:
        """The layer's result of weighted latents (B, T, H, rank) of tokens x."""
        B, T = out.shape[:2]
        each = out.reshape(B * T, self.heads, self.latent.rank).transpose(0, 1)
        values = (each @ self.matrices()[1].transpose(1, 2)).transpose(0, 1)
        return self.join(x, values.reshape(B, T, self.heads, self.latent.value))

    def join(self, x: Tensor, values: Tensor) -> Tensor:
        """The layer's result of values (B, T, H, value) of tokens x, with their gates."""
        if self.gate is not None:
            values = values * self.gate(x).float().sigmoid().cast(values.dtype).unsqueeze(-1)
        return self.output(values.reshape(*x.shape[:2], -1).contiguous())

    # **** with a cache ****

    def append(self, keys: Tensor, new: Tensor, q: Tensor, table: Tensor | None, lengths: Tensor,
                 rope: RopeTables | None) -> tuple[Tensor, Tensor]:
        """`kv_append` of vectors (B, T, 1, width): the cache, and q, rotated both if there is a rope."""
        if rope is None: return F.kv_append(keys, None, new, None, table, lengths)[0], q
        keys, q = F.kv_append(keys, None, new, None, table, lengths, cos=rope[0], sin=rope[1], q=q,
                            interleaved=self.latent.interleaved, rounded=True)
        return keys, q

    def attend_paged(self, x: Tensor, batch: PagedBatch, pages: LayerPages) -> Tensor:
        """Weighted latents (1, T, H, rank) of tokens x (1, T, hidden), which are appended to the pages."""
        q, vectors = self.absorb(self.queries(x)), self.vectors(x)
        keys, rope = Tensor(pages.keys.uop), None if self.rope is None else batch.ropes[self.rope]
        queries, first = [], 0
        for group in batch.groups:
            end, each = first + group.num_tokens, group.tokens_per_sequence
            own_q, own = (t[0, first:end].reshape(-1, each, *t.shape[2:]) for t in (q, vectors))
            keys, rotated = self.append(keys, own, own_q, group.table, group.lengths, rope)
            queries.append(rotated.cast(keys.dtype))
            first = end
        out = [F.latent_attention(rotated, keys, group.table, group.lengths, value_dim=self.latent.rank,
                                scale=self.scale).cast(q.dtype).reshape(1, -1, self.heads, self.latent.rank)
               for group, rotated in zip(batch.groups, queries, strict=True)]
        return (out[0] if len(out) == 1 else out[0].cat(*out[1:], dim=1)).contiguous()

    def vectors(self, x: Tensor) -> Tensor:
        """Returns the vectors that the cache holds of tokens: (B, T, 1, rope + rank), not rotated."""
        rope, latent = self.latents(x)
        return rope.cat(latent, dim=-1).unsqueeze(2).contiguous()

    def dense(self, x: Tensor, batch: DenseBatch, cache: Tensor) -> Tensor:
        """Weighted latents (B, T, H, rank) of tokens x, which are appended to a contiguous cache."""
        start, end, c = batch.start, batch.start + x.shape[1], self.latent
        q, new = self.absorb(self.queries(x)), self.vectors(x)
        if batch.lengths is not None and takes_kv_append(x):
            # a new Tensor over the same storage, so that reads depend on the append
            rope = None if self.rope is None else batch.ropes[self.rope]
            cache, q = self.append(Tensor(cache.uop), new, q, None, batch.lengths, rope)
            q = q.transpose(1, 2)
        else:
            q, new = (self.rotate_first(each.transpose(1, 2), batch) for each in (q, new))
            cache = Tensor(cache.uop.after(cache[:, :, start:end].uop.store(new.uop)))
        keys = cache[:, :, :end]
        return self.attend(q.contiguous(), keys, keys[..., c.rope:], start, True)

    # **** without ****

    def expand(self, x: Tensor, batch: DenseBatch) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (B, H, T, nope + rope), rotated, and v (B, H, T, value)."""
        (B, T, _), c = x.shape, self.latent
        nope, rope = self.queries(x).transpose(1, 2).split([c.nope, c.rope], dim=-1)
        shared, latent = self.latents(x)
        both = self.kv_b(latent).contiguous().reshape(B, T, self.heads, c.nope + c.value).transpose(1, 2)
        k, v = both.split([c.nope, c.value], dim=-1)
        # contiguous: fused with `cat`, clang calls a function for bfloat16 that tinygrad does not link
        shared = self.rotate_first(shared.unsqueeze(1), batch)
        shared = shared.expand(B, self.heads, T, c.rope).contiguous()
        q = nope.cat(self.rotate_first(rope, batch).contiguous(), dim=-1)
        return q.contiguous(), k.cat(shared, dim=-1).contiguous(), v.contiguous()

    def rotate_first(self, x: Tensor, batch: DenseBatch) -> Tensor:
        """The first elements of x (B, H, T, D) turned by the angles of a batch's positions; x without a
        rope."""
        if self.rope is None: return x
        cos, sin = batch.rope_rows(self.rope, x.shape[2])
        if not self.latent.interleaved: return rotate(x, cos, sin)
        turning, rest = x[..., :self.latent.rope], x[..., self.latent.rope:]
        pairs = turning.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        made = Tensor.stack(a * cos - b * sin, b * cos + a * sin, dim=-1).reshape(turning.shape)
        return made.cat(rest, dim=-1) if rest.shape[-1] else made

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: Position, decoding: bool,
               mask: Tensor | None = None) -> Tensor:
        """softmax(scale · q kᵀ) v of q (B, H, T, D), the first of which stands at `start`, as (B, T, H, D_v);
        one key head for all, or one for each. A mask (B, 1, T, T) takes the place of the causal one."""
        T = q.shape[2]
        scores = q.matmul(k.transpose(-1, -2), dtype=dtypes.float32).contiguous_backward() * self.scale
        if mask is not None: scores = mask.where(scores, -float("inf"))
        elif T > 1:
            seen = Tensor.arange(start + T).reshape(1, -1) <= Tensor.arange(T).reshape(T, 1) + start
            scores = seen.where(scores, -float("inf"))
        weights = scores.softmax(-1).cast(v.dtype)
        if not takes_matmuls(weights, decoding): weights = weights.contiguous()
        return (weights.contiguous_backward() @ v).transpose(1, 2).contiguous()

    def __call__(self, x: Tensor, batch: DenseBatch | PagedBatch | PackedBatch,
                 cache: Cache | None) -> Tensor:
        assert not isinstance(batch, PackedBatch), "refused by embedding_model.py"
        if isinstance(batch, PagedBatch):
            assert isinstance(cache, LayerPages)
            return self.project_out(x, self.attend_paged(x, batch, cache))
        if cache is not None:
            assert isinstance(cache, tuple)
            return self.project_out(x, self.dense(x, batch, cache[0]))
        q, k, v = self.expand(x, batch)
        documents = batch.documents
        if not takes_matmuls(q, False):
            mask = None if documents is None else documents.mask(None, False)
            out = self.attend(q, k, v, batch.start, False, mask)
        elif documents is not None:
            out = F.document_attention(q, k, v, *documents.bounds(), scale=self.scale).transpose(1, 2)
        else: out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2)
        return self.join(x, out)
