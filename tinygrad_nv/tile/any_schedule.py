"""Schedules of attention and decode, with the fields of all their templates: template, tiles, warps, stages.

Protocol: `AnySchedule()` is a default to derive from, `AnySchedule().block(128, 256).k(64).warps(2, 4)`; each
call gives a new schedule. What can be is decided by each template's legality.py.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tinygrad_nv.tile.schedule import Schedule

Template = Literal["flash_mma", "flash_wgmma", "flash_fma", "decode", "flash_backward_mma",
                   "flash_backward_wgmma"]
Mode = Literal["cooperative", "pingpong"]
Swizzle = Literal["", "32B", "64B", "128B"]


@dataclass(frozen=True)
class AnySchedule(Schedule):
    """flash_mma: `block_m` rows of queries by `warps_m` warps, `block_n` columns of keys at a time.
    flash_wgmma: the same by `warps_m` warps in all (with warps_n = 1), four of them the producer, `depth`
    stages of keys and as many of values; in ping-pong a consumer multiplies while another has its softmax.
    flash_fma: such blocks, whose columns `warps_n` warps share.
    flash_backward_wgmma: `block_n` keys of a CTA, `block_m` rows at a time, in `depth` stages;
    flash_backward_mma: the same, `warps_m` warps along the keys, `warps_n` that share them. The
    other fields are of no template: legality refuses them."""
    template: Template = "flash_mma"  # type: ignore[misc]  # of each type by itself, once templates have theirs
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warps_m: int = 2
    warps_n: int = 2
    depth: int = 3
    cluster_m: int = 1
    cluster_n: int = 1
    splits: int = 1
    stream: bool = False
    mode: Mode = "cooperative"
    group: int = 8
    swap: bool = False
    swizzle_width: Swizzle = ""

    def using(self, template: Template) -> AnySchedule:
        """Another template, with its own default for the warps."""
        if template in ("flash_wgmma", "flash_backward_wgmma"):
            return replace(self, template=template, warps_m=12, warps_n=1, depth=2)
        return replace(self, template=template)

    def block(self, m: int, n: int) -> AnySchedule:
        """The tile of the result."""
        return replace(self, block_m=m, block_n=n)

    def with_block(self, m: int, n: int) -> AnySchedule:
        """The same as `block`: derives a schedule with another tile."""
        return self.block(m, n)

    def k(self, k: int) -> AnySchedule:
        """Elements of the sum in a stage."""
        return replace(self, block_k=k)

    def warps(self, m: int, n: int = 1) -> AnySchedule:
        """Warps along the rows and the columns of the tile; for wgmma, all of them."""
        return replace(self, warps_m=m, warps_n=n)

    def stages(self, count: int) -> AnySchedule:
        """Stages of the ring."""
        return replace(self, depth=count)

    def cluster(self, m: int, n: int = 1) -> AnySchedule:
        """CTAs along rows and columns that share operands."""
        return replace(self, cluster_m=m, cluster_n=n)

    def split(self, count: int) -> AnySchedule:
        """CTAs that share one tile's sum."""
        return replace(self, splits=count)

    def streamed(self) -> AnySchedule:
        """All sums divided evenly among persistent CTAs (stream-K, Osama et al. 2023)."""
        return replace(self, stream=True)

    def pingpong(self) -> AnySchedule:
        """Consumers take turns at tiles: one multiplies while the other finishes."""
        return replace(self, mode="pingpong")

    def swapped(self) -> AnySchedule:
        """Computes (b aᵀ)ᵀ."""
        return replace(self, swap=True)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: of wgmma, all but the producer."""
        return self.warps_m * self.warps_n // 4 - 1

    def __str__(self) -> str:
        warps = f"{self.warps_m}x{self.warps_n}" if self.warps_n > 1 else f"{self.warps_m}"
        words = [f"{self.template} {self.block_m}x{self.block_n}x{self.block_k}",
                 f"{warps} warp{'s' if warps != '1' else ''}",
                 f"{self.depth} stage{'s' if self.depth != 1 else ''}"]
        if (self.cluster_m, self.cluster_n) != (1, 1):
            words.append(f"cluster {self.cluster_m}x{self.cluster_n}")
        if self.splits > 1: words.append(f"split {self.splits}")
        words += [word for word, on in (("stream-K", self.stream), ("ping-pong", self.mode == "pingpong"),
                                        ("swapped", self.swap), (f"swizzle {self.swizzle_width}",
                                                                 self.swizzle_width))
                  if on]
        return ", ".join(words)
