"""Templates of the CPU, and the base of their schedules.

Protocol: spec and schedule alone make a kernel (tile/schedule.py). A template is made of a schedule's type
and of three functions: `default(spec, target)`, the schedule where no other was tried; `problems(spec,
schedule)`; and `build(spec, schedule)` of a module. `template` makes the record of it that the table has
(tile/template.py).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Self, TypeVar

from tinygrad_nv.cpu.isa import ISA, LEVELS, PORTABLE
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.schedule import Schedule, count_words
from tinygrad_nv.tile.template import Template


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


MOST_PARTS, MOST = 4096, 1 << 20

S = TypeVar("S")
C = TypeVar("C", bound=CPUSchedule)


def check_parts(s: CPUSchedule) -> list[str]:
    """Why a schedule's numbers cannot be, in words; empty when they can."""
    out = [] if 1 <= s.parts <= MOST_PARTS else [f"{s.parts} parts, 1 to {MOST_PARTS}"]
    return out + [f"{name} {value}" for name, value in vars(s).items()
                  if name != "parts" and type(value) is int and not 0 <= value <= MOST]


def template(spec: type[S], schedule: type[C], default: Callable[[S, CPU], C],
             problems: Callable[[S, C], Sequence[str]] | None, module: str,
             build: str = "build") -> Template[S, C, CPU]:
    """The record. `problems` None: the template takes every spec. What is wrong is remembered, for a schedule
    that was chosen is asked about once more when its kernel is built. `build` takes the integers that the
    kernel computes from the variables of its launch as well, where a spec has such."""
    @lru_cache(4096)
    def find_problems(one: S, s: C) -> tuple[str, ...]:
        return tuple(check_parts(s) or ([] if problems is None else problems(one, s)))

    def all_problems(one: S, s: C, target: CPU) -> Sequence[str]:
        return find_problems(one, s) if s.isa == target.isa else [f"for {s.isa}, here is {target.isa}"]

    def build_kernel(one: S, s: C, target: CPU, integers: tuple[Integer, ...] = ()) -> Any:
        return getattr(import_module(module), build)(one, s, *([integers] if integers else []))

    def candidates(one: S, target: CPU) -> Sequence[C]: return default(one, target),
    return Template(schedule.template, spec, schedule, all_problems, candidates, build_kernel)
