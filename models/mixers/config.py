"""Configurations of mixers: sizes of a layer that keeps a state of fixed size for each sequence.

Protocol: `ModelConfig.mixers` has one for each layer, None where the layer has attention. A mixer's `states`
are what a sequence keeps, of one layer; `parameters` counts a layer's; `width` is how many elements of a
token are in memory at a time; `sizes` are the shapes of its tensors by their names in a checkpoint, after
"model.layers.{i}.", each extent with the words that say where it comes from (models/fit.py).
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tinygrad.dtype import DType, dtypes

Extent: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class StateShape:
    """A tensor that a sequence keeps; a dtype of None is the model's."""
    shape: tuple[int, ...]
    dtype: DType | None = None

    def nbytes(self, dtype: DType) -> int:
        """Bytes of one sequence, in a model of a dtype."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


class MixerConfig(Protocol):
    """See above."""

    @property
    def states(self) -> tuple[StateShape, ...]: ...

    @property
    def width(self) -> int: ...

    def parameters(self, hidden: int) -> int: ...

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]: ...


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution of `taps` taps over `channels` (LFM2, arXiv 2511.23404, 2.1): the hidden size
    of its model. `bias` is that of its projections and of the convolution."""
    channels: int
    taps: int
    bias: bool = False

    @property
    def states(self) -> tuple[StateShape, ...]: return StateShape((self.taps - 1, self.channels)),

    @property
    def width(self) -> int: return 5 * self.channels

    def parameters(self, hidden: int) -> int:
        """Projections of three channels each and back, and taps."""
        return hidden * (4 * self.channels + self.taps) + self.bias * (4 * self.channels + hidden)

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given = ("hidden_size", hidden)
        return {"conv.conv.weight": (given, ("1", 1), ("conv_L_cache", self.taps)),
                "conv.in_proj.weight": (("3 × hidden_size", 3 * self.channels), given),
                "conv.out_proj.weight": (given, given)}


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next has it: `heads` of values with `key_heads` of keys,
    states of `d_k` x `d_v`, and a convolution of `taps` taps over queries, keys and values. `fused`: one
    projection has queries, keys, values and gates by key heads, and one β and decays; else each has its
    own. With `apart` queries, keys, values and gates have their own each, with a part of the convolution
    (OLMo Hybrid). β is up to `most`; `norm_eps` is that of the norm, None for the model's."""
    heads: int
    key_heads: int
    d_k: int
    d_v: int
    taps: int
    fused: bool = True
    apart: bool = False
    most: float = 1.0
    norm_eps: float | None = None

    @property
    def keys(self) -> int:
        """Elements of a token's keys."""
        return self.key_heads * self.d_k

    @property
    def values(self) -> int:
        """Elements of a token's values."""
        return self.heads * self.d_v

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def states(self) -> tuple[StateShape, ...]:
        return (StateShape((self.taps - 1, self.channels)),
                StateShape((self.heads, self.d_k, self.d_v), dtypes.float32))

    @property
    def width(self) -> int: return 2 * self.channels + 3 * self.values

    def parameters(self, hidden: int) -> int:
        """Projections, taps, decays and the norm."""
        made = hidden * (2 * self.keys + 3 * self.values + 2 * self.heads) + self.channels * self.taps
        return made + 2 * self.heads + self.d_v

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given, heads = ("hidden_size", hidden), ("linear_num_value_heads", self.heads)
        if self.apart: return self._sizes_apart(given, heads)
        both = "2 × linear_num_key_heads × linear_key_head_dim + "
        values = "linear_num_value_heads × linear_value_head_dim", self.values
        made: dict[str, tuple[Extent, ...]] = {
            "conv1d.weight": ((both + values[0], self.channels), ("1", 1),
                              ("linear_conv_kernel_dim", self.taps)),
            "A_log": (heads,), "dt_bias": (heads,), "norm.weight": (("linear_value_head_dim", self.d_v),),
            "out_proj.weight": (given, values)}
        if self.fused:
            made |= {"in_proj_qkvz.weight": ((f"{both}2 × {values[0]}", self.channels + self.values), given),
                     "in_proj_ba.weight": (("2 × linear_num_value_heads", 2 * self.heads), given)}
        else:
            made |= {"in_proj_qkv.weight": ((both + values[0], self.channels), given),
                     "in_proj_z.weight": (values, given), "in_proj_b.weight": (heads, given),
                     "in_proj_a.weight": (heads, given)}
        return {f"linear_attn.{name}": each for name, each in made.items()}

    def _sizes_apart(self, given: Extent, heads: Extent) -> dict[str, tuple[Extent, ...]]:
        """The sizes of projections that stand apart."""
        keys = "linear_num_key_heads × linear_key_head_dim", self.keys
        values = "linear_num_value_heads × linear_value_head_dim", self.values
        made: dict[str, tuple[Extent, ...]] = {
            "q_proj.weight": (keys, given), "k_proj.weight": (keys, given), "v_proj.weight": (values, given),
            "g_proj.weight": (values, given), "b_proj.weight": (heads, given),
            "a_proj.weight": (heads, given),
            "o_proj.weight": (given, values), "o_norm.weight": (("linear_value_head_dim", self.d_v),),
            "A_log": (heads,), "dt_bias": (heads,)}
        return {f"linear_attn.{name}": each for name, each in made.items()}


@dataclass(frozen=True)
class ChannelDeltaConfig:
    """Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay for each of the `size` channels of
    a key, of `heads` heads. Decays and gates are computed of as many elements as a head has if they are
    `narrow`, else at once. Decays are above `least`, of sigmoids, where it is a number. `shape` is that of
    their logarithms in a checkpoint."""
    heads: int
    size: int
    taps: int
    narrow: bool
    least: float | None
    shape: tuple[int, ...]

    @property
    def keys(self) -> int:
        """Elements of a token's keys, and of its values."""
        return self.heads * self.size

    @property
    def states(self) -> tuple[StateShape, ...]:
        return (StateShape((self.taps - 1, 3 * self.keys)),
                StateShape((self.heads, self.size, self.size), dtypes.float32))

    @property
    def width(self) -> int: return 13 * self.keys

    def parameters(self, hidden: int) -> int:
        """Projections, taps, decays and the norm."""
        made = hidden * (4 * self.keys + self.heads) + 3 * self.keys * self.taps
        made += 2 * self.size * (hidden + self.keys) if self.narrow else 2 * hidden * self.keys
        return made + self.heads + self.keys + self.size

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given, keys, size = ("hidden_size", hidden), ("heads × size", self.keys), ("size", self.size)
        made: dict[str, tuple[Extent, ...]] = {
            **{f"{name}_proj.weight": (keys, given) for name in "qkv"}, "b_proj.weight": (
                ("heads", self.heads), given), "o_proj.weight": (given, keys), "o_norm.weight": (size,),
            "dt_bias": (keys,)}
        if self.narrow:
            for name in "fg":
                made |= {f"{name}_a_proj.weight": (size, given), f"{name}_b_proj.weight": (keys, size)}
        else: made |= {f"{name}_proj.weight": (keys, given) for name in "fg"}
        return {f"self_attn.{name}": each for name, each in made.items()}


@dataclass(frozen=True)
class LightningConfig:
    """Lightning attention (arXiv 2401.04658) as MiniMax-01 has it: `heads` of `size` elements. Head h of H
    keeps exp(−slope · 2^(−8 (h + 1) / H)) of its state at each token."""
    heads: int
    size: int
    slope: float

    @property
    def inner(self) -> int:
        """Elements of a token's values."""
        return self.heads * self.size

    @property
    def states(self) -> tuple[StateShape, ...]:
        return StateShape((self.heads, self.size, self.size), dtypes.float32),

    @property
    def width(self) -> int: return 7 * self.inner

    def parameters(self, hidden: int) -> int:
        """Projections and the norm."""
        return 5 * hidden * self.inner + self.inner

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given, inner = ("hidden_size", hidden), ("num_attention_heads × head_dim", self.inner)
        made: dict[str, tuple[Extent, ...]] = {
            "qkv_proj.weight": ((f"3 × {inner[0]}", 3 * self.inner), given), "norm.weight": (inner,),
            "output_gate.weight": (inner, given), "out_proj.weight": (given, inner)}
        return {f"self_attn.{name}": each for name, each in made.items()}


@dataclass(frozen=True)
class Mamba2Config:
    """Mamba-2 (arXiv 2405.21060): `heads` of `head` elements with states of `head` x `state`; `groups` of
    heads share B and C. Time steps stay within `limits`. `bias` is that of projections, `conv_bias` that of
    the convolution of `taps` taps. Results are `normalised` by groups, after the gate unless it `gates_last`.
    `name` is that of its module in a checkpoint. `scales` multiply its input, and of what the projection
    gives the gate, x, B, C and time steps."""
    heads: int
    head: int
    groups: int
    state: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    limits: tuple[float, float] | None = None
    normalised: bool = True
    gates_last: bool = False
    name: str = "mamba"
    output_bias: bool | None = None     # None: as `bias`
    scales: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Elements of a token's values."""
        return self.heads * self.head

    @property
    def key_width(self) -> int:
        """Elements of a token's B, and of its C."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.key_width

    @property
    def input_width(self) -> int:
        """Rows of the projection: gate, channels of the convolution, time steps."""
        return self.inner + self.channels + self.heads

    @property
    def states(self) -> tuple[StateShape, ...]:
        return (StateShape((self.taps - 1, self.channels)),
                StateShape((self.heads, self.state, self.head), dtypes.float32))

    @property
    def width(self) -> int: return self.input_width + 4 * self.inner

    def parameters(self, hidden: int) -> int:
        """Projections, taps, decays, steps and skips, the norm."""
        made = hidden * (self.input_width + self.inner) + self.bias * self.input_width
        made += hidden * (self.bias if self.output_bias is None else self.output_bias)
        made += self.channels * (self.taps + self.conv_bias) + 3 * self.heads
        return made + self.inner * self.normalised

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given, heads, inner = ("hidden_size", hidden), ("heads", self.heads), ("heads × head", self.inner)
        channels = "heads × head + 2 × groups × state", self.channels
        made: dict[str, tuple[Extent, ...]] = {
            "conv1d.weight": (channels, ("1", 1), ("taps", self.taps)),
            "A_log": (heads,), "dt_bias": (heads,), "D": (heads,), "out_proj.weight": (given, inner),
            "in_proj.weight": (("2 × heads × head + 2 × groups × state + heads", self.input_width), given)}
        if self.normalised: made["norm.weight"] = inner,
        return {f"{self.name}.{name}": each for name, each in made.items()}


@dataclass(frozen=True)
class BesideConfig:
    """A mixer beside attention in one layer, whose results are added (Falcon-H1, arXiv 2507.22448): what
    attention is given is multiplied by `inputs`, what it makes by `outputs`, and what the mixer makes by
    `mixed`."""
    mixer: MixerConfig
    inputs: float = 1.0
    outputs: float = 1.0
    mixed: float = 1.0

    @property
    def states(self) -> tuple[StateShape, ...]: return self.mixer.states

    @property
    def width(self) -> int: return self.mixer.width

    def parameters(self, hidden: int) -> int:
        """Parameters of the mixer: attention is counted with that of other layers."""
        return self.mixer.parameters(hidden)

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]: return self.mixer.sizes(hidden)


@dataclass(frozen=True)
class MambaConfig:
    """Mamba (arXiv 2312.00752): `channels` with `state` states each; their time steps are projected of `rank`
    elements. `bias` is that of projections in and out, `conv_bias` that of the convolution of `taps` taps. B,
    C and what steps are projected of are normalised where there is a `norm_eps`, with weights unless they are
    `weightless`. `name` is that of its module in a checkpoint."""
    channels: int
    state: int
    rank: int
    taps: int
    bias: bool = False
    conv_bias: bool = True
    norm_eps: float | None = None
    weightless: bool = False
    name: str = "mixer"

    @property
    def selection(self) -> int:
        """Elements of what steps are projected of, B and C of a token."""
        return self.rank + 2 * self.state

    @property
    def has_norms(self) -> bool:
        """Whether there are norms with weights."""
        return self.norm_eps is not None and not self.weightless

    @property
    def states(self) -> tuple[StateShape, ...]:
        return (StateShape((self.taps - 1, self.channels)),
                StateShape((self.state, self.channels), dtypes.float32))

    @property
    def width(self) -> int: return 7 * self.channels + 2 * self.selection

    def parameters(self, hidden: int) -> int:
        """Projections, taps, decays and skips, norms."""
        made = 3 * hidden * self.channels + self.bias * (2 * self.channels + hidden)
        made += self.channels * (self.taps + self.conv_bias + self.selection + self.rank + self.state + 2)
        return made + self.selection * self.has_norms

    def sizes(self, hidden: int) -> dict[str, tuple[Extent, ...]]:
        given, channels, rank = ("hidden_size", hidden), ("channels", self.channels), ("rank", self.rank)
        made: dict[str, tuple[Extent, ...]] = {
            "in_proj.weight": (("2 × channels", 2 * self.channels), given), "dt_proj.bias": (channels,),
            "x_proj.weight": (("rank + 2 × states", self.selection), channels),
            "dt_proj.weight": (channels, rank), "conv1d.weight": (channels, ("1", 1), ("taps", self.taps)),
            "A_log": (channels, ("states", self.state)), "D": (channels,),
            "out_proj.weight": (given, channels)}
        return {f"{self.name}.{name}": each for name, each in made.items()}
