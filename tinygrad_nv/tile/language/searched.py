"""Kernels of users in the schedule database: what a search found for one of them.

Protocol: a `KernelSpec` names the function, and has a hash of all else that a winner depends on but the
architecture and the toolchain: text, arguments, constants, space. `Searched` is the winner's numbers by the
names of its space: those of a schedule (schedule.NAMES), and other keyword arguments of the function.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.language.schedule import NAMES, TileSchedule
from tinygrad_nv.tile.schedule import Schedule

Number = int | float | bool | str


@dataclass(frozen=True)
class Searched(Schedule):
    """Numbers of a search space."""
    template: ClassVar[str] = "tile"
    numbers: tuple[tuple[str, Number], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return {"template": self.template, "numbers": dict(self.numbers)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Numbers of plain data. Raises `ScheduleError` for what is none."""
        found = data.get("numbers") if isinstance(data, dict) else None
        if not isinstance(found, dict) or data.get("template") != cls.template \
                or any(type(each) not in (int, float, bool, str) for each in found.values()):
            raise ScheduleError(f"{str(data)[:200]} as the schedule of a kernel", "its numbers by name")
        made = cls(tuple(found.items()))
        made.own(TileSchedule())
        return made

    def own(self, schedule: TileSchedule) -> TileSchedule:
        """A schedule with these numbers. Raises `ScheduleError` for those that none can have."""
        made: TileSchedule = schedule.with_(**{name: value for name, value in self.numbers if name in NAMES})
        return made

    def on(self, arch: str) -> bool:
        """Tells whether the architecture is of GPUs or CPUs."""
        return True

    def words(self) -> list[str]:
        """Returns what it says, part by part."""
        return [f"{name} {value}" for name, value in self.numbers]


@dataclass(frozen=True)
class KernelSpec:
    """A function by its module and name, called in one way."""
    name: str
    key: str

    def schedule_of(self, data: Any) -> Searched:
        """An entry's schedule, of plain data. Raises `ScheduleError` for what is none."""
        return Searched.from_json(data)

    def __str__(self) -> str: return f"kernel {self.name}"
