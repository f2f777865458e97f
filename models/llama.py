"""Decoders of the LLaMA family as one network. `ModelConfig` has what distinguishes them (families/).

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

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import functional as F
from tinygrad_nv.kvcache.store import HybridCache, LayerBoth, LayerStates, PagedCache
from tinygrad_nv.quant.activations import QWeight
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.runtime.observe.ranges import layer
from tinygrad_nv.tile.gemm.spec import FLOAT16S

from .attention import Attention, Cache
from .config import ModelConfig
from .dense import DenseBatch, DenseKVCache, Position
from .feed_forward import FeedForward, MixtureOfExperts
from .latent import LatentAttention
from .layers import InsertedRows, RMSNorm, lookup_quantised, multiply
from .mixers import make_mixer
from .mixers.sequences import Mixer
from .paged import PackedBatch, PagedBatch, RopeTables, rope_tables

AnyMixer: TypeAlias = Attention | LatentAttention | Mixer
LayerCache: TypeAlias = Cache | LayerStates | LayerBoth

if TYPE_CHECKING:   # a program of one device does not load it
    from .parallel import Parallel


class Block:
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)); norms before or after, as `Names`
    has them. In the place of attention there may be another mixer, and either half may be missing."""

    def __init__(self, config: ModelConfig, index: int, dtype: DType, device: str | None,
                 parallel: Parallel | None = None) -> None:
        def norm(name: str) -> RMSNorm | None:
            return RMSNorm.of(config.hidden_size, config, dtype, device) if name else None
        self.config, self.parallel, self.index = config, parallel, index
        names = config.names_of(index)
        self.dtype = dtype
        self.attention: AnyMixer | None
        mixes, feeds = config.has_mixer(index), config.has_feed_forward(index)
        if not mixes: self.attention = None
        elif (mixer := config.mixer(index)) is not None:
            self.attention = make_mixer(config, mixer, index, dtype, device)
        elif config.latent is None: self.attention = Attention(config, index, dtype, device, parallel)
        else: self.attention = LatentAttention(config, config.latent, index, dtype, device)
        self.feed_forward: FeedForward | MixtureOfExperts | None
        if not feeds: self.feed_forward = None
        elif (moe := config.moe) is not None and moe.layers[index]:
            own = None if parallel is None else parallel.own_experts(moe.experts)
            self.feed_forward = MixtureOfExperts(config, moe, dtype, device, own)
        else: self.feed_forward = FeedForward(config, config.intermediate_size, dtype, device)
        self.attention_norm = norm(names.attention_norm * mixes)
        self.attention_post_norm = norm(names.attention_post_norm * mixes)
        self.feed_forward_norm = norm(names.feed_forward_norm * feeds)
        self.feed_forward_post_norm = norm(names.feed_forward_post_norm * feeds)
        # of whole sequences instead of `compute`: the same in other ways (train/regions/)
        self.region: Callable[..., Tensor] | None = None

    def begin_half(self, x: Tensor, norm: RMSNorm | None, half: str) -> Tensor:
        """The input of half of a layer."""
        if self.config.float32_residuals: x = x.cast(self.dtype)
        made = x if norm is None else norm(x)
        return made if self.parallel is None else self.parallel.begin_half(made,
                                                                           f"layers.{self.index}.{half}")

    def end_half(self, x: Tensor, made: Tensor, post: RMSNorm | None, half: str) -> Tensor:
        """x and what half of a layer makes of it."""
        if (sums := self.config.normed_sums) is not None:
            own = sums.mixer if self.config.mixer(self.index) is not None else sums.attention
            kept, added = own if half == "attention" else sums.feed_forward
            return x * kept + made * added
        if self.parallel is not None: made = self.parallel.sum_halves(made, f"layers.{self.index}.{half}")
        if post is not None: made = post(made)
        scale = self.config.residual_scale
        return x + (made if scale == 1 else made * scale)

    def end_and_begin(self, x: Tensor, made: Tensor) -> tuple[Tensor, Tensor] | None:
        """x and what attention makes of it, and the norm of that, in one kernel with the sum over ranks; None
        where there is none."""
        norm = self.feed_forward_norm
        if self.parallel is None or norm is None or norm.offset or norm.rounds_last or \
                self.attention_post_norm is not None or self.config.residual_scale != 1: return None
        name = f"layers.{self.index}.attention"
        found = self.parallel.sum_and_norm(made, x, norm.weight, norm.eps, name)
        return None if found is None else (found[1], found[0])

    def __call__(self, x: Tensor, batch: DenseBatch | PagedBatch | PackedBatch,
                 cache: LayerCache | None) -> Tensor:
        if self.region is not None and cache is None: return self.region(x, batch, cache)
        return self.compute(x, batch, cache)

    def compute(self, x: Tensor, batch: DenseBatch | PagedBatch | PackedBatch,
                 cache: LayerCache | None) -> Tensor:
        """Computes the layer for x (B, T, hidden)."""
        both = None
        if self.attention is not None:
            with layer("attention"):
                h = self.begin_half(x, self.attention_norm, "attention")
                if self.config.normed_sums is not None: x = h
                mix: Callable[..., Tensor] = self.attention     # whose cache is of its own kind
                made = mix(h, batch, cache)
                both = self.end_and_begin(x, made)
                x = self.end_half(x, made, self.attention_post_norm, "attention") if both is None else both[0]
        if self.feed_forward is None: return x.contiguous()
        with layer("feed_forward"):
            h = self.begin_half(x, self.feed_forward_norm, "feed_forward") if both is None else \
                self.begin_half(both[1], None, "feed_forward")
            if self.config.normed_sums is not None: x = h
            made = self.feed_forward(h)
            return self.end_half(x, made, self.feed_forward_post_norm, "feed_forward").contiguous()


class Llama:
    """The network. Parameters are allocated, not set: `weights.load` or `initialise` fills them. One of a
    `parallel` group has a part of it: `config` is then that part's (parallel.py)."""

    def __init__(self, config: ModelConfig, dtype: DType = dtypes.float32, device: str | None = None,
                 positions: int | None = None, parallel: Parallel | None = None) -> None:
        self.config, self.dtype, self.device, self.parallel = config, dtype, device, parallel
        self.positions = config.max_positions if positions is None else positions
        self.rope_rows = self.positions     # of the tables, at least
        rows = config.vocab_size if parallel is None else parallel.table_rows(config.vocab_size)
        # the stages of a pipeline between the first and the last have no rows of it
        embeds = parallel is None or parallel.first or (config.tied and parallel.last)
        self.embedding = Tensor.empty(rows if embeds else 0, config.hidden_size, dtype=dtype, device=device)
        self.blocks = [Block(config, i, dtype, device, parallel) for i in range(config.num_layers)]
        self.norm = RMSNorm.of(config.hidden_size, config, dtype, device)
        self.head = self.embedding
        if not config.tied:
            ends = parallel is None or parallel.last
            self.head = Tensor.empty(rows if ends else 0, config.hidden_size, dtype=dtype, device=device)
        self.quantised_head: QWeight | None = None  # instead of `head`
        self.quantised_embedding: QTensor | None = None     # instead of `embedding`
        # of a GGUF file: whether a CPU rounds inputs of its layers to int8, as llama.cpp does
        self.int8_inputs = dtype in FLOAT16S
        # of 8-bit keys and values, by layer: float32 [H_kv] each, those that the checkpoint has
        self.cache_scales: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @cached_property
    def rope_tables(self) -> tuple[RopeTables, ...]:
        """Cosines and sines of each of the config's `distinct_ropes`, (rope_rows, dim/2), rounded to the
        model's dtype, unless adjacent elements are rotated."""
        dtype = dtypes.float32 if self.config.rope_interleaved else self.dtype
        return rope_tables(self.config.distinct_ropes, self.rope_rows, self.positions, dtype, self.device)

    def batch_at(self, start: Position, shape: tuple[int, ...], cache: DenseKVCache | None,
                 lengths: Tensor | None) -> DenseBatch:
        """The positions of tokens of shape (B, T)."""
        if cache is not None and lengths is None:
            lengths = Tensor.full(shape[:1], start + shape[1], dtype=dtypes.int32, device=self.device)
            lengths = lengths.contiguous()
        return DenseBatch(start, self.rope_tables, lengths)

    def rows(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, (…, hidden), by their numbers in it."""
        if self.quantised_embedding is not None:
            return lookup_quantised(self.quantised_embedding, tokens, self.dtype)
        return F.embedding(self.embedding, tokens)

    def embed(self, tokens: Tensor) -> Tensor:
        """The first layer's input, (B, T, hidden)."""
        with layer("embedding"):
            if self.parallel is None: x = self.rows(tokens)
            else: x = self.parallel.embed(self.rows, tokens, self.config.vocab_size)
            if self.config.embedding_scale != 1.0:
                x = x * Tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
            if self.config.float32_residuals: x = x.float()
            return x.contiguous()  # gathered once: norms and residuals read it

    def hidden_states(self, tokens: Tensor, start: Position = 0, cache: DenseKVCache | None = None,
               lengths: Tensor | None = None) -> Tensor:
        """The last layer's normalised output, (B, T, hidden), for tokens (B, T) at positions start, start +
        1, …"""
        return self._states_of_step(tokens, self.batch_at(start, tokens.shape, cache, lengths), cache)

    def _states_of_step(self, tokens: Tensor, batch: DenseBatch, cache: DenseKVCache | None) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch, cache.layers[i] if cache else None)
        return self.normalise_last(x)

    def states_of_batch(self, tokens: Tensor, batch: DenseBatch) -> Tensor:
        """`hidden_states` of rows (B, T) whose positions a batch has."""
        return self.normalise_last(self.run_layers(self.embed(tokens), batch))

    def run_layers(self, x: Tensor, batch: DenseBatch) -> Tensor:
        """Runs all layers on x (B, T, hidden)."""
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch, None)
        return x

    def normalise_last(self, x: Tensor) -> Tensor:
        """The last layer's output, normalised: all tokens of it."""
        with layer("norm"):
            made = self.norm(x).cast(self.dtype)
            return made if self.parallel is None else self.parallel.gather_tokens(made)

    def states_of_packed(self, tokens: Tensor, batch: PackedBatch) -> Tensor:
        """The last layer's normalised output, (T, hidden), for tokens (T,) of the sequences in `batch`."""
        x = self.embed(tokens.reshape(1, -1))
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batch, None)
        with layer("norm"): return self.norm(x)[0].cast(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits of normalised outputs of the last layer."""
        made = self.own_logits(x)
        return made if self.parallel is None else self.parallel.vocabulary.gather(made)

    def own_logits(self, x: Tensor) -> Tensor:
        """Returns the logits of this rank's tokens, or of all."""
        c, made = self.config, multiply(x, self.head if self.quantised_head is None else self.quantised_head)
        if c.logit_divisor != 1: made = made / c.logit_divisor
        # in float32: tinygrad's tanh rounds between its operations
        if (cap := c.logit_softcap) is not None: made = ((made.float() / cap).tanh() * cap).cast(made.dtype)
        return made if self.parallel is None else self.parallel.vocabulary.pad_logits(made)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of every position, (B, T, vocab), for tokens (B, T)."""
        x = self.hidden_states(tokens)
        with layer("head"): return self.logits(x)

    def step(self, tokens: Tensor, start: Position, cache: DenseKVCache, last: Position = 0,
             lengths: Tensor | None = None) -> Tensor:
        """Appends tokens (B, T) to `cache` at `start`; float32 logits (B, vocab) of token `last` of these T.
        `lengths`, int32 (B,), is start + T if it is in memory already. Logits of a model with states are
        realized, with these."""
        batch = self.batch_at(start, tokens.shape, cache, lengths)
        row = self._states_of_step(tokens, batch, cache)[:, last:last + 1]
        with layer("head"):
            made = self.logits(row).float().reshape(tokens.shape[0], self.config.vocab_size)
        return made.realize(*batch.written) if batch.written else made

    def step_paged(self, tokens: Tensor, batch: PagedBatch | Sequence[PagedBatch],
                   cache: PagedCache | HybridCache,
                   logits_indices: Tensor | None = None, images: InsertedRows | None = None) -> Tensor:
        """Appends tokens (T,) of the sequences in `batch` to their pages; float32 logits (R, vocab) of the
        tokens `logits_indices`, int32 (R,), or of all. A rank of several gives those of its part of the
        vocabulary. Several batches: one for each group of layers of the cache, with its block tables. A stage
        of a pipeline that is not the last sends what it computes, and gives what is to be realized. Rows of
        `images` stand for some of the tokens."""
        batches, stage = (batch,) if isinstance(batch, PagedBatch) else batch, self.parallel
        if stage is None or stage.first: x = self.embed(tokens.reshape(1, -1))
        else: x = stage.receive(int(tokens.shape[0]), self.dtype, str(tokens.device))
        if images is not None: x = images.over(x)
        for i, block in enumerate(self.blocks):
            with layer(f"layers.{i}"): x = block(x, batches[cache.group(i)], cache.layers[i])
        if stage is not None and not stage.last: return stage.pass_on(x)
        with layer("norm"):
            if logits_indices is not None: x = F.embedding(x[0], logits_indices).unsqueeze(0).contiguous()
            x = self.norm(x).cast(self.dtype)
        with layer("head"):
            made = self.own_logits(x).float()
            return made.reshape(-1, int(made.shape[-1]))
