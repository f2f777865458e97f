"""How attention and its gradient are computed: the schedules of their templates.

Protocol: each type has the fields that its kernel reads. What can be is decided by `problems` of each
template's plan.py; templates.py has the candidates.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.schedule import Mode, RowWarps, Schedule, Tiled, Warpgroups, Warps, count_words


@dataclass(frozen=True)
class TiledSchedule(Tiled, Schedule, ABC):
    """Rows of queries by columns of keys, `block_m` × `block_n` at a time, in `depth` stages."""
    depth: int = 2
    UNREAD: ClassVar[tuple[str, ...]] = ("block_k", "group")

    @property
    def near(self) -> tuple[Self, ...]: return (self.stages(self.depth + 1),)

    def words(self) -> list[str]:
        return [f"{self.block_m}x{self.block_n}", self.warp_words(), count_words(self.depth, "stage")]

    @abstractmethod
    def warp_words(self) -> str:
        """Its warps, as it shows them."""


@dataclass(frozen=True)
class FlashMma(RowWarps, TiledSchedule):
    """mma.sync: each of `warps_m` warps has its share of a block's rows."""
    block_n: int = 64
    template: ClassVar[str] = "flash_mma"


@dataclass(frozen=True)
class FlashFma(Warps, TiledSchedule):
    """float32 without tensor cores: `warps_n` warps share a block's columns."""
    block_n: int = 32
    warps_m: int = 4
    warps_n: int = 1
    template: ClassVar[str] = "flash_fma"


@dataclass(frozen=True)
class FlashWgmma(Warpgroups, TiledSchedule):
    """wgmma, sm_90a: one warpgroup loads `depth` stages of keys and as many of values, the others have 64
    rows each. In ping-pong one multiplies while another has its softmax."""
    mode: Mode = "cooperative"
    template: ClassVar[str] = "flash_wgmma"

    @property
    def near(self) -> tuple[Self, ...]:
        other = replace(self, mode="cooperative" if self.mode == "pingpong" else "pingpong")
        return (other, *super().near)

    def pingpong(self) -> Self:
        """Consumers take turns: one multiplies while another has its softmax."""
        return replace(self, mode="pingpong")

    def words(self) -> list[str]:
        return super().words() + ["ping-pong"] * (self.mode == "pingpong")


@dataclass(frozen=True)
class BackwardMma(Warps, TiledSchedule):
    """The gradient by mma.sync: a CTA has `block_n` keys and takes `block_m` rows at a time; `warps_m` warps
    along the keys, `warps_n` that share them."""
    block_m: int = 64
    warps_m: int = 8
    warps_n: int = 1
    template: ClassVar[str] = "flash_backward_mma"


@dataclass(frozen=True)
class BackwardWgmma(Warpgroups, TiledSchedule):
    """The gradient by wgmma, sm_90a: a CTA has `block_n` keys and takes `block_m` rows at a time."""
    template: ClassVar[str] = "flash_backward_wgmma"
