"""How a spec is computed: the base of what templates have, and the fields that several of them share.

Protocol: a schedule is frozen and hashable; spec, schedule and target make a kernel, and nothing else does. A
template's type is a constant of its schedules, by `kind` of target and by name. The bare type is a default to
derive from, `Mma().block(128, 256).k(64).warps(2, 4).stages(4)`; each call gives a new schedule. Schedules go
to JSON and back (`to_json`, `from_json`; templates.TABLE reads those of any template).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.limits import SMEM_BYTES

Mode = Literal["cooperative", "pingpong"]    # of consumer warpgroups: they share a tile, or take turns


@dataclass(frozen=True)
class Schedule:
    """One template's numbers. `kind` says whether a GPU or a CPU runs its kernels. Entries of older schedule
    databases have more fields: `NEUTRAL`, which each schedule had, and what they were where its template had
    no use for them; `UNREAD`, whose values never meant anything."""
    kind: ClassVar[str] = "gpu"
    template: ClassVar[str]
    UNREAD: ClassVar[tuple[str, ...]] = ()
    NEUTRAL: ClassVar[Mapping[str, object]] = {
        "warps_n": 1, "cluster_m": 1, "cluster_n": 1, "splits": 1, "stream": False, "mode": "cooperative",
        "swap": False, "swizzle_width": ""}

    def to_json(self) -> dict[str, Any]:
        """Returns the schedule as plain data."""
        return {"template": self.template, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A schedule of plain data, less its template's name. Raises `ScheduleError` for what is not one.
        Fields of other templates are accepted where they have the value that says nothing."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        for name, value in data.items():
            if name in kinds and type(value) is not kinds[name]:
                raise ScheduleError(f"{name}={value!r} of {cls.template}", f"of type {kinds[name].__name__}")
            if name in kinds or name in cls.UNREAD: continue
            if name not in cls.NEUTRAL or value != cls.NEUTRAL[name]:
                raise ScheduleError(f"{name}={value!r} is of another template than {cls.template}",
                                    f"some of {', '.join(kinds)}")
        return cls(**{name: value for name, value in data.items() if name in kinds})

    def on(self, arch: str) -> bool:
        """Whether an entry for an architecture of the schedule database may have it."""
        return arch in SMEM_BYTES

    @property
    def near(self) -> tuple[Self, ...]:
        """Schedules beside it that tuning may try."""
        return ()

    def words(self) -> list[str]:
        """Returns the words for a schedule, field by field."""
        return [f"{field.name} {getattr(self, field.name)}" for field in fields(self)]

    def __str__(self) -> str: return " ".join(filter(None, (self.template, ", ".join(self.words()))))


@dataclass(frozen=True)
class Tiled:
    """A CTA makes `block_m` × `block_n` of the result from a ring of `depth` stages."""
    block_m: int = 128
    block_n: int = 128
    depth: int = 3

    def block(self, m: int, n: int) -> Self:
        """The tile of the result."""
        return replace(self, block_m=m, block_n=n)

    def with_block(self, m: int, n: int) -> Self:
        """The same as `block`: derives a schedule with another tile."""
        return self.block(m, n)

    def stages(self, count: int) -> Self:
        """Stages of the ring."""
        return replace(self, depth=count)


@dataclass(frozen=True)
class Warps:
    """`warps_m` × `warps_n` warps, along the rows and the columns of the tile."""
    warps_m: int = 2
    warps_n: int = 2

    def warps(self, m: int, n: int = 1) -> Self:
        """Warps along the rows and the columns of the tile."""
        return replace(self, warps_m=m, warps_n=n)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    def warp_words(self) -> str:
        """Returns the warps as a schedule shows them."""
        shown = f"{self.warps_m}x{self.warps_n}" if self.warps_n > 1 else ""
        return count_words(self.warps_m * self.warps_n, "warp", shown)


@dataclass(frozen=True)
class RowWarps:
    """`warps_m` warps, along the rows of the tile."""
    warps_m: int = 4

    def warps(self, count: int) -> Self:
        """Warps of a CTA."""
        return replace(self, warps_m=count)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m

    def warp_words(self) -> str:
        """Returns the warps as a schedule shows them."""
        return count_words(self.warps_m, "warp")


@dataclass(frozen=True)
class Warpgroups(RowWarps):
    """`warps_m` warps in all: four of them load, those of each other warpgroup multiply."""
    warps_m: int = 12

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply: all but the one that loads."""
        return self.warps_m // 4 - 1


def count_words(count: int, word: str, shown: str = "") -> str:
    """A number and what it counts: "1 stage", "2x2 warps"."""
    return f"{shown or count} {word}{'' if count == 1 else 's'}"
