"""`tinygrad-nv tune`: finds the best schedule of a matmul; manages the schedule database.

Protocol: `tune M N K` tries candidates (tile/gemm/tune.py), prints them as a table, the best first, and
stores the best; with --arch cpu, or DEV=CPU, those of cpu/gemm/tune.py on this machine. `--list`, `--export`,
`--import` and `--clear` manage the database at NV_SCHEDULES. Notes about ignored entries go to stderr. Times
are microseconds.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinygrad.helpers import DEV

from tinygrad_nv.errors import RequestError, SpecError
from tinygrad_nv.explain.levels import shortened
from tinygrad_nv.ptx.assemble import ARCHITECTURES
from tinygrad_nv.table import aligned
from tinygrad_nv.tile import database
from tinygrad_nv.tile.gemm.choose import why_not
from tinygrad_nv.tile.gemm.cost import predict
from tinygrad_nv.tile.gemm.dense import MAJORS, RESULTS, TYPES, WORDS, dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

CPU = "cpu"
HEAD = ("schedule", "predicted us", "counted us", "bound", "registers", "shared bytes")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `tune`."""
    tune = commands.add_parser("tune", help="find the best schedule of a matmul, and store it",
                               usage="%(prog)s [options] M N K")
    tune.add_argument("extents", nargs="*", type=_extent, metavar="M N K",
                      help="rows, columns, length of sums")
    matmul = tune.add_argument_group("matmul")
    matmul.add_argument("--dtype", default="bf16", choices=TYPES, help="of the operands (default bf16)")
    matmul.add_argument("--out", default="", choices=RESULTS,
                        help="of the result (default: as the operands; bf16 for fp8, s32 for bytes)")
    matmul.add_argument("--majors", default="NT", choices=MAJORS, help="BLAS's letters; NT is x @ w.T")
    matmul.add_argument("--batch", type=_batch, default=(), metavar="B[xB…]", help="batch dimensions")
    matmul.add_argument("--epilogue", default="", metavar="WORD+…",
                        help=f"epilogue operations: {', '.join(WORDS)}")
    matmul.add_argument("--symbolic", action="store_true", help="M is the maximum of a symbolic extent")
    search = tune.add_argument_group("search")
    search.add_argument("--arch", choices=(*ARCHITECTURES, CPU),
                        help="default sm_90a, or cpu with DEV=CPU")
    search.add_argument("--sm-count", type=_extent, metavar="N",
                        help="SMs of the GPU (default: as the architecture's first has)")
    search.add_argument("--beam", type=_extent, default=2, metavar="N",
                        help="4 N candidates, 8 N on a CPU (default 2)")
    kept = tune.add_argument_group("database").add_mutually_exclusive_group()
    kept.add_argument("--list", action="store_true", help="print what is stored")
    kept.add_argument("--export", metavar="FILE", help="write what is stored to a file")
    kept.add_argument("--import", metavar="FILE", dest="import_", help="add what a file has")
    kept.add_argument("--clear", action="store_true", help="forget what is stored")
    tune.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    tune.set_defaults(run=run)


def _extent(text: str) -> int:
    try: value = int(text)
    except ValueError: value = 0
    if value < 1: raise argparse.ArgumentTypeError(f"{text!r} is not an integer ≥ 1")
    return value


def _batch(text: str) -> tuple[int, ...]: return tuple(map(_extent, re.split("[,x]", text)))


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    about = arguments.list or arguments.export or arguments.import_ or arguments.clear
    if len(arguments.extents) != (0 if about else 3):
        raise RequestError(f"{len(arguments.extents)} numbers", "none with --list, --export, --import or "
                           "--clear, else three: M N K", "tinygrad-nv tune 4096 4096 4096")
    if (file := database.path()).is_dir():
        raise RequestError(f"{file} is a directory", "a file for the schedule database",
                           f"NV_SCHEDULES={file / 'schedules.json'}")
    with _notes():
        if arguments.list: _list(arguments)
        elif arguments.export: _export(Path(arguments.export))
        elif arguments.import_: _import(Path(arguments.import_))
        elif arguments.clear: print(f"{database.clear()} schedules forgotten")
        else: _tune(arguments)
    return 0


@contextmanager
def _notes() -> Iterator[None]:
    """Prints warnings of the database to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", database.ScheduleWarning)
        try: yield
        finally:
            for warning in caught: print(f"note: {warning.message}", file=sys.stderr)


# **** a matmul ****

def _tune(arguments: argparse.Namespace) -> None:
    from tinygrad_nv.cpu.gemm.tune import bar
    from tinygrad_nv.tile.gemm.tune import Candidate, tune
    m, n, k = arguments.extents
    spec = dense(m, n, k, arguments.dtype, arguments.out, arguments.majors, arguments.batch,
                 arguments.epilogue, arguments.symbolic)
    if arguments.arch is None: arguments.arch = CPU if DEV.device == "CPU" else "sm_90a"
    if arguments.arch == CPU:
        _tune_cpu(spec, arguments)
        return
    if reason := why_not(spec, GPU(arguments.arch)):
        raise SpecError(f"no template takes {_shown(spec, arguments)} on {arguments.arch}: {reason}")
    with bar(str(spec)) as progress:
        tried = tune(spec, arguments.arch, arguments.beam, arguments.sm_count or 0, None, progress)
    if arguments.json:
        print(json.dumps({"spec": _shown(spec, arguments), "arch": arguments.arch, "flops": spec.flops,
                          "candidates": [_as_json(candidate) for candidate in tried]}))
        return

    def row(one: Candidate) -> tuple[str, ...]:
        counted = shortened(one.why, 32) if one.seconds is None else f"{one.seconds * 1e6:.2f}"
        return (str(one.schedule), f"{one.predicted.seconds * 1e6:.2f}", counted, one.predicted.bound,
                str(one.registers or "-"), f"{one.smem_bytes:,}")
    print("\n".join(aligned([HEAD, *map(row, tried)], (1, 2, 4, 5))))
    if (best := tried[0]).seconds is None: raise SpecError("no candidate can be used", "", "raise --beam")
    print(f"\n{_shown(spec, arguments)} on {arguments.arch}: {best.schedule}\n"
          f"{best.seconds * 1e6:.2f} us, {spec.flops / best.seconds / 1e12:.1f} TFLOP/s by the cost model; "
          f"kept in {database.path()}")


def _tune_cpu(spec: GemmSpec, arguments: argparse.Namespace) -> None:
    from tinygrad_nv.cpu.gemm.defaults import default
    from tinygrad_nv.cpu.gemm.tune import CPUCandidate, bar, tune
    from tinygrad_nv.cpu.target import host
    from tinygrad_nv.explain.levels_cpu import CPUMatmul
    if arguments.sm_count is not None:
        raise RequestError("--sm-count on a CPU", "an option of GPUs", "leave it out")
    here = host()
    if default(spec, here) is None:
        reason = TABLE.why_not(spec, here)
        raise SpecError(f"no template takes {_shown(spec, arguments)} on {here.arch}: {reason}")
    with bar(str(spec)) as progress: tried = tune(spec, here, arguments.beam, progress)
    predicted = {one.schedule: CPUMatmul(spec, one.schedule, here).seconds for one in tried}
    if arguments.json:
        candidates = [{"schedule": one.schedule.to_json(), "predicted_s": predicted[one.schedule],
                       "measured_s": one.seconds, "why": one.why} for one in tried]
        print(json.dumps({"spec": _shown(spec, arguments), "arch": here.arch, "flops": spec.flops,
                          "candidates": candidates}))
        return

    def row(one: CPUCandidate) -> tuple[str, ...]:
        measured = shortened(one.why, 32) if one.seconds is None else f"{one.seconds * 1e6:.2f}"
        return str(one.schedule), f"{predicted[one.schedule] * 1e6:.2f}", measured
    print("\n".join(aligned([("schedule", "predicted us", "measured us"), *map(row, tried)], (1, 2))))
    if (best := tried[0]).seconds is None: raise SpecError("no candidate can be used", "", best.why)
    print(f"\n{_shown(spec, arguments)} on {here.arch}: {best.schedule}\n"
          f"{best.seconds * 1e6:.2f} us, {spec.flops / best.seconds / 1e9:.1f} GFLOP/s; kept in "
          f"{database.path()}")


def _shown(spec: GemmSpec, arguments: argparse.Namespace) -> str:
    """A spec with its epilogue as it was given on the command line."""
    words = f", {arguments.epilogue}" if arguments.epilogue else ""
    return str(spec).split(", ")[0] + words


def _as_json(one: object) -> dict[str, object]:
    from tinygrad_nv.tile.gemm.tune import Candidate
    assert isinstance(one, Candidate)
    return {"schedule": one.schedule.to_json(), "predicted_s": one.predicted.seconds,
            "bound": one.predicted.bound, "counted_s": one.seconds, "registers": one.registers,
            "smem_bytes": one.smem_bytes, "why": one.why}


# **** the database ****

def _list(arguments: argparse.Namespace) -> None:
    entries = database.entries()
    if arguments.json:
        print(json.dumps({"path": str(database.path()), "entries": [entry.to_json() for entry in entries]}))
        return
    if not entries:
        print(f"no schedules in {database.path()}")
        return
    rows = [("matmul", "arch", "toolchain", "schedule", "us", "bound", "how")]
    for entry in entries:
        rows.append((shortened(str(entry.spec), 60), entry.arch, entry.toolchain,
                     str(entry.schedule), f"{entry.seconds * 1e6:.2f}", _bound(entry), entry.how))
    print("\n".join(aligned(rows, (4,))))


def _bound(entry: database.Entry) -> str:
    """The bottleneck on a GPU, by the cost model."""
    if not isinstance(entry.schedule, GemmSchedule): return "-"
    return predict(entry.spec, entry.schedule, entry.arch).bound


def _export(file: Path) -> None:
    entries = database.entries()
    file.write_text(database.dumped(entries))
    print(f"{len(entries)} schedules written to {file}")


def _wrong(entry: database.Entry) -> list[str]:
    """Why an entry's schedule is not legal on its target."""
    from tinygrad_nv.cpu.schedule import CPUSchedule
    from tinygrad_nv.cpu.target import CPU as Processor
    s = entry.schedule
    target = Processor(s.isa, 1) if isinstance(s, CPUSchedule) else GPU(entry.arch)
    return [*TABLE.problems(entry.spec, s, target)]


def _import(file: Path) -> None:
    try: text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}", "a file that --export wrote") from error
    legal = []
    for entry in database.parse(text, file):
        if wrong := _wrong(entry):
            database.note(f"{entry.schedule} is ignored for {entry.spec}: {'; '.join(wrong)}")
        else: legal.append(entry)
    database.store(legal)
    print(f"{len(legal)} schedules added to {database.path()}")
