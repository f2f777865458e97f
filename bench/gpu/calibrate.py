"""Measures the figures of a GPU that the timing model needs (ptx/timing/gpus/): one command, eight minutes.

    python3 bench/gpu/calibrate.py --base h200                  # on the GPU
    python3 bench/gpu/calibrate.py --base h200 --from FILE      # figures from an earlier run's measurements
    python3 bench/gpu/calibrate.py --base h200 --against h100   # the model plays a GPU: finds these figures

Some 150 microbenchmarks (calibrate_sm.py, _memory.py, _causes.py; what they are: calibrate_probe.py) run one
after the other. Each is in the result file, JSON, as soon as it is measured, and a later call goes on where
one ended: what the file has of the same sources and GPU is left out. Then the figures follow
(calibrate_constants.py): a TOML file with each figure, its spread, and why it stays as `--base` has it if it
does; on standard output a table of old and new figures, and one of what the model says with both, beside what
was measured. `tinygrad-nv ptx time --gpu FILE.toml` predicts with them.

Needed: a GPU of compute capability 8.0 or later, its driver, cuda-python; for the figures also ptxas,
nvdisasm and a C compiler, here or where `--from` is used. `--emulate` runs all of it on the emulated GPU, and
its times mean nothing.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.calibrate_constants import MEASURES, Found, Measure, calibrate
from bench.gpu.calibrate_players import GPUPlayer, ModelPlayer, Player
from bench.lib.measure import RESULTS, each, git, processor, sources, table
from tinygrad_nv.errors import ConfigError, NVError
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures, list_gpus
from tinygrad_nv.runtime.cuda import driver as cuda

MINUTES = 8.0
SOME_SMS = 2        # of the emulated GPU
GPUS = resources.files("tinygrad_nv.ptx.timing") / "gpus"
Rows = dict[str, dict[str, Any]]


# **** what is kept ****

@dataclass
class Kept:
    """A result file: what it is of, and rows by the names of measures. Replaced whole at each row."""
    path: Path
    facts: Mapping[str, Any]
    rows: Rows

    def keep(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row, and writes the file."""
        self.rows[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**self.facts, "measured": self.rows}, indent=1) + "\n")
        os.replace(part, self.path)

    def has_values(self, name: str) -> bool:
        """Whether a row is there and has values."""
        return bool(self.rows.get(name, {}).get("values"))


def open_rows(path: Path, facts: Mapping[str, Any]) -> Kept:
    """The file's rows, if it is of the same GPU and sources."""
    old = json.loads(path.read_text()) if path.exists() else {}
    same = all(old.get(name) == facts[name] for name in ("gpu", "sources"))
    return Kept(path, facts, old.get("measured", {}) if same else {})


def values_of(rows: Rows) -> dict[str, list[float]]:
    """The values of those that have some."""
    return {name: row["values"] for name, row in rows.items() if row.get("values")}


# **** measuring ****

def measure(player: Player, todo: Sequence[Measure], kept: Kept, deadline: float) -> int:
    """Measures what is to do until time is up; how many failed."""
    failed = 0
    for name in each([one.name for one in todo]):
        if time.monotonic() > deadline:
            kept.keep(name, {"why": "out of time"})
            continue
        begun = time.monotonic()
        row: dict[str, Any] = {"unit": MEASURES[name].unit}
        try: row["values"] = [MEASURES[name].value(player) for _ in range(player.repeats)]
        except NVError as error:
            row["why"] = f"{type(error).__name__}: {error}".partition("\n")[0]
            failed += 1
        row["took_s"] = round(time.monotonic() - begun, 3)
        kept.keep(name, row)
    return failed


# **** what follows ****

def report(rows: Rows, gpu: GPUFigures, options: argparse.Namespace, name: str) -> None:
    """The figures, as a file and a table, and what the model says with them."""
    new, found = calibrate(values_of(rows), gpu)
    path = options.toml or options.out.with_suffix(".toml")
    path.write_text(toml(options.base, replace(new, name=name), found, git("rev-parse", "--short", "HEAD")))
    print(table(("figure", "old", "new", "spread", "from"), [
        (title, number(one.old), number(one.value), f"{one.spread:.1%}" if one.measure else "",
         one.why or one.measure) for title, one in found.items()]))
    print(f"\nwritten to {path}")
    if not options.brief: print("\n" + compare(rows, gpu, new))


def compare(rows: Rows, old: GPUFigures, new: GPUFigures) -> str:
    """Everything that was measured, beside what the model measures with old and new figures."""
    lines = []
    for name in each([name for name in rows if rows[name].get("values")]):
        middle = median(rows[name]["values"])
        said = [MEASURES[name].value(ModelPlayer(one)) for one in (old, new)]
        off = f"{said[1] / middle - 1:+.0%}" if middle else ""
        lines.append((name, number(middle), MEASURES[name].unit, *map(number, said), off))
    return table(("", "measured", "unit", "model, old figures", "new figures", "off by"), lines)


def number(value: float) -> str:
    """Four digits."""
    return f"{value:.4g}" if value < 1e5 or value >= 1e7 else f"{value:.0f}"


def toml(base: str, gpu: GPUFigures, found: Mapping[str, Found], commit: str) -> str:
    """The base's file with these figures: each with what told it, or the base's own comment."""
    file = Path(base) if base.endswith(".toml") else GPUS / f"{base}.toml"
    lines = file.read_text().splitlines()
    head = [f"# {gpu.name}, measured by bench/gpu/calibrate.py of commit {commit or 'unknown'}. What was not",
            f"# measured is that of {Path(base).name}, whose sources stand below.", "#"]
    return "\n".join([*head, *(_line(line, gpu, found) for line in lines)]) + "\n"


def _line(line: str, gpu: GPUFigures, found: Mapping[str, Found]) -> str:
    key = re.match(r"(\w+) = ", line)
    if key is None: return line
    if key[1] == "name": return f'name = "{gpu.name}"'
    one = found.get(key[1])
    if one is None or not one.measure: return line
    if one.why: return f"{line}; measured, but {one.why}"
    value = f"{one.value:.6g}" if isinstance(one.value, float) else str(one.value)
    said = f"# measured: {one.measure}, spread {one.spread:.1%}; was {one.old:g}"
    return f"{key[1]} = {value}".ljust(32) + said


# **** the command ****

def parse_args(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--base", default="h200", help="figures to begin with: one of "
                      f"{', '.join(list_gpus())}, or a .toml file (default h200)")
    made.add_argument("--minutes", type=float, default=MINUTES, help=f"of measuring (default {MINUTES:g})")
    made.add_argument("--only", default="", metavar="TEXT", help="measures whose name contains this")
    made.add_argument("--again", action="store_true", help="measure what the result file has, too")
    made.add_argument("--out", type=Path, metavar="FILE.json", help="measurements (default bench/results/"
                      "calibrated_NAME.json)")
    made.add_argument("--toml", type=Path, metavar="FILE.toml", help="figures (default beside --out)")
    made.add_argument("--from", dest="earlier", type=Path, metavar="FILE.json", help="measure nothing: "
                      "figures from these measurements")
    made.add_argument("--brief", action="store_true", help="leave out the table of all measurements")
    made.add_argument("--list", action="store_true", help="name the measures, and stop")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--against", metavar="GPU", help="measure the timing model, which plays this GPU")
    where.add_argument("--emulate", action="store_true", help="measure the emulated GPU: times mean nothing")
    made.add_argument("--commit", default="", help="what to call the code where there is no git")
    return made.parse_args(words)


def player_of(options: argparse.Namespace, gpu: GPUFigures) -> tuple[Player, str]:
    """Returns the player that is measured, and its name."""
    if options.against is not None:
        played = figures(options.against)
        return ModelPlayer(played), f"{played.name}, played by the timing model"
    if options.emulate:
        from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
        emulated = EmulatedDriver(gpu.arch)
        return GPUPlayer(emulated, SOME_SMS), emulated.properties.name
    driver = cuda.CUDADriver()
    return GPUPlayer(driver), driver.properties.name


def select_measures(options: argparse.Namespace, arch: str) -> Iterator[Measure]:
    """The measures that an architecture has."""
    yield from (one for one in MEASURES.values() if one.of(arch) and options.only in one.name)


def main(words: list[str] | None = None) -> int:
    """Measures, or says what is missing or wrong."""
    try: return run(parse_args(words))
    except NVError as error:
        print(error, file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """The command; exit code 1 where a measure failed."""
    gpu = figures(options.base)
    if options.list:
        for one in select_measures(options, gpu.arch):
            print(f"{one.name}, {one.unit}" if one.unit else one.name)
        return 0
    if options.earlier is not None:
        if not options.earlier.is_file():
            raise ConfigError(f"no file {options.earlier}", "measurements of an earlier run, JSON")
        record = json.loads(options.earlier.read_text())
        options.out = options.out or options.earlier
        report(record["measured"], gpu, options, record["gpu"])
        return 0
    if options.against is None and not options.emulate and (lacking := cuda.missing()):
        print(f"nothing to measure on: {lacking}. --emulate and --against run without a GPU", file=sys.stderr)
        return 2
    player, name = player_of(options, gpu)
    if player.arch != gpu.arch:
        raise ConfigError(f"{options.base} has figures of {gpu.arch}, {name} is {player.arch}",
                          f"--base with figures of {player.arch}", "choose another one, or copy and edit it")
    slug = re.sub(r"\W+", "-", name.lower().replace("nvidia ", "")).strip("-")
    options.out = options.out or RESULTS / f"calibrated_{slug}.json"
    facts = {"gpu": name, "machine": processor(), "sources": sources(),
             "commit": options.commit or git("rev-parse", "--short", "HEAD")}
    kept = open_rows(options.out, facts)
    todo = [one for one in select_measures(options, player.arch)
            if options.again or not kept.has_values(one.name)]
    failed = measure(player, todo, kept, time.monotonic() + 60 * options.minutes)
    for title, row in kept.rows.items():
        if "why" in row: print(f"not measured: {title}: {row['why']}", file=sys.stderr)
    report(kept.rows, gpu, options, name)
    return 1 if failed else 0


if __name__ == "__main__": sys.exit(main())
