"""How a decode attention is computed: the schedule of its template."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tinygrad_nv.tile.schedule import Schedule, Warps, counted


@dataclass(frozen=True)
class Decode(Warps, Schedule):
    """`warps_m` warps have 16 rows of a key head each; `warps_n` groups of them divide the `block_n` keys of
    a step, in `depth` stages. A request's keys are divided into at most `splits`, of `split_keys` at
    least."""
    warps_m: int = 1
    warps_n: int = 4
    block_n: int = 64
    split_keys: int = 128
    splits: int = 4
    depth: int = 2
    template: ClassVar[str] = "decode"

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

    def words(self) -> list[str]:
        made = [f"{16 * self.warps_m}x{self.block_n}", self.warp_words(), counted(self.depth, "stage")]
        return [*made, f"{counted(self.splits, 'split')} of {self.split_keys} keys or more"]
