"""Kernels that find their own schedule: `@kernel.autotune(space=…, metric=…, budget_ms=…, cache=…)`.

Protocol. The first call for a set of shapes, dtypes and constants on a target tries candidates of the space:
the kernel's own numbers first, then numbers of the space that are changed one at a time from the best so far,
others at random where all of these are known (an evolutionary search; the same candidates at each run). Each
is timed on the device, or by the timing model on the emulator (`seconds`). It stops when the space is
exhausted, or when `budget_ms` are over and `LEAST` candidates have a time. A candidate that cannot be is left
out; if all are, `ScheduleError` has the first one's reason.

Where sums have one order (tile/order.py) nothing is tried: every call has the kernel's own numbers, and the
first of the space where it has none, for what is fastest depends on the batch.

Winners are entries of the schedule database (tile/database.py), as those of our own templates are, or of a
database in the directory `cache`. `export` writes a kernel's, `load` reads them; so does `tinygrad-nv tune
--export`, `--import`. A changed function, another compiler or another architecture has others. What was
measured goes before what was modelled.

Numbers of a space are those of a schedule by their names (BM, BN, BK, BD, warps, stages, vector, swizzle),
and other keyword arguments of the function.

`seconds(program, schedule, target)` is the median of some runs on a CPU or a GPU ("measured"), and
on the emulator what the timing model says ("modelled"). Operands are zeros.
"""
from __future__ import annotations

import hashlib
import inspect
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ConfigError, LanguageError, ScheduleError
from tinygrad_nv.files import read_text
from tinygrad_nv.language.building import build
from tinygrad_nv.language.kernels import Choice, Kernel
from tinygrad_nv.patterns.target import Target, target_of
from tinygrad_nv.tile import database, order
from tinygrad_nv.tile.clock import How
from tinygrad_nv.tile.database import Entry
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import NAMES, TileSchedule
from tinygrad_nv.tile.language.searched import KernelSpec, Searched

LEAST = 4            # candidates that are timed whatever the budget
METRICS = ("latency_ms",)
AUTO: Mapping[str, Sequence[Any]] = {"BM": [32, 64, 128], "BN": [32, 64, 128, 256], "BK": [32, 64, 128],
                                     "warps": [4, 8], "stages": [2, 3, 4]}
Numbers = Mapping[str, Any]
WARM, TIMED, LONG = 1, 5, 0.2      # calls; seconds after which no more are made


class Autotuned(Kernel):
    """A kernel whose schedule is searched for."""

    def __init__(self, fn: Callable[..., Any], grid: Any, schedule: TileSchedule | None,
                 space: Mapping[str, Sequence[Any]], metric: str, budget_ms: float,
                 cache: str | Path | None) -> None:
        super().__init__(fn, grid, schedule)
        self.space, self.metric, self.budget_ms = check_space(self.fn, space), metric, budget_ms
        if metric not in METRICS: raise ConfigError(f"metric={metric!r}", f"one of {', '.join(METRICS)}")
        self.file = Path(cache).expanduser() / "schedules.json" if cache is not None else None
        self.winners: dict[tuple[KernelSpec, str], Entry] = {}

    @property
    def name(self) -> str:
        """Name that its entries have."""
        return f"{self.fn.__module__}.{self.fn.__qualname__}"

    def choice(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Choice:
        """The numbers of the winner for these arguments, which is searched for if it is not known."""
        own = Choice(self.chosen, {})
        given = self.bind(args, self.fill_constants(own, kwargs), self.chosen)
        device = next(iter(given.tensors.values())).device
        if (target := target_of(device)) is None: return own
        if order.is_wanted():
            free = {name: values for name, values in self.space.items() if name not in kwargs}
            return self._of(Searched(tuple(next(candidates(free, self.chosen.numbers, {})).items())))
        spec = self._spec(given, kwargs)
        if (entry := self.winners.get((spec, target.arch))) is None:
            if (entry := database.find_winner(spec, target.arch, target, self.file)) is None:
                entry = self._search(spec, args, kwargs, target)
                self._keep([entry])
            self.winners[spec, target.arch] = entry
        return self._of(entry.schedule)

    def _of(self, found: Any) -> Choice:
        """A schedule and constants of numbers."""
        keywords = {name for name, each in inspect.signature(self.fn).parameters.items()
                    if each.kind is each.KEYWORD_ONLY}
        return Choice(found.own(self.chosen),
                      {name: each for name, each in found.numbers if name in keywords})

    def _spec(self, given: Any, kwargs: Mapping[str, Any]) -> KernelSpec:
        constants = {name: value for name, value in given.constants.items()
                     if name in kwargs or name not in self.space}
        words = [source_of(self.fn), str(given.parameters), repr(sorted(constants.items(), key=str)),
                 str(self.space)]
        return KernelSpec(self.name, hashlib.sha256("\n".join(words).encode()).hexdigest()[:32])

    # **** the search ****

    def _search(self, spec: KernelSpec, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                target: Target) -> Entry:
        """The best of those that were tried."""
        best: tuple[float, How, Searched] | None = None
        refused, begun, known = "", time.monotonic(), dict[Any, tuple[float, How]]()
        tried = dict[tuple[Any, ...], float]()
        space = {name: values for name, values in self.space.items() if name not in kwargs}
        for numbers in candidates(space, self.chosen.numbers, tried):
            late = (time.monotonic() - begun) * 1e3 > self.budget_ms
            if late and len(known) >= LEAST: break
            found = Searched(tuple(numbers.items()))
            try: took, how = self._time(args, kwargs, self._of(found), target, known)
            except (LanguageError, ScheduleError) as error:
                refused, tried[found.numbers] = refused or str(error), float("inf")
                continue
            tried[found.numbers] = took
            if best is None or took < best[0]: best = took, how, found
        if best is None:
            raise ScheduleError(f"kernel {self.fn.__name__}: none of {len(tried)} candidates can be; the "
                                f"first: {refused}", "a space with one that can",
                                "add smaller blocks to the space")
        took, how, found = best
        gpu = "" if how == "counted" else getattr(target, "figures", "")
        return Entry(spec, target.arch, database.toolchain(target.kind), found, took, how, gpu,
                     database.origin())

    def _time(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], choice: Choice, target: Target,
              known: dict[Any, tuple[float, How]]) -> tuple[float, How]:
        """Seconds, and how they are known. Programs that are the same have the same time."""
        given = self.bind(args, self.fill_constants(choice, kwargs), choice.schedule)
        program = self.trace_program(given, choice.schedule)
        # a CPU's kernel depends on nothing of a schedule but what the program shows
        key = program.key if target.kind == "cpu" else (program.key, choice.schedule)
        if key not in known: known[key] = seconds(program, choice.schedule, target)
        return known[key]

    # **** what is kept ****

    def export(self, path: str | Path) -> None:
        """Writes this kernel's winners to a file. Raises `ConfigError` where that cannot be."""
        own = [each for each in database.entries(self.file)
               if isinstance(each.spec, KernelSpec) and each.spec.name == self.name]
        file = Path(path).expanduser()
        try: file.write_text(database.dump(own))
        except OSError as error: raise _unwritable(file, error) from error

    def load(self, path: str | Path) -> None:
        """Adds winners of a file of `export`, or of `tinygrad-nv tune --export`. Raises `ConfigError` for one
        that cannot be read, `ScheduleError` for one that is none."""
        file = Path(path).expanduser()
        try: text = read_text(file, database.MOST_BYTES)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}", "a file that `export` has written") from error
        self._keep([each for each in database.parse(text, file)
                    if isinstance(each.spec, KernelSpec) and each.spec.name == self.name])
        self.winners.clear()

    def _keep(self, found: Sequence[Entry]) -> None:
        try: database.store(found, self.file)
        except OSError as error: raise _unwritable(self.file or database.path(), error) from error


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(f"schedules cannot be kept in {file}: {error.strerror}",
                       "a directory that can be written", "pass cache= another one")


def candidates(space: Mapping[str, Sequence[Any]], own: Numbers,
               tried: Mapping[tuple[Any, ...], float]) -> Iterator[Numbers]:
    """Numbers to try, one after the other; `tried` has the times of those before."""
    names = list(space)
    pick = random.Random(0)
    every = [dict(zip(names, each, strict=True)) for each in itertools.product(*space.values())]
    first = {name: own.get(name) if own.get(name) in values else values[0] for name, values in space.items()}
    yield first
    left = {tuple(each.items()): each for each in every}
    left.pop(tuple(first.items()), None)
    while left:
        best = min(tried, key=lambda key: tried[key], default=None)
        near = [key for key in left if best is not None and tried[best] < float("inf")
                and sum(a != b for a, b in zip(key, best, strict=True)) == 1]
        key = pick.choice(near or list(left))
        yield left.pop(key)


def check_space(fn: FunctionType, space: Any) -> dict[str, list[Any]]:
    """Returns a space, its values as lists. Raises `ConfigError` for names that nothing has."""
    if not isinstance(space, Mapping) or not space:
        raise ConfigError(f"space={space!r}", "a dict of lists: dict(BM=[64, 128], warps=[4, 8])")
    known = {name for name, each in inspect.signature(fn).parameters.items()
             if each.kind is each.KEYWORD_ONLY}
    made = {name: list(values) if isinstance(values, (list, tuple, range)) else [values]
            for name, values in space.items()}
    if unknown := [name for name in made if name not in NAMES and name not in known]:
        raise ConfigError(f"{', '.join(unknown)} in the space of {fn.__name__}",
                          f"some of {', '.join([*NAMES, *known])}")
    if empty := [name for name, values in made.items() if not values]:
        raise ConfigError(f"no values of {', '.join(empty)} in the space of {fn.__name__}", "one at least")
    return made


def source_of(fn: FunctionType) -> str:
    """A function's text, or its code where there is none."""
    try: return inspect.getsource(fn)
    except OSError: return fn.__code__.co_code.hex()


def seconds(program: Program, schedule: TileSchedule, target: Target) -> tuple[float, How]:
    """The time, and how it is known. Raises `ScheduleError` where a program cannot be built or timed."""
    made = build(program, schedule, target)
    if isinstance(target, CPU): return _on_cpu(program, made), "measured"
    from tinygrad_nv.tile.emulated import clock_of
    if (clock := target.clock or clock_of(target)) is None:
        raise ScheduleError(f"no time of {program.name}: the timing model needs ptxas and nvdisasm",
                            "a GPU, or these programs", "pip install 'tinygrad-nv[emulator]'")
    return clock.seconds(made, program), clock.how


def _on_cpu(program: Program, made: Any) -> float:
    from tinygrad_nv.runtime.cpu.program import load
    loaded = load(made)
    arrays = [np.zeros(max(1, each.numel) * each.dtype.itemsize, np.uint8) for each in program.tensors]
    times = list[float]()
    for number in range(WARM + TIMED):
        begun = time.perf_counter()
        loaded(*arrays)
        if number >= WARM: times.append(time.perf_counter() - begun)
        if times and sum(times) > LONG: break
    return float(np.median(times))
