"""`tinygrad-nv ptx run`: a compiled CUDA program on the emulated GPU.

Protocol: the program's own output stays as it is. The table of launches goes to stderr; with --json one
object goes to stdout, and the program's stdout to stderr. The exit status is the program's; where that is 0,
it is 1 after findings (--check), and after calls or device code that cannot be emulated. Lines of the
program's source are shown where nvcc wrote them down (-lineinfo).
"""
from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tinygrad_nv.errors import NVError
from tinygrad_nv.host.launches import LaunchReport
from tinygrad_nv.host.server import Result, run_program
from tinygrad_nv.ptx import command
from tinygrad_nv.ptx.emulator import Finding, Report
from tinygrad_nv.ptx.timing import report as timing_report
from tinygrad_nv.ptx.timing.gpu import list_gpus

NAME_WIDTH = 44
SHOWN = 20              # places of findings
STDERR = 2
LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]*)"')


def add_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ptx run`."""
    run = kinds.add_parser("run", help="run a CUDA program on the emulated GPU, and predict its times",
                           usage="%(prog)s [-h] [--gpu NAME] [--check] [--time] [--json] [--ptx DIR] "
                                 "PROGRAM [ARGS ...]")
    run.add_argument("--gpu", default="h100", metavar="NAME",
                     help=f"one of {', '.join(list_gpus())} (default h100)")
    run.add_argument("--check", action="store_true",
                     help="run with all checks; findings make the exit status 1")
    run.add_argument("--time", action="store_true",
                     help="predict the time of each launch; without --check nothing is computed then")
    run.add_argument("--ptx", metavar="DIR", type=Path,
                     help="write the PTX that ran, which lines are of, to files")
    run.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM",
                     help="the program and its arguments")
    run.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Runs the program, prints what came of it."""
    argv = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not argv: raise NVError("no program to run", "tinygrad-nv ptx run PROGRAM ARGS …")
    result = run_program(argv, arguments.gpu, arguments.check, arguments.time,
                         STDERR if arguments.json else None)
    if arguments.ptx: write_ptx(result, arguments.ptx)
    sys.stdout.flush()
    print(json.dumps(as_json(result)) if arguments.json else as_text(result),
          file=sys.stdout if arguments.json else sys.stderr)
    return exit_status(result)


def write_ptx(result: Result, folder: Path) -> None:
    """A file for each text, named by the first launch of it."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, int] = {}
    for number, launch in enumerate(result.launches): texts.setdefault(launch.ptx, number)
    for text, number in texts.items(): (folder / f"launch_{number}.ptx").write_text(text)


def exit_status(result: Result) -> int:
    """Returns what the command ends with; as a shell has it, 128 and the number of a signal."""
    if result.status < 0: return 128 - result.status
    wrong = result.refused or result.order or any(launch.findings for launch in result.launches)
    return result.status or int(bool(wrong))


def as_json(result: Result) -> dict[str, object]:
    """The whole result."""
    return {"status": result.status, "refused": list(result.refused), "order": list(result.order),
            "notes": list(result.notes),
            "launches": [_launch_json(launch) for launch in result.launches]}


def _launch_json(launch: LaunchReport) -> dict[str, object]:
    report = Report(list(launch.findings), launch.stats, launch.seconds, notes=list(launch.notes),
                    printed=launch.printed)
    return {"kernel": launch.kernel, "name": launch.name, "grid": launch.grid,
            "block": launch.block, "cluster": launch.cluster, "dynamic_smem": launch.dynamic_smem,
            "status": launch.status.name, **command.as_json(report),
            "sources": {line: str(at) for line in sorted({each.ptx_line for each in launch.findings})
                        if (at := place(launch.ptx, line)) is not None},
            "timing": None if launch.timing is None else timing_report.as_json(launch.timing)}


def as_text(result: Result) -> str:
    """A row for each launch, or for several in a row that are the same; then findings with their PTX
    lines."""
    rows = [("launch", "kernel", "grid", "block", "cluster", "instructions", "findings", "predicted",
             "TFLOP/s", "limiter"), *_rows(result)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    left = [column[0] in ("kernel", "limiter") for column in columns]
    lines = ["  ".join(cell.ljust(width) if ahead else cell.rjust(width)
                       for cell, width, ahead in zip(row, widths, left, strict=True)).rstrip()
             for row in zip(*columns, strict=True)] if result.launches else ["no kernel was launched"]
    if any(launch.timing for launch in result.launches):
        lines.append("predicted times are modelled, not measured")
    lines += [*_first_findings(result), *result.order]
    lines += [f"not emulated: {text}" for text in result.refused]
    lines += [f"note: {text}" for text in result.notes]
    return "\n".join(lines)


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    def same(numbered: tuple[int, LaunchReport]) -> tuple[object, ...]:
        launch = numbered[1]
        timing = launch.timing and round(launch.timing.seconds, 9)
        return (launch.kernel, launch.grid, launch.block, launch.cluster, launch.dynamic_smem, timing,
                launch.stats.warp_instructions, len(launch.findings))
    for _, group in groupby(enumerate(result.launches), same):
        (number, launch), *more = group
        timing = launch.timing
        yield (f"{number}-{number + len(more)}" if more else str(number), _short(launch.name),
               *("x".join(map(str, extents)) for extents in (launch.grid, launch.block)),
               "" if launch.cluster == (1, 1, 1) else "x".join(map(str, launch.cluster)),
               f"{launch.stats.warp_instructions:,}" if launch.stats.warp_instructions else "",
               str(len(launch.findings)) if launch.findings else "",
               f"{timing.seconds * 1e6:,.1f} us" if timing else "",
               f"{timing.tflops:,.1f}" if timing else "", timing.limiter if timing else "")


def _short(name: str) -> str:
    name = name.removeprefix("void ").removesuffix("()")
    return name if len(name) <= NAME_WIDTH else name[:NAME_WIDTH - 1] + "…"


def _first_findings(result: Result) -> list[str]:
    """The first finding of each kind at each line of a kernel, with the PTX and the source line that it
    means."""
    places: dict[tuple[str, str, int], list[tuple[int, Finding]]] = {}
    for number, launch in enumerate(result.launches):
        for finding in launch.findings:
            places.setdefault((launch.kernel, finding.kind, finding.ptx_line), []).append((number, finding))
    lines = []
    for (_, _, line), same in list(places.items())[:SHOWN]:
        number, finding = same[0]
        more = f" (and {len(same) - 1} more there)" if len(same) > 1 else ""
        lines.append(f"launch {number}: {finding}{more}")
        lines += [f"    {quoted}" for quoted in quotations(result.launches[number].ptx, line)]
    if len(places) > SHOWN: lines.append(f"{len(places) - SHOWN} more places, which --json has")
    return lines


class Place(NamedTuple):
    """A line of a file."""
    file: str
    line: int

    def __str__(self) -> str: return f"{self.file}:{self.line}"


@functools.lru_cache(8)
def _lines(ptx: str) -> tuple[list[str], dict[int, str]]:
    lines = ptx.splitlines()
    return lines, {int(found[1]): found[2] for found in map(FILE.match, lines) if found}


def place(ptx: str, line: int) -> Place | None:
    """The source of a line of PTX, from 1; None where it is not told."""
    lines, files = _lines(ptx)
    for at in range(min(line, len(lines)) - 1, -1, -1):
        if (found := LOC.match(lines[at])) is not None:
            return Place(files.get(int(found[1]), "?"), int(found[2]))
        if lines[at].lstrip().startswith((".entry", ".visible .entry", ".func")): return None
    return None


def quotations(ptx: str, line: int) -> list[str]:
    """The line of PTX, and where its source is."""
    lines, _ = _lines(ptx)
    if not 0 < line <= len(lines): return []
    at = place(ptx, line)
    return [f"PTX {line}: {lines[line - 1].strip()}", *([f"at {at}"] if at else [])]
