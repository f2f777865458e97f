"""How a spec is computed on a CPU: the base of what templates have.

Protocol: as tile/schedule.py. Spec and schedule alone make a kernel.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tinygrad_nv.cpu.isa import ISA, LEVELS, PORTABLE
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.schedule import Schedule, count_words


@dataclass(frozen=True)
class CPUSchedule(Schedule):
    """`parts` is in how many pieces a kernel is called (one for each thread, or more); no bit of a result
    depends on it. `widens`: the kernel computes in float32 whatever it reads."""
    isa: ISA = PORTABLE
    parts: int = 1
    kind: ClassVar[str] = "cpu"
    widens: ClassVar[bool] = False
    NEUTRAL: ClassVar[Mapping[str, object]] = dict.fromkeys(
        ("block_m", "block_n", "block_k", "rows", "columns"), 0)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Returns the schedule that JSON describes, like `Schedule.from_json`."""
        return super().from_json({**data, "isa": _isa(data.get("isa"))})

    def on(self, arch: str) -> bool:
        """Whether an entry for an architecture of the schedule database may have it."""
        return arch.startswith(f"cpu {self.isa},")

    def words(self) -> list[str]: return [str(self.isa), count_words(self.parts, "part")]


def _isa(data: Any) -> ISA:
    try: made = ISA(**data)
    except TypeError as error:
        raise ScheduleError(f"isa={data!r}: {error}", "an object with level") from error
    if made.level not in LEVELS or {type(x) for x in (made.bf16, made.vnni, made.emulated)} != {bool}:
        raise ScheduleError(f"isa={data!r}", f"a level of {', '.join(LEVELS)}, and booleans")
    return made
