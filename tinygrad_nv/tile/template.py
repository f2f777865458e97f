"""Templates, one record each, and the one table of them.

Protocol: a spec says what is computed, a schedule how, a target what is compiled for. A `Template` makes a
kernel of the three. A `Family` has the templates of one folder and chooses among them. The one `Table`,
templates.TABLE, finds families by the types of specs, and templates by schedule and by name. Its rows are
modules that are imported when they are first asked for, and that import no writer of kernels (`lazy_build`).

From a spec to a kernel there are three hops, each in the family's folder:

    choose       TABLE.choose(spec, GPU("sm_90a", 132))   → FAMILY of its templates.py: what was tried, or its
                                                            own way, or the first legal candidate
    candidates   Template.candidates(spec, target)        → those to try first, less what `problems` refuses
    build        TABLE.build(spec, schedule, target)      → kernel.py, imported for it
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.gpcs import Clusters
from tinygrad_nv.tile import order
from tinygrad_nv.tile.clock import Clock, figures_of
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.schedule import Schedule

if TYPE_CHECKING:
    from tinygrad_nv.quant.types import Layout
    from tinygrad_nv.tile.reference import Argument, Given, Results

# of families whose templates are programs of the tile language: what makes one for a kind of target
MAKERS = {"gpu": "tinygrad_nv.tile.programs", "cpu": "tinygrad_nv.cpu.programs"}
PARAMETER_BYTES = 32764     # of a kernel from PTX 8.1 on; 4352 before
MAP_BYTES = 128             # a tensor map, which lies at a multiple of 64

S = TypeVar("S")
C = TypeVar("C", bound=Schedule)
T = TypeVar("T")


@dataclass(frozen=True)
class GPU:
    """A GPU that kernels are compiled for: an architecture ("sm_90a"), how many multiprocessors there are (0:
    as the architecture's first GPU in gpu.py has), and how many clusters run at once, where a driver said so
    (left out: as ptx/gpcs.py has it). `clock` measures candidates; without one they are modelled, or counted
    (clock.py). `model`: the name of its figures in ptx/timing/gpus, "" without; None: by its architecture and
    SMs. Heads that begin at multiples of `head_bytes` are read where they lie. Quantised matrices lie in
    `matrix_layout`. A kernel has so many `pointers` at most (of `PARAMETER_BYTES`)."""
    kind: ClassVar[str] = "gpu"
    head_bytes: ClassVar[int] = 16
    pointers: ClassVar[int] = 4000
    matrix_layout: ClassVar[Layout] = "fragments"
    arch: str
    sm_count: int = 0
    clusters: Clusters = ()
    clock: Clock | None = field(default=None, compare=False)
    model: str | None = None

    @staticmethod
    def overfull(pointers: int, integers: int = 0, maps: int = 0) -> str:
        """Why no kernel can have so many arguments; "" where one can."""
        nbytes = 8 * pointers + 4 * integers
        if maps: nbytes = -(-nbytes // MAP_BYTES) * MAP_BYTES + maps * MAP_BYTES
        if nbytes <= PARAMETER_BYTES: return ""
        return f"a kernel of {pointers} arguments: {nbytes} B of parameters, at most {PARAMETER_BYTES}"

    @property
    def instructions(self) -> str:
        """The instructions that kernels can be made of."""
        return self.arch

    @property
    def figures(self) -> str:
        """The name of the figures that the timing model has of it; "" without."""
        return figures_of(self.arch, self.sm_count) if self.model is None else self.model


class Predicted(Protocol):
    """Prediction of a launch by a cost model: its seconds, and the resource that takes most of them."""
    @property
    def seconds(self) -> float: ...
    @property
    def bound(self) -> str: ...


@dataclass(frozen=True)
class Template(Generic[S, C, T]):
    """One way to make kernels. All functions take (spec, schedule, target), `candidates` no schedule.
    `problems`: why the schedule cannot be, in words; empty when it can. `candidates`: schedules, the one
    liked best first. `build`: the kernel of a schedule without problems (`Table.build` asks); it takes the
    integers that the kernel gets from the variables of its launch as well, where a spec has such. `cost`: a
    prediction, whose `seconds` orders schedules; None: nothing is known but operations and bytes."""
    name: str
    spec: type[S]
    schedule: type[C]
    problems: Callable[[S, C, T], Sequence[str]]
    candidates: Callable[[S, T], Iterable[C]]
    build: Callable[..., Any]
    cost: Callable[[S, C, T], Predicted] | None = None


AnyTemplate = Template[Any, Any, Any]


@dataclass(frozen=True, eq=False)
class Family:
    """The templates of one folder for one kind of target, the one liked best first. A spec is for those of
    its type. `choice` stands in for what `choose` does by itself, `defaults` for `first_legal`: what is
    chosen where nothing was tried. `refusal` does so for `why_not`; where it returns "", the templates are
    asked. `candidates` are so many schedules worth trying, instead of the templates' candidates and what is
    `near` them, and `counter_cost` the seconds of one with so many registers, by counters of the emulator.
    `determinism_class` is the class of schedules of a spec (order.py): words where all of its defaults are
    one, else a function."""
    name: str
    templates: tuple[AnyTemplate, ...]
    choice: Callable[[Any, Any], Schedule | None] | None = None
    refusal: Callable[[Any, Any], str] | None = None
    defaults: Callable[[Any, Any], Schedule | None] | None = None
    candidates: Callable[[Any, Any, int], Sequence[Schedule]] | None = None
    counter_cost: Callable[[Any, Any, Any, int], float] | None = None
    determinism_class: str | Callable[[Any, Any], Ordered | None] = ""

    def of(self, spec: type) -> tuple[AnyTemplate, ...]:
        """The templates of a type of spec."""
        return tuple(each for each in self.templates if each.spec is spec)

    def choose(self, spec: Any, target: Any) -> Schedule | None:
        """The schedule of a spec, None where no template takes it: the first legal candidate, where the
        family has no way of its own."""
        return (self.choice or self.default)(spec, target)

    def default(self, spec: Any, target: Any) -> Schedule | None:
        """The schedule of a spec where none was tried."""
        return (self.defaults or self.first_legal)(spec, target)

    def choose_ordered(self, spec: Any, target: Any) -> Ordered | None:
        """The schedule and its class, by which a row's bits do not depend on other rows; None where there is
        none."""
        if callable(self.determinism_class): return self.determinism_class(spec, target)
        found = self.default(spec, target) if self.determinism_class else None
        return None if found is None else Ordered(found, self.determinism_class)

    def first_legal(self, spec: Any, target: Any) -> Schedule | None:
        """The first candidate without problems, in the order of the templates; None where there is none."""
        return first_legal(self.of(type(spec)), spec, target)

    def why_not(self, spec: Any, target: Any) -> str:
        """Why `choose` finds nothing: what each template says of the candidate that it refuses least, or of
        its default where it has none."""
        if self.refusal is not None and (words := self.refusal(spec, target)): return words
        said = {each.name: min((each.problems(spec, s, target) for s in
                                list(each.candidates(spec, target)) or [each.schedule()]), key=len)
                for each in self.of(type(spec))}
        if len(said) == 1: return "; ".join(*said.values())
        return "; ".join(f"{name}: {', '.join(found)}" for name, found in said.items())


@functools.lru_cache(4096)
def first_legal(templates: tuple[AnyTemplate, ...], spec: Any, target: Any) -> Schedule | None:
    """The first candidate without problems, in the order of `templates`; None where there is none."""
    return next((s for each in templates for s in each.candidates(spec, target)
                 if not each.problems(spec, s, target)), None)


def make_template(spec: type[S], schedule: type[C], problems: Callable[[S, str], Sequence[str]] | None,
                  module: str, name: str) -> Template[S, C, GPU]:
    """A GPU's template with nothing to choose: the reasons against its kernel are a function of spec and
    architecture. `problems` None: it takes every spec."""
    def find_problems(one: S, s: C, gpu: GPU) -> Sequence[str]:
        return problems(one, gpu.arch) if problems else []

    return Template(schedule.template, spec, schedule, find_problems, lambda one, gpu: (schedule(),),
                    lazy_build(module, name))


def lazy_build(module: str, name: str) -> Callable[..., Any]:
    """Returns a GPU template's `build`, whose module is imported at the first call: writers of kernels are
    large."""
    def build(spec: Any, schedule: Schedule, target: GPU, integers: tuple[Integer, ...] = ()) -> Any:
        made = getattr(import_module(module), name)(spec, schedule, target)
        return made.with_integers(integers) if integers else made
    return build


class Table:
    """Families, by kind of target ("gpu", "cpu") and name: `rows` are modules that have a `FAMILY`, folders
    whose `templates` have it, or modules of `PROGRAMS` for every kind (programs.py), `specs` the names of
    families by those of their types of specs. A row is imported when a spec of its family is asked for."""

    def __init__(self, specs: Mapping[str, str], rows: Mapping[tuple[str, str], str]) -> None:
        self.specs, self.rows = dict(specs), dict(rows)
        self._named: dict[tuple[str, str], AnyTemplate] = {}
        self._loaded: dict[tuple[str, str], Family] = {}

    def _load(self, kind: str, name: str) -> Family:
        """Imports the row of a family."""
        if (found := self._loaded.get((kind, name))) is None:
            module = import_module(row := self.rows[kind, name])
            if hasattr(module, "__path__"): module = import_module(f"{row}.templates")
            found = self._loaded[kind, name] = module.FAMILY if hasattr(module, "FAMILY") else \
                import_module(MAKERS[kind]).make_family(name, module.PROGRAMS, module.DETERMINISM_CLASS)
            self._named.update({(kind, each.name): each for each in found.templates})
        return found

    def families(self, kind: str) -> tuple[Family, ...]:
        """Returns the families of a kind of target, in the order of the rows: all are imported."""
        return tuple(self._load(kind, name) for on, name in self.rows if on == kind)

    def family(self, kind: str, spec: type) -> Family | None:
        """The family of a type of spec; None where the kind of target has no template for it."""
        name = self.specs.get(spec.__name__, "")
        if (kind, name) not in self.rows: return None
        return family if (family := self._load(kind, name)).of(spec) else None

    def templates(self, kind: str, spec: Any) -> tuple[AnyTemplate, ...]:
        """Returns the templates of a spec's type, the one liked best first."""
        return () if (found := self.family(kind, type(spec))) is None else found.of(type(spec))

    def find_template(self, kind: str, name: str) -> AnyTemplate:
        """The template of a name, from JSON or a command line: families are imported until one has it. Raises
        `ScheduleError` where there is none."""
        rows = (family for on, family in self.rows if on == kind)
        while (found := self._named.get((kind, name))) is None:
            if (family := next(rows, None)) is None:
                known = ", ".join(known for on, known in self._named if on == kind)
                raise ScheduleError(f"template {name!r}", f"one of {known}")
            self._load(kind, family)
        return found

    def of(self, schedule: Schedule) -> AnyTemplate:
        """The template that a schedule is of."""
        return self.find_template(schedule.kind, schedule.template)

    def read(self, kind: str, data: Any) -> Schedule:
        """The schedule of plain data. Raises `ScheduleError` for what is none."""
        if not isinstance(data, dict) or type(data.get("template")) is not str:
            raise ScheduleError(f"{data!r}", "an object with a template and its fields")
        found: Schedule = self.find_template(kind, data["template"]).schedule.from_json(
            {name: value for name, value in data.items() if name != "template"})
        return found

    # **** what a family says ****

    def choose(self, spec: Any, target: Any) -> Any:
        """The schedule of a spec on a target; None where no template takes it. Of one class where that is
        wanted (order.py)."""
        if order.is_wanted():
            return None if (made := self.choose_ordered(spec, target)) is None else made.schedule
        found = self.family(target.kind, type(spec))
        return None if found is None else found.choose(spec, target)

    def choose_ordered(self, spec: Any, target: Any) -> Ordered | None:
        """The schedule and its class (order.py); None where there is none."""
        found = self.family(target.kind, type(spec))
        return None if found is None else found.choose_ordered(spec, target)

    def why_not(self, spec: Any, target: Any) -> str:
        """Why there is no schedule of a spec on a target."""
        found = self.family(target.kind, type(spec))
        if found is None: return f"no template for {spec}"
        if order.is_wanted() and found.default(spec, target) is not None:
            return f"deterministic: no class of {found.name} schedules keeps a row's sums in one order" \
                if not found.determinism_class else \
                f"deterministic: no {found.name} schedule of its class takes it"
        return found.why_not(spec, target)

    # **** what a spec computes ****

    def arguments(self, spec: Any) -> tuple[Argument, ...]:
        """The pointers of a spec's kernels, and what lies there (reference.py)."""
        if isinstance(own := getattr(spec, "arguments", None), tuple): return own
        found: tuple[Argument, ...] = self._reference(spec).arguments(spec)
        return found

    def reference(self, spec: Any, given: Given, exact: bool = False) -> Results:
        """Computes what every template of a spec computes, in plain tinygrad (reference.py)."""
        found: Results = self._reference(spec).reference(spec, given, exact)
        return found

    def _reference(self, spec: Any) -> Any:
        """A module of the family's folder, for GPUs and CPUs alike."""
        return import_module(f"tinygrad_nv.tile.{self.specs[type(spec).__name__]}.reference")

    # **** what a schedule's template says ****

    def problems(self, spec: Any, schedule: Schedule, target: Any) -> Sequence[str]:
        """Why the schedule cannot be; empty when it can."""
        template = self.of(schedule)
        if isinstance(spec, template.spec): return template.problems(spec, schedule, target)
        return [f"{template.name} is no template of a {type(spec).__name__}"]

    def build(self, spec: Any, schedule: Schedule, target: Any, integers: tuple[Integer, ...] = ()) -> Any:
        """The kernel. `integers`: those that it has, where the variables of its launch are others. Raises
        `ScheduleError` for an impossible schedule, with all that is wrong."""
        if found := self.problems(spec, schedule, target):
            words = f"{schedule} cannot be: {'; '.join(found)}"
            raise ScheduleError(words, "a schedule without these problems",
                                "change the tile, the warps or the stages")
        return self.of(schedule).build(spec, schedule, target, *([integers] if integers else []))


def legality(own: Callable[[S, C, str], Iterable[str]]) -> Callable[[S, C, GPU], list[str]]:
    """Why a template cannot have a schedule; empty when it can. Remembered: a schedule that was chosen is
    asked about once more when its kernel is built, and whenever the database gives it."""
    @functools.lru_cache(4096)
    def find_problems(spec: S, s: C, arch: str) -> tuple[str, ...]:
        if arch not in SMEM_BYTES: return (f"{arch} is not {', '.join(SMEM_BYTES)}",)
        if min((n for n in vars(s).values() if type(n) is int), default=1) < 1:
            return (f"{s}: extents below 1",)
        return tuple(own(spec, s, arch))

    def problems(spec: S, s: C, gpu: GPU) -> list[str]: return [*find_problems(spec, s, gpu.arch)]
    return problems
