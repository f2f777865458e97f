"""Mixers: what a layer may have in the place of attention, with states of a fixed size.

  config.py        their configurations: sizes, states, parameters
  sequences.py     the sequences of a step and their states, whatever the batch is
  short_conv.py    gated short convolutions (LFM2)
  gated_delta.py   the gated delta rule (Qwen3-Next, OLMo Hybrid)
  channel_delta.py the delta rule with decays of channels (Kimi Linear, Ling 3)
  lightning.py     lightning attention: sums with constant decays (MiniMax-01)
  mamba.py         Mamba's selective scans (Mamba, Falcon Mamba, Jamba)
  mamba2.py        Mamba-2's state spaces (Bamba, Granite 4, Nemotron-H)
  beside.py        attention and a mixer in one layer (Falcon-H1)

`make_mixer` makes a layer's by its configuration.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from .config import (
    BesideConfig,
    ChannelDeltaConfig,
    GatedDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    MixerConfig,
    ShortConvConfig,
)

if TYPE_CHECKING:
    from tinygrad.dtype import DType

    from ..config import ModelConfig
    from .sequences import Mixer


def make_mixer(config: ModelConfig, own: MixerConfig, index: int, dtype: DType, device: str | None) -> Mixer:
    """The mixer of layer `index`, whose parameters are allocated and not set."""
    from .beside import Beside
    from .channel_delta import ChannelDelta
    from .gated_delta import GatedDelta
    from .lightning import Lightning
    from .mamba import Mamba
    from .mamba2 import Mamba2
    from .short_conv import ShortConv
    if isinstance(own, ShortConvConfig): return ShortConv(config, own, dtype, device)
    if isinstance(own, BesideConfig):
        return Beside(config, own, make_mixer(config, own.mixer, index, dtype, device), index, dtype, device)
    if isinstance(own, MambaConfig): return Mamba(config, own, dtype, device)
    if isinstance(own, ChannelDeltaConfig): return ChannelDelta(config, own, dtype, device)
    if isinstance(own, LightningConfig): return Lightning(config, own, dtype, device)
    if isinstance(own, Mamba2Config): return Mamba2(config, own, dtype, device)
    assert isinstance(own, GatedDeltaConfig)
    return GatedDelta(config, own, dtype, device)
