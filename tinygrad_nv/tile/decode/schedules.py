"""How a decode attention is computed: the schedules of its templates."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.schedule import Schedule, Warps, count_words


@dataclass(frozen=True)
class KeySplits(Schedule):
    """A request's keys are divided into at most `splits`, of `split_keys` at least, of which a step has
    `block_n`, in `depth` stages."""
    block_n: int = 64
    split_keys: int = 128
    splits: int = 4
    depth: int = 2

    def keys(self, count: int) -> Self:
        """Keys of a step."""
        return replace(self, block_n=count)

    def split(self, count: int, keys: int = 0) -> Self:
        """At most so many splits of a request, of so many keys at least (0: as before)."""
        return replace(self, splits=count, split_keys=keys or self.split_keys)

    def stages(self, count: int) -> Self:
        """Stages of the ring."""
        return replace(self, depth=count)

    @property
    def near(self) -> tuple[Self, ...]:
        others = [self.stages(count) for count in (self.depth - 1, self.depth + 1) if count > 1]
        return (*others, self.split(self.splits, 2 * self.split_keys), self.split(self.splits // 2))

    def split_words(self) -> list[str]:
        """Stages and splits, as a schedule shows them."""
        return [count_words(self.depth, "stage"),
                f"{count_words(self.splits, 'split')} of {self.split_keys} keys or more"]


@dataclass(frozen=True)
class Decode(Warps, KeySplits):
    """`warps_m` warps have 16 rows of a key head each; `warps_n` groups of them divide the keys of a step."""
    warps_m: int = 1
    warps_n: int = 4
    template: ClassVar[str] = "decode"

    def words(self) -> list[str]:
        return [f"{16 * self.warps_m}x{self.block_n}", self.warp_words(), *self.split_words()]


@dataclass(frozen=True)
class LatentWgmma(KeySplits):
    """wgmma, sm_90a: two warpgroups share 64 rows, each with half of the columns of values; a third one
    loads."""
    template: ClassVar[str] = "latent_wgmma"
    threads: ClassVar[int] = 384

    def on(self, arch: str) -> bool: return arch == "sm_90a"

    def words(self) -> list[str]: return [f"64x{self.block_n}", *self.split_words()]
