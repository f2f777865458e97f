"""Parts of a layer's configuration that differ from family to family: mixture of experts, latent attention,
names of tensors, temperature of queries.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.errors import ModelError, SpecError
from tinygrad_nv.tile.router.spec import Policy, Score

from .fields import Fields


@dataclass(frozen=True)
class MoEConfig:
    """`experts` of `width` columns between gate | up and down, in the layers that `layers` says; `policy`
    chooses them. `shared_width` is that of the expert that every token has, 0 for none; with `shared_gate`
    it is multiplied with the sigmoid of a logit. `choice_bias`: scores have a bias where experts are chosen;
    `exact_router`: logits are computed in float32. `biased`: router and experts have biases. `scaled_inputs`:
    weights multiply what an expert is given, not what it makes. Unless `gated` an expert is down(act(up(x))).
    With `latent` experts take and give so many elements, between two projections that all share."""
    experts: int
    width: int
    policy: Policy
    layers: tuple[bool, ...]
    shared_width: int = 0
    shared_gate: bool = False
    choice_bias: bool = False
    exact_router: bool = False
    biased: bool = False
    scaled_inputs: bool = False
    gated: bool = True
    latent: int = 0

    @property
    def inner(self) -> int:
        """Rows of an expert's first matrix."""
        return (1 + self.gated) * self.width

    def parameters(self, hidden: int) -> int:
        """Returns the number of parameters of one layer, without biases of what all tokens have."""
        made = self.experts * (self.inner + self.width) * (self.latent or hidden) + 2 * hidden * self.latent
        made += hidden * (self.experts + (2 + self.gated) * self.shared_width + self.shared_gate)
        if self.biased: made += self.experts * (1 + 2 * self.width + hidden)
        return made + self.experts * self.choice_bias

    def activation_bytes(self, hidden: int, itemsize: int) -> int:
        """Bytes of one token's activations in a layer: for each of its experts a row of act(gate) · up and
        one that down makes, and the shared expert's. They exist once, as kernels read tokens' rows where they
        lie. Of all experts there are float32 logits and scores only."""
        rows = self.policy.k * (self.width + hidden) + 3 * self.shared_width + hidden
        return rows * itemsize + 2 * self.experts * 4

    def distinct(self, tokens: int) -> float:
        """Expected number of distinct experts of `tokens` tokens in a layer, where each expert is as likely
        as any other: all tokens miss one with probability (1 - k / experts) ^ tokens."""
        return self.experts * (1 - (1 - self.policy.k / self.experts) ** tokens)

    def inactive(self, hidden: int, tokens: int = 1) -> float:
        """Expected parameters of one layer's experts that none of `tokens` tokens has."""
        each = (self.inner + self.width) * (self.latent or hidden)
        return each * (self.experts - self.distinct(tokens))


COUNTS = ("num_local_experts", "num_experts")     # transformers takes either


def moe_config(f: Fields, default: int, width: str, layers: Sequence[bool], shared_width: int = 0,
               shared_gate: bool = False, renormalize: bool = True, keys: tuple[str, ...] = COUNTS,
               score: Score = "softmax", **more: bool) -> MoEConfig:
    """Returns the mixture of `default` experts where the file says no number under `keys`, and the key of
    their width; `more` fields. Raises `ModelError`."""
    counts = {f.positive(key) for key in keys if f.get(key) is not None} or {default}
    if len(counts) > 1:
        raise ModelError(f"{f.name}: " + ", ".join(f"{key} is {f.get(key)}" for key in keys),
                         "one number of experts", "correct the file, or download it again")
    count, k = counts.pop(), f.positive("num_experts_per_tok")
    try: policy = Policy(k, score, renormalize)
    except SpecError as error: raise ModelError(f"{f.name}: {error.found}", error.expected) from error
    if k > count:
        raise ModelError(f"{f.name}: num_experts_per_tok is {k}, of {count} experts", "as many, at most")
    return MoEConfig(count, f.positive(width), policy, tuple(layers), shared_width, shared_gate, **more)


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A token's keys and values are
    computed of its latent, `rank` elements; `rope` elements of key and query are rotated, by pairs 2i and
    2i + 1 where `interleaved`, `nope` are not. Values have `value` elements. Queries are computed of
    `q_rank` elements, or at once (0). `bias` is that of projections to ranks. With `gated` what a head gives
    is multiplied by the sigmoid of a logit."""
    q_rank: int
    rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True
    bias: bool = False
    gated: bool = False

    @property
    def width(self) -> int:
        """Elements of a token in the cache."""
        return self.rope + self.rank

    @property
    def head(self) -> int:
        """Elements of a head's query."""
        return self.nope + self.rope

    def parameters(self, hidden: int, heads: int) -> int:
        """Returns the number of parameters of one layer, without its output projection."""
        made = (hidden + self.bias) * self.width + self.rank * (1 + heads * (self.nope + self.value))
        made += hidden * heads * self.gated
        if not self.q_rank: return made + hidden * heads * self.head
        return made + self.q_rank * (hidden + self.bias + 1 + heads * self.head)


@dataclass(frozen=True)
class Names:
    """Names of a layer's modules in a checkpoint, after "model.layers.{i}."; a norm whose name is "" is not
    there. Several names of a matrix are its rows, one after the other. `fused`: experts are stored as
    parts.py says, gate and up "interleaved", as "halves" or as "rows", in tensors of these names; those of
    `shared_matrices` are the shared expert's, if they differ from other experts'."""
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
    expert_matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    fused: str = ""
    fused_tensors: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    shared_expert: str = "mlp.shared_expert"
    shared_matrices: tuple[str, ...] = ()
    latents: tuple[str, str] = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")
    sinks: str = "self_attn.sinks"
    last_norm: str = "model.norm"       # after all layers
    unread: tuple[str, ...] = ()        # how names of tensors begin that are for something else
    unread_ends: tuple[str, ...] = ()   # and how they end
    spellings: tuple[tuple[str, str], ...] = ()     # parts of other names in files, and of these

    def spell(self, name: str) -> str:
        """The name here of a tensor in a file."""
        for theirs, own in self.spellings: name = name.replace(theirs, own)
        return name

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms of a layer's hidden states that there are."""
        every = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm,
                 self.feed_forward_post_norm)
        return tuple(name for name in every if name)


LLAMA_NAMES = Names()


@dataclass(frozen=True)
class NormedSums:
    """Factors of halves of layers that add what they make to their normalised input (MiniMax-01, arXiv
    2501.08313): of that input, then of what they make."""
    attention: tuple[float, float]
    mixer: tuple[float, float]
    feed_forward: tuple[float, float]


@dataclass(frozen=True)
class Temperature:
    """Scalable-Softmax (arXiv 2501.19399): queries at place t are multiplied by
    1 + scale · log(1 + ⌊(t + 1) / floor⌋)."""
    floor: float
    scale: float

    def apply(self, q: Tensor, places: Tensor) -> Tensor:
        """Queries at `places`, whose shape is broadcast."""
        steps = ((places.maximum(0) + 1).float() / self.floor).floor()
        return (q * ((steps + 1).log() * self.scale + 1)).cast(q.dtype)
