"""What a template is, in one record, and the one table of them.

Protocol: a spec says what is computed, a schedule how, a target what is compiled for. A `Template` makes a
kernel of the three, a `Family` is the templates that share their kinds of specs on one kind of target and who
chooses among them. `TABLE` finds both: by spec (`family`), by schedule (`of`), by name (`named`); rows are
modules that are imported when they are first asked for, and that import no writer of kernels (`later`).

    templates.py of a family:   FAMILY = Family("gemm", (MMA, WGMMA, GEMV), choose=…)
    tinygrad_nv/templates.py:   TABLE = Table({("gpu", "gemm"): "tinygrad_nv.tile.gemm.templates", …})
    whoever has a schedule:     TABLE.of(schedule).build(spec, schedule, GPU("sm_90a", 132))
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile.schedule import Schedule

S = TypeVar("S")
C = TypeVar("C", bound=Schedule)
T = TypeVar("T")


@dataclass(frozen=True)
class GPU:
    """What a kernel is compiled for: an architecture ("sm_90a"), how many multiprocessors there are (0: as
    the architecture's first GPU has), and how many clusters run at once, where a driver said so (left out:
    as ptx/gpcs.py has it)."""
    arch: str
    sm_count: int = 132
    clusters: Clusters = ()


@dataclass(frozen=True)
class Template(Generic[S, C, T]):
    """One way to make kernels. All functions take (spec, schedule, target), `candidates` no schedule.
    `problems`: why the schedule cannot be, in words; empty when it can. `candidates`: schedules, the one
    liked best first. `build` raises `ScheduleError` for a schedule with problems. `cost`: a prediction, whose
    `seconds` orders schedules; None: nothing is known but operations and bytes."""
    name: str
    spec: type[S]
    schedule: type[C]
    problems: Callable[[S, C, T], Sequence[str]]
    candidates: Callable[[S, T], Iterable[C]]
    build: Callable[[S, C, T], Any]
    cost: Callable[[S, C, T], Any] | None = None


@dataclass(frozen=True)
class Family:
    """Templates that share their kinds of specs on one kind of target, the one liked best first. `choose`
    gives the schedule of a spec on a target, None where no template takes it; `why_not` then says why."""
    name: str
    templates: tuple[Template[Any, Any, Any], ...]
    choose: Callable[[Any, Any], Schedule | None]
    why_not: Callable[[Any, Any], str]

    @property
    def specs(self) -> tuple[type, ...]:
        """The types of the specs, each once."""
        return tuple(dict.fromkeys(template.spec for template in self.templates))


def first_legal(templates: Sequence[Template[S, Any, T]], spec: S, target: T) -> Schedule | None:
    """The first candidate without a problem, of templates in their order."""
    return next((schedule for template in templates for schedule in template.candidates(spec, target)
                 if not template.problems(spec, schedule, target)), None)


def later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call: writers of kernels are large."""
    def called(*arguments: Any) -> Any: return getattr(import_module(module), name)(*arguments)
    return called


class Table:
    """Families by kind of target ("gpu", "cpu") and name, of modules that have a `FAMILY`."""

    def __init__(self, rows: Mapping[tuple[str, str], str]) -> None:
        self.rows = dict(rows)
        self._families: dict[tuple[str, str], Family] = {}
        self._templates: dict[tuple[str, str], Template[Any, Any, Any]] = {}

    def family(self, kind: str, name: str) -> Family:
        """A family. Raises KeyError where no row has it."""
        key = kind, name
        if key not in self._families: self._families[key] = import_module(self.rows[key]).FAMILY
        return self._families[key]

    def named(self, kind: str, name: str) -> Template[Any, Any, Any]:
        """The template of a name, from JSON or a command line. Raises `ScheduleError` where there is none."""
        for row_kind, family in self.rows if (kind, name) not in self._templates else ():
            if row_kind != kind: continue
            self._templates.update({(kind, one.name): one for one in self.family(kind, family).templates})
            if (kind, name) in self._templates: break
        if (found := self._templates.get((kind, name))) is None:
            known = (known for on, known in self._templates if on == kind)
            raise ScheduleError(f"template {name!r}", f"one of {', '.join(known)}")
        return found

    def of(self, schedule: Schedule) -> Template[Any, Any, Any]:
        """The template that a schedule is of."""
        return self.named(schedule.kind, schedule.template)
