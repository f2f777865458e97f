"""The kernels of a layer on one rank, and how long they take.

Protocol: `Layer(rank, i, layout, device, kind)` is layer i of the model that `layout.rank_config` gives for a
rank. Sizes are those of matrices as the rank holds them: `matmuls` are the (n, k) of dense matrices,
`experts` those of each expert's. `rows(tokens)` is how many rows all experts of the rank multiply.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from tinygrad_nv.dist.plan import compute
from tinygrad_nv.dist.plan.cluster import Device
from tinygrad_nv.dist.plan.layout import HALF, Layout
from tinygrad_nv.models.config import ModelConfig

INFERENCE_KERNELS = 3   # of a layer: two norms, and what rotates queries and appends keys and values


@dataclass(frozen=True)
class Seconds:
    """Seconds of kernels, by what they do."""
    matmul: float = 0.0
    attention: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """One after the other."""
        return self.matmul + self.attention + self.other

    def __add__(self, more: Seconds) -> Seconds:
        return Seconds(self.matmul + more.matmul, self.attention + more.attention, self.other + more.other)

    def times(self, count: float) -> Seconds:
        """So often."""
        return Seconds(self.matmul * count, self.attention * count, self.other * count)


@dataclass(frozen=True)
class Layer:
    """Layer `i` of a rank's share; matrices of type `kind`."""
    rank: ModelConfig = field(repr=False)
    i: int
    layout: Layout
    device: Device
    kind: str

    @property
    def mixture(self) -> bool:
        """Whether it has experts."""
        return self.rank.moe is not None and self.rank.moe.layers[self.i]

    @property
    def value_width(self) -> int:
        """Elements of a token's result of attention."""
        c = self.rank
        return c.num_heads * (c.latent.value if c.latent is not None else c.head_dim)

    @property
    def matmuls(self) -> list[tuple[int, int]]:
        """Dense matrices: those of attention, then those of the feed-forward or of the shared expert."""
        c = self.rank
        if (latent := c.latent) is not None:
            queries = c.num_heads * latent.head
            made = [(latent.q_rank, c.hidden_size), (queries, latent.q_rank)] if latent.q_rank else \
                [(queries, c.hidden_size)]
            made += [(latent.width, c.hidden_size), (c.num_heads * (latent.nope + latent.value), latent.rank)]
        else: made = [((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.hidden_size)]
        made.append((c.hidden_size, self.value_width))
        width = c.intermediate_size
        if self.mixture and c.moe is not None: width = c.moe.shared_width
        return made + ([(2 * width, c.hidden_size), (c.hidden_size, width)] if width else [])

    @property
    def experts(self) -> list[tuple[int, int]]:
        """Matrices of each expert."""
        c = self.rank
        if not self.mixture or c.moe is None: return []
        return [(2 * c.moe.width, c.hidden_size), (c.hidden_size, c.moe.width)]

    def rows(self, tokens: int) -> int:
        """Returns the rows of this rank's experts, where each data-parallel rank has so many tokens."""
        assert self.rank.moe is not None
        return max(1, tokens * self.rank.moe.policy.k // (self.layout.tp if self.layout.ep > 1 else 1))

    def operations(self, tokens: int) -> float:
        """Returns the operations of matmuls."""
        made = 2.0 * tokens * sum(n * k for n, k in self.matmuls)
        return made + 2.0 * sum(self.rows(tokens) * n * k for n, k in self.experts)

    # **** times ****

    def matmul_s(self, tokens: int) -> float:
        """Seconds of all matmuls."""
        made = sum(compute.matmul(self.device, tokens, n, k, self.kind) for n, k in self.matmuls)
        return made + self._experts(tokens, transposed=False)

    def gradients(self, tokens: int) -> float:
        """Seconds of the matmuls of a backward pass: of inputs, and of matrices."""
        made = 0.0
        for n, k in self.matmuls:
            made += compute.matmul(self.device, tokens, k, n, self.kind)
            made += compute.matmul(self.device, n, k, tokens, self.kind)
        return made + 2 * self._experts(tokens, transposed=True)

    def _experts(self, tokens: int, transposed: bool) -> float:
        if not self.experts: return 0.0
        assert self.rank.moe is not None
        rows = self.rows(tokens)
        shapes = [(k, n) if transposed else (n, k) for n, k in self.experts]
        return sum(compute.expert_matmul(self.device, self.rank.moe.experts, rows, *shape, self.kind)
                   for shape in shapes)

    def prefill(self, tokens: int, length: int) -> Seconds:
        """A forward pass of whole sequences of a length."""
        return Seconds(self.matmul_s(tokens), self.attention_s(tokens, length), self._inference(tokens))

    def decode(self, tokens: int, context: int, cache_bytes: float) -> Seconds:
        """One token each of so many sequences of `context` tokens, over so many bytes of the cache in all."""
        c, latent, window = self.rank, self.rank.latent, self.rank.windows[self.i]
        elements = 2 * c.head_dim if latent is None else latent.width + latent.rank
        seen = context if window is None else min(context, window)
        done = 2.0 * tokens * seen * c.num_heads * elements
        return Seconds(self.matmul_s(tokens), compute.decode_attention(self.device, cache_bytes, done),
                       self._inference(tokens))

    def _inference(self, tokens: int) -> float:
        """Norms and what appends; the gate is in the matmul's epilogue."""
        c = self.rank
        nbytes = HALF * tokens * (8 * c.hidden_size + 2 * c.attention_width)
        if not self.mixture: return compute.move(self.device, nbytes, INFERENCE_KERNELS)
        more = HALF * self.rows(tokens) * c.hidden_size
        return compute.move(self.device, nbytes + more, INFERENCE_KERNELS + 2)

    def attention_s(self, tokens: int, length: int, backward: bool = False) -> float:
        """Causal attention of whole sequences; a backward pass has 2.5 times the operations."""
        c, window = self.rank, self.rank.windows[self.i]
        seen = length / 2 if window is None or window >= length else window
        latent = c.latent
        d = c.head_dim if latent is None else (latent.head + latent.value) / 2
        done = 4.0 * tokens * seen * c.num_heads * d * (2.5 if backward else 1.0)
        return compute.attention(self.device, done, length, c.head_dim, backward)

    def elementwise(self, tokens: int) -> float:
        """Bytes of a forward pass in training: norms and residuals, rotation, gate; casts to fp8."""
        c, hidden = self.rank, self.rank.hidden_size / (self.layout.tp if self.layout.sp else 1)
        wide = float(sum(n for n, _ in self.matmuls[-2:-1]))
        rows = self.rows(tokens) / tokens if self.mixture else 0.0
        wide += rows * (sum(n for n, _ in self.experts[:1]) + 2 * c.hidden_size)
        made = HALF * (8 * hidden + 2 * c.attention_width + 1.5 * wide)
        return tokens * (made + self._cast(tokens))

    def _cast(self, tokens: int) -> float:
        """Bytes a token, of inputs of matmuls: largest values, then codes; and of matrices."""
        if self.kind != "fp8": return 0.0
        inputs = sum(k for _, k in self.matmuls) + \
            (self.rows(tokens) / tokens * sum(k for _, k in self.experts) if self.mixture else 0.0)
        return 5.0 * inputs + 3.0 * sum(n * k for n, k in self.matmuls) / tokens
