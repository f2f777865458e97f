"""What a template is, in one record, and the one table of them.

Protocol: a spec says what is computed, a schedule how, a target what is compiled for. A `Template` makes a
kernel of the three. The one `Table`, templates.TABLE, finds them by schedule, by family and by name. Its rows
are modules that are imported when they are first asked for, and that import no writer of kernels (`later`).

    templates.py of a family:   TEMPLATES = (Template("wgmma", GemmSpec, Wgmma, …), …)
    tile/templates.py:          TABLE = Table({("gpu", "gemm"): "tinygrad_nv.tile.gemm.templates", …})
    to make a kernel:           TABLE.build(spec, Wgmma().block(128, 256), GPU("sm_90a", 132))
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.schedule import Schedule

S = TypeVar("S")
C = TypeVar("C", bound=Schedule)
T = TypeVar("T")


@dataclass(frozen=True)
class GPU:
    """What a kernel is compiled for: an architecture ("sm_90a"), how many multiprocessors there are (0: as
    the architecture's first GPU in gpu.py has), and how many clusters run at once, where a driver said so
    (left out: as ptx/gpcs.py has it)."""
    arch: str
    sm_count: int = 0
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
    build: Callable[..., Any]
    cost: Callable[[S, C, T], Any] | None = None


AnyTemplate = Template[Any, Any, Any]


def later(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call: writers of kernels are large."""
    def called(*arguments: Any) -> Any: return getattr(import_module(module), name)(*arguments)
    return called


class Table:
    """Templates, by kind of target ("gpu", "cpu") and family, of modules that have `TEMPLATES`."""

    def __init__(self, rows: Mapping[tuple[str, str], str]) -> None:
        self.rows = dict(rows)
        self._named: dict[tuple[str, str], AnyTemplate] = {}

    def templates(self, kind: str, family: str) -> tuple[AnyTemplate, ...]:
        """Those of a family, the one liked best first. Raises KeyError where there is no such family."""
        found: tuple[AnyTemplate, ...] = import_module(self.rows[kind, family]).TEMPLATES
        return found

    def named(self, kind: str, name: str) -> AnyTemplate:
        """The template of a name, from JSON or a command line. Raises `ScheduleError` where there is none."""
        for on, family in self.rows if (kind, name) not in self._named else ():
            if on == kind: self._named.update({(on, one.name): one for one in self.templates(on, family)})
        if (found := self._named.get((kind, name))) is None:
            known = ", ".join(known for on, known in self._named if on == kind)
            raise ScheduleError(f"template {name!r}", f"one of {known}")
        return found

    def of(self, schedule: Schedule) -> AnyTemplate:
        """The template that a schedule is of."""
        key = schedule.kind, schedule.template
        return self._named.get(key) or self.named(*key)

    def read(self, kind: str, data: Any) -> Schedule:
        """The schedule of plain data. Raises `ScheduleError` for what is none."""
        if not isinstance(data, dict) or type(data.get("template")) is not str:
            raise ScheduleError(f"{data!r}", "an object with a template and its fields")
        found: Schedule = self.named(kind, data["template"]).schedule.from_json(
            {name: value for name, value in data.items() if name != "template"})
        return found

    # **** what a schedule's template says ****

    def problems(self, spec: Any, schedule: Schedule, target: Any) -> Sequence[str]:
        """Why the schedule cannot be; empty when it can."""
        template = self.of(schedule)
        if isinstance(spec, template.spec): return template.problems(spec, schedule, target)
        return [f"{template.name} is no template of a {type(spec).__name__}"]

    def build(self, spec: Any, schedule: Schedule, target: Any, integers: tuple[Integer, ...] = ()) -> Any:
        """The kernel. `integers`: those that a CPU's kernel computes from the variables of its launch. Raises
        `ScheduleError` for an impossible schedule."""
        return self.of(schedule).build(spec, schedule, target, *([integers] if integers else []))
