"""Parts of bench/gpu/run.py: what a part is, how one joins, and how contenders are timed beside each other.

Protocol. A `Part` has rows, found without a GPU, and `open_worker(options)`, which runs in a worker process
and gives a function that measures a row and returns what JSON can hold. `status` in it is one of:

    measured        all that was asked for
    emulated        the same without a GPU, small and without times
    disagrees       measured, and something came out otherwise than it must
    failed, hung, died, not measured     said by run.py; `why` has the words

A part of timings is a list of workloads and of contenders: `@workloads("attention")` gives the former,
`@contender("attention", "ours")` makes a contender ready for one and returns what runs it, or raises
`NotMeasured` with the reason. Registering is all that a new one takes.

Timings follow NVIDIA's protocol: inputs in turns that together exceed twice the L2 cache, random values,
contenders in turns within one run, a burst each (turns.py). Clocks are read during each burst, and kept by
contender.

Results are compared twice (gpu/compare.py): of single runs before, and of one more burst on poisoned memory
after the timed ones. Each contender has the inputs in common and a record of its own of where results are.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any, Protocol

from bench.gpu.compare import Run, count_sets, differs, poison, wrong
from bench.gpu.turns import BURST_S, Bursts, in_turns, open_stamps
from bench.lib.measure import spread, table

Options = argparse.Namespace
Row = dict[str, Any]            # a row's result
Measure = Callable[[str, float], Row]   # (name of the row, seconds that it may take)

OUT_OF_TIME = "out of time"
MOST_SETS = 64


class NotMeasured(Exception):
    """A contender or a row that does not apply; the text says why."""


@dataclass(frozen=True)
class Part:
    """A part: `rows` lists the names of its rows, `open_worker` makes a worker ready, `render` prints what
    there is. `expected_s` is what a row usually takes: it is not begun with less time left; `limit_s` is when
    it counts as hung. `absent` says why there is nothing to measure."""
    name: str
    about: str
    rows: Callable[[Options], list[str]] = lambda options: []
    open_worker: Callable[[Options], Measure] | None = None
    render: Callable[[Mapping[str, Row]], str] = lambda rows: ""
    expected_s: float = 10.0
    limit_s: float = 120.0
    absent: str = ""


PARTS: dict[str, Part] = {}


def register(part: Part) -> Part:
    """Adds a part, in the order in which parts run."""
    assert part.name not in PARTS, part.name
    PARTS[part.name] = part
    return part


# **** parts of timings ****

class Workload(Protocol):
    """Workload of contenders. `work` and `nbytes` of one run: floating-point operations, or tokens, and bytes
    that must move; `results` names what is compared among a set's storages."""
    @property
    def results(self) -> tuple[str, ...]: ...

    @property
    def name(self) -> str: ...

    @property
    def work(self) -> float: ...

    @property
    def nbytes(self) -> float: ...

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Inputs and results by name: as many sets as it takes."""

    def unlike(self, one: dict[str, Any]) -> str:
        """How the results of a set are not what they must be; "" when they are."""


Contender = Callable[[Any, Any, Options], Run]
WORKLOADS: dict[str, list[Callable[[], Iterable[Workload]]]] = {}
CONTENDERS: dict[str, dict[str, Contender]] = {}
ALONE: dict[str, dict[str, Callable[[Any, float], list[float]]]] = {}
EMULATED: dict[str, Callable[[Any, Options], Row]] = {}
ABOUT: dict[str, Callable[[Any], dict[str, Any]]] = {}


def workloads(part: str) -> Callable[[Callable[[], Iterable[Workload]]], Callable[[], Iterable[Workload]]]:
    """The function's workloads are rows of the part."""
    def add(made: Callable[[], Iterable[Workload]]) -> Callable[[], Iterable[Workload]]:
        WORKLOADS.setdefault(part, []).append(made)
        return made
    return add


def contender(part: str, name: str) -> Callable[[Contender], Contender]:
    """The function makes a run of a workload ready: (workload, given, options). The one named "ours" is what
    the others are held against."""
    def add(made: Contender) -> Contender:
        CONTENDERS.setdefault(part, {})[name] = made
        return made
    return add


def alone(part: str, name: str) -> Callable[[Callable[[Any, float], list[float]]], Any]:
    """A contender in a process of its own: (workload, seconds) gives seconds of runs. It takes no turns."""
    def add(made: Callable[[Any, float], list[float]]) -> Any:
        ALONE.setdefault(part, {})[name] = made
        return made
    return add


def emulation(part: str) -> Callable[[Callable[[Any, Options], Row]], Any]:
    """Runs a workload, scaled down, for --emulate: a row without times, `status` "emulated"."""
    def add(made: Callable[[Any, Options], Row]) -> Any:
        EMULATED[part] = made
        return made
    return add


def verdict_row(wrong: str, schedule: str, words: str = "") -> Row:
    """Returns the row of a workload that was emulated: how ours is wrong, else `words` or the schedule."""
    return {"status": "disagrees" if wrong else "emulated", "schedule": schedule,
            "why": f"ours: {wrong}" if wrong else words or schedule}


def set_count(device: str, nbytes: float, most: int = MOST_SETS) -> int:
    """Returns how many sets of `nbytes` exceed twice the L2 cache: 2 at least, `most` at most."""
    import torch
    l2 = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    return min(most, max(2, int(2 * l2 // nbytes) + 1))


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as torch's compiler has it. Raises `NotMeasured` where there is no Triton."""
    import torch
    if find_spec("triton") is None: raise NotMeasured("torch.compile needs Triton")
    torch._dynamo.reset()   # it compiles a function for eight shapes, and runs it as it is for others
    made: Callable[..., Any] = torch.compile(function, dynamic=False)
    return made


def about(part: str) -> Callable[[Callable[[Any], dict[str, Any]]], Any]:
    """Registers what a row says of ours besides times: its schedule, what was predicted."""
    def add(made: Callable[[Any], dict[str, Any]]) -> Any:
        ABOUT[part] = made
        return made
    return add


def all_workloads(part: str) -> dict[str, Workload]:
    """Every registered workload, by its name."""
    return {each.name: each for made in WORKLOADS.get(part, []) for each in made()}


@dataclass
class Entrant:
    """A contender that is right: its runs, and the sets with its results."""
    run: Run
    given: list[dict[str, Any]]


def compare(part: str, workload: Workload, options: Options, budget_s: float,
            contenders: Mapping[str, Contender] | None = None) -> Row:
    """Returns the row of a workload: whether each contender (those of the part, where none are given) is
    right, times in turns, whether it is right still."""
    import torch
    torch.manual_seed(options.seed)
    given = workload.make_inputs("cuda")
    entrants, notes, bad = ready(contenders or CONTENDERS.get(part, {}), workload, given, options)
    row: Row = {"work": workload.work, "nbytes": workload.nbytes, "notes": notes, "sets": len(given)}
    if part in ABOUT: row |= ABOUT[part](workload)
    if entrants:
        stamps = open_stamps()
        bursts = {name: Bursts(each.run, len(given), stamps=stamps).set_size(BURST_S)
                  for name, each in entrants.items()}
        row |= in_turns(bursts, budget_s)
        for name, found in after_bursts(workload, bursts, entrants).items():
            notes[name] = f"wrong after its bursts: {found}"
            bad.append(f"{name}, after its bursts: {found}")
            del row["seconds"][name]
    row["status"] = "disagrees" if bad else "measured"
    if bad: row["why"] = "; ".join(bad)
    for name, made in (() if contenders else ALONE.get(part, {}).items()):
        if options.without_tinygrad: notes[name] = "left out: --without-tinygrad"
        else:
            try: row.setdefault("seconds", {})[name] = made(workload, min(budget_s / 2, 2.0))
            except NotMeasured as why: notes[name] = str(why)
    return row


def ready(contenders: Mapping[str, Contender], workload: Workload, given: list[dict[str, Any]],
          options: Options) -> tuple[dict[str, Entrant], dict[str, str], list[str]]:
    """Returns the contenders that apply and are right; why the others are not timed; what is wrong."""
    entrants: dict[str, Entrant] = {}
    notes: dict[str, str] = {}
    bad: list[str] = []
    for name, made in contenders.items():
        mine = [dict(one) for one in given]
        try:
            run = made(workload, mine, options)
            found = wrong(workload, mine, run)
        except NotMeasured as why: notes[name] = str(why)
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            if name == "ours": raise
        else:
            if not found: entrants[name] = Entrant(run, mine)
            else:
                notes[name] = f"wrong: {found}"
                bad.append(f"{name}: {found}")
    return entrants, notes, bad


def after_bursts(workload: Workload, bursts: Mapping[str, Bursts],
                 entrants: Mapping[str, Entrant]) -> dict[str, str]:
    """One more burst of each contender on poisoned results: which are wrong then, and how."""
    found = {}
    for name, burst in bursts.items():
        one = entrants[name]
        sets = one.given[:min(burst.count, count_sets(one.run, one.given))]
        poison(workload, sets)
        burst.seconds()
        if words := differs(workload, sets): found[name] = words
    return found


# **** tables ****

@dataclass(frozen=True)
class Column:
    """A rate: what a run's work or bytes are divided by its seconds and `scale`."""
    title: str
    of: str = "work"
    scale: float = 1e12
    form: str = ".1f"


@dataclass(frozen=True)
class Timings:
    """The table of a part of timings: a rate for each contender, ours over the first of `others` that ran."""
    rate: Column
    also: Column = field(default_factory=lambda: Column("GB/s", "nbytes", 1e9, ".0f"))
    names: tuple[str, ...] = ()     # of contenders; empty: those registered

    def render(self, part: str, rows: Mapping[str, Row]) -> str:
        """Every row, in the order given; below, in words, those without times and what is wrong."""
        names = self.names or (*CONTENDERS.get(part, {}), *ALONE.get(part, {}))
        others = [name for name in names if name != "ours"]
        header = ["", f"ours {self.rate.title}", self.also.title, *others, f"ours / {others[0]}", "spread"]
        have = {name: {who: done for who, done in row.get("seconds", {}).items() if done}
                for name, row in rows.items()}
        lines = [self.line(name, row, have[name], others) for name, row in rows.items() if have[name]]
        words = [f"  {name}: {row['status']}{': ' if row.get('why') else ''}{row.get('why', '')}"
                 for name, row in rows.items() if row.get("why") or not have[name]]
        return "\n".join([*([table(header, lines)] if lines else []), *words])

    def line(self, name: str, row: Row, seconds: Mapping[str, list[float]], others: list[str]) -> list[str]:
        """One row; times of bursts beside each other make the ratio."""
        def rate(who: str, column: Column) -> str:
            if who not in seconds: return "-"
            return f"{row[column.of] / median(seconds[who]) / column.scale:{column.form}}"
        ratios = ratios_of(seconds, "ours", others[0])
        last = [f"{median(ratios):.3f}", spread(ratios)] if ratios else ["-", "-"]
        return [name, rate("ours", self.rate), rate("ours", self.also),
                *(rate(who, self.rate) for who in others), *last]


def ratios_of(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> list[float]:
    """How many times as fast ours is, burst by burst."""
    return [b / a for a, b in zip(seconds.get(ours, []), seconds.get(theirs, []), strict=False)]


def timing_part(name: str, about: str, rate: Column, expected_s: float = 10.0,
                also: Column | None = None) -> Part:
    """Registers a part whose rows are the workloads registered for it."""
    shown = Timings(rate) if also is None else Timings(rate, also)

    def rows(options: Options) -> list[str]: return list(all_workloads(name))

    def open_worker(options: Options) -> Measure:
        known = all_workloads(name)
        if options.emulate: return lambda row, budget_s: EMULATED[name](known[row], options)
        return lambda row, budget_s: compare(name, known[row], options, min(budget_s, options.seconds))

    return register(Part(name, about, rows, open_worker, lambda rows: shown.render(name, rows), expected_s,
                         limit_s=10 * expected_s))
