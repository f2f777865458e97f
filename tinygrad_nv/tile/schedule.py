"""How a product is computed: template, tiles, warps, stages.

Protocol: `Schedule()` is a default to derive from, `Schedule().block(128, 256).k(64).warps(2, 4).stages(4)`;
each call gives a new schedule. Schedules are frozen, hashable, and go to JSON and back (`to_json`,
`from_json`). What can be is decided by gemm/legality.py, what is good by gemm/cost.py.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from tinygrad_nv.errors import ScheduleError

Template = Literal["mma", "wgmma", "gemv", "flash_mma", "flash_wgmma", "flash_fma", "decode",
                   "flash_backward_mma", "flash_backward_wgmma"]
Mode = Literal["cooperative", "pingpong"]
Swizzle = Literal["", "32B", "64B", "128B"]


@dataclass(frozen=True)
class Schedule:
    """A CTA makes `block_m` × `block_n` of the result, `block_k` of the sum at a time, from a ring of `depth`
    stages.

    mma: `warps_m` × `warps_n` warps, each with its share of the tile. wgmma: `warps_m` warps in all (with
    warps_n = 1), four of them the producer; `mode` says whether consumers share a tile or take turns.
    gemv: `warps_m` warps. flash_wgmma: `block_m` rows of queries, `block_n` columns of keys at a time; warps
    as of wgmma, `depth` stages of keys and as many of values; in ping-pong a consumer multiplies while
    another has its softmax. flash_fma: such blocks, whose columns `warps_n` warps share.
    flash_backward_wgmma: `block_n` keys of a CTA, `block_m` rows at a time, in `depth` stages;
    flash_backward_mma: the same, `warps_m` warps along the keys, `warps_n` that share them. `cluster_m` ×
    `cluster_n` CTAs share operands by multicast. `splits` CTAs share the sum of one tile; `stream` divides
    all sums evenly among persistent CTAs instead. `group` rows of tiles are walked together, for L2. `swap`
    computes the transposed product, for few rows. `swizzle` "" is the widest that the tile allows."""
    template: Template = "mma"
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

    def using(self, template: Template) -> Schedule:
        """Another template, with its own default for the warps."""
        if template == "wgmma": return replace(self, template=template, block_k=64, warps_m=12, warps_n=1,
                                               depth=4)
        if template in ("flash_wgmma", "flash_backward_wgmma"):
            return replace(self, template=template, warps_m=12, warps_n=1, depth=2)
        if template == "gemv": return replace(self, template=template, warps_m=8, warps_n=1)
        return replace(self, template=template)

    def block(self, m: int, n: int) -> Schedule:
        """The tile of the result."""
        return replace(self, block_m=m, block_n=n)

    def with_block(self, m: int, n: int) -> Schedule:
        """The same as `block`: derives a schedule with another tile."""
        return self.block(m, n)

    def k(self, k: int) -> Schedule:
        """Elements of the sum in a stage."""
        return replace(self, block_k=k)

    def warps(self, m: int, n: int = 1) -> Schedule:
        """Warps along the rows and the columns of the tile; for wgmma, all of them."""
        return replace(self, warps_m=m, warps_n=n)

    def stages(self, count: int) -> Schedule:
        """Stages of the ring."""
        return replace(self, depth=count)

    def cluster(self, m: int, n: int = 1) -> Schedule:
        """CTAs along rows and columns that share operands."""
        return replace(self, cluster_m=m, cluster_n=n)

    def split(self, count: int) -> Schedule:
        """CTAs that share one tile's sum."""
        return replace(self, splits=count)

    def streamed(self) -> Schedule:
        """All sums divided evenly among persistent CTAs (stream-K, Osama et al. 2023)."""
        return replace(self, stream=True)

    def pingpong(self) -> Schedule:
        """Consumers take turns at tiles: one multiplies while the other finishes."""
        return replace(self, mode="pingpong")

    def grouped(self, rows: int) -> Schedule:
        """Rows of tiles walked together."""
        return replace(self, group=rows)

    def swapped(self) -> Schedule:
        """Computes (b aᵀ)ᵀ."""
        return replace(self, swap=True)

    def swizzle(self, width: Swizzle) -> Schedule:
        """Width of the swizzle of shared memory."""
        return replace(self, swizzle_width=width)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: of wgmma, all but the producer."""
        return self.warps_m * self.warps_n // 4 - 1

    def stage_bytes(self, itemsize: int) -> int:
        """Bytes of one stage: a tile of A and one of B."""
        return (self.block_m + self.block_n) * self.block_k * itemsize

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> Schedule:
        """A schedule of plain data. Raises `ScheduleError` for what is not one."""
        kinds = {field.name: type(field.default) for field in fields(Schedule)}
        if not isinstance(data, dict) or any(type(value) is not kinds.get(name) for name,
                                             value in data.items()):
            raise ScheduleError(f"{data!r}", f"an object with some of {', '.join(kinds)}")
        return Schedule(**data)

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
