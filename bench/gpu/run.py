"""One command that measures everything on a GPU: bounded, resumable, correctness first.

    python3 bench/gpu/run.py --call first                      # then second, third: ten minutes each at most
    python3 bench/gpu/run.py --minutes 9                       # all parts, in the order of --list
    python3 bench/gpu/run.py --part gemm --only "8B" --minutes 5 --resume
    python3 bench/gpu/run.py --part correctness --only test_mma

Rows are measured by a worker process of each part. A row that hangs or kills its process is reported as such,
and a new worker goes on with the next. Every finished row is in the result file at once; `--resume` leaves
out what the file has of the same sources, which are hashed. A row that would not fit into the minutes left
stays "not measured: out of time".

Exit code: 0, 1 when a row disagrees, failed, hung or died, 2 when there is nothing to measure, or nothing to
measure it on.
`--emulate` runs the same without a GPU, on small shapes, and claims no times.
"""
from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.parts import OUT_OF_TIME, PARTS, NotMeasured, Options, Part, Row
from bench.lib.measure import RESULTS, each, end_with_parent, git, processor, sources
from tinygrad_nv.runtime.observe import telemetry

# registers the parts in the order in which they run: of the last two a row takes minutes
for file in ("smoke", "correct", "chains", "gemm", "quant", "moe", "attention", "backward", "paged",
             "latent", "elementwise", "all_reduce", "train", "conv", "tile_language", "sweep", "decode",
             "step"):
    import_module(f"bench.gpu.{file}")

# parts of a call and when each is to end, in minutes from the call's beginning: estimates. What a part leaves
# the next one has; rows that do not fit are left to a later call
CALLS = {"first": {"smoke": 1.0, "correctness": 4.5, "chains": 6.0, "gemm": 9.5},
         "second": {"attention": 3.5, "backward": 5.0, "paged": 6.0, "latent": 6.4, "memory": 7.2,
                    "decode": 9.5},
         "third": {"quant": 9.5}, "fourth": {"moe": 9.5}, "fifth": {"all_reduce": 9.5},
         "sixth": {"train": 2.0, "conv": 3.5, "language": 5.0, "sweep": 8.0, "step": 9.5}}
SECONDS, CALL_SECONDS = 2.5, 1.0        # of a row of timings
PATIENCE = 5                            # times as long may a row take when a GPU is emulated
BAD = ("disagrees", "failed", "hung", "died")
DONE = ("measured", "emulated", *BAD)   # what --resume does not do again
START_S = 90.0                          # a worker imports torch, makes a context, reads recorded launches
NEEDED = "an NVIDIA GPU of compute capability 8.0 or later, its driver, cuda-python, and torch with CUDA"


# **** what is kept ****

class Results:
    """A result file: facts about the machine, and rows by part and name, each with its commit and the digest
    of the sources. Replaced whole, so that a reader never finds half of one."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        old = json.loads(path.read_text()) if path.exists() else {}
        self.record: dict[str, Any] = {**facts, "parts": old.get("parts", {})}

    def rows(self, part: str) -> dict[str, Row]:
        """Returns the rows of a part, as they are now."""
        return self.record["parts"].setdefault(part, {})

    def keep(self, part: str, name: str, row: Row) -> None:
        """Writes a row. One that was measured is not replaced by one that was not."""
        rows = self.rows(part)
        if row["status"] == "not measured" and rows.get(name, row)["status"] in DONE: return
        rows[name] = {**row, **{key: self.record[key] for key in ("commit", "dirty", "sources")}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(self.record, indent=1) + "\n")
        os.replace(beside, self.path)

    def is_known(self, part: str, name: str) -> bool:
        """Whether the row is there, of these sources."""
        row = self.rows(part).get(name)
        return row is not None and row["status"] in DONE and row.get("sources") == self.record["sources"]


def facts(options: Options) -> dict[str, Any]:
    """The machine and what runs on it; makes no context on the GPU."""
    gpu = telemetry.Telemetry(0) if not options.emulate else None
    commit = git("rev-parse", "--short", "HEAD") or options.commit
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!bench/results", ":!README.md")
    return {"gpu": gpu.name if gpu else f"emulated {options.arch}", "driver": _driver_version(gpu),
            "machine": processor(), "commit": commit, "dirty": bool(changed), "sources": sources(),
            "seed": options.seed,
            "python": sys.version.split()[0],
            **{name: _version(name) for name in ("torch", "triton", "tinygrad", "numpy", "cuda-bindings")}}


def _driver_version(gpu: telemetry.Telemetry | None) -> str:
    if gpu is None or not gpu.available: return ""
    answer = gpu.nvml.nvmlSystemGetDriverVersion()
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _version(package: str) -> str:
    try: return version(package)
    except PackageNotFoundError: return ""


def missing() -> str:
    """Returns the names of what measuring needs and is not here, "" when all is."""
    from tinygrad_nv.runtime.cuda import driver as cuda
    return cuda.missing()


# **** workers ****

class Worker:
    """A process that measures rows of a part: a name and the seconds it may take go in as a line of JSON, the
    row comes back as one. What a row prints goes to standard error."""

    def __init__(self, part: Part) -> None:
        command = [sys.executable, *sys.argv, "--work", part.name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.fresh = True

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout: self.answers.put(line)
        self.answers.put("")

    def row(self, name: str, budget_s: float, limit_s: float) -> Row:
        """Measured; "hung" after `limit_s` without an answer, "died" when the process ended."""
        assert self.process.stdin is not None
        self.fresh = False
        try:
            print(json.dumps([name, budget_s]), file=self.process.stdin, flush=True)
            line = self.answers.get(timeout=limit_s)
        except queue.Empty:
            return {"status": "hung", "why": f"no answer after {limit_s:.0f} s; its process was ended"}
        except BrokenPipeError: line = ""
        if line: return dict(json.loads(line))
        return {"status": "died", "why": f"its process ended with exit code {self.process.wait()}"}

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.wait()


def work(part: Part, options: Options) -> int:
    """A worker: rows from standard input to standard output, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    end_with_parent()
    assert part.open_worker is not None
    measure = part.open_worker(options)
    for line in sys.stdin:
        name, budget_s = json.loads(line)
        begun = time.perf_counter()
        try: row = measure(name, budget_s)
        except NotMeasured as why: row = {"status": "not measured", "why": str(why)}
        except Exception as error:
            row = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
        row["took_s"] = round(time.perf_counter() - begun, 3)
        print(json.dumps(row), file=answers, flush=True)
    return 0


def measure(part: Part, names: list[str], deadline: float, results: Results) -> Iterator[Row]:
    """Rows of a part, each kept as it comes. After one that failed a new worker goes on."""
    worker: Worker | None = None
    for name in each(names):
        left = deadline - time.perf_counter()
        start_s = part.expected_s if worker else 2 * part.expected_s
        if left < start_s: row: Row = {"status": "not measured", "why": OUT_OF_TIME}
        else:
            worker = worker or Worker(part)
            limit_s = part.limit_s + START_S * worker.fresh
            row = worker.row(name, left - part.expected_s / 2, min(limit_s, left))
            if row["status"] == "hung" and left < limit_s:
                row = {"status": "not measured", "why": OUT_OF_TIME}
            if row["status"] in ("failed", "hung", "died") or row.get("why") == OUT_OF_TIME:
                worker.end()
                worker = None
        results.keep(part.name, name, row)
        yield row
    if worker: worker.end()


# **** the command ****

def parser() -> argparse.ArgumentParser:
    """Its options."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--call", default="", choices=list(CALLS), help="some parts, ten minutes at most, with "
                      f"--resume and --seconds {CALL_SECONDS:g}: " + "; ".join(
                          f"{name}: {', '.join(parts)}" for name, parts in CALLS.items()))
    made.add_argument("--part", default="all", choices=[*PARTS, "all"], help="what to measure (default all)")
    made.add_argument("--minutes", type=float, default=9.5, help="at most, for all of it (default 9.5)")
    made.add_argument("--seconds", type=float, help=f"of a row of timings (default {SECONDS:g})")
    made.add_argument("--resume", action="store_true", help="leave out rows that the result file has")
    made.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains this")
    made.add_argument("--out", type=Path, metavar="FILE", help="(default bench/results/gpu_NAME.json)")
    made.add_argument("--list", action="store_true", help="the parts and how many rows each has")
    made.add_argument("--emulate", action="store_true", help="without a GPU: small shapes, no times")
    made.add_argument("--arch", default="sm_90a", help="of --emulate (default sm_90a)")
    made.add_argument("--seed", type=int, default=0, help="of the random values (default 0)")
    made.add_argument("--cases", type=Path, metavar="FILE", help="launches that gpu/record.py recorded")
    made.add_argument("--fa3", type=Path, metavar="PATH", help="hopper/ of FlashAttention's sources, built "
                      "by nvcc, or a folder of what fa3.py built (default: its package, where installed)")
    made.add_argument("--cutlass", type=Path, metavar="PATH", help="CUTLASS's include/ for --fa3 (default "
                      "csrc/cutlass/include beside hopper/)")
    made.add_argument("--without-tinygrad", action="store_true", help="leave out tinygrad's own kernels")
    made.add_argument("--commit", default="", help="what to call the code where there is no git")
    made.add_argument("--work", choices=list(PARTS), help=argparse.SUPPRESS)
    return made


def list_rows(part: Part, options: Options) -> list[str]:
    """The chosen rows of a part."""
    if part.absent: raise NotMeasured(part.absent)
    return [name for name in part.rows(options) if options.only in name]


def choose_parts(options: Options) -> dict[str, float]:
    """The parts that are asked for, in their order, and when each ends, in minutes from now."""
    if options.call: return {name: min(end, options.minutes) for name, end in CALLS[options.call].items()}
    return dict.fromkeys(PARTS if options.part == "all" else [options.part], options.minutes)


def parse_args(words: list[str] | None = None) -> Options:
    """The command line."""
    options = parser().parse_args(words)
    options.resume |= bool(options.call)
    options.seconds = options.seconds or (CALL_SECONDS if options.call else SECONDS)
    return options


def run(options: Options) -> int:
    """All chosen parts."""
    begun, known = time.perf_counter(), facts(options)
    slug = known["gpu"].lower().replace("nvidia ", "").replace(" ", "-") or "unknown"
    results = Results(options.out or RESULTS / f"gpu_{slug}.json", known)
    bad = found = 0
    for name, minutes in choose_parts(options).items():
        part = PARTS[name]
        if options.emulate: part = replace(part, limit_s=PATIENCE * part.limit_s)
        try: names = list_rows(part, options)
        except NotMeasured as why:
            print(f"\n{part.name}: not measured: {why}")
            continue
        if not names: continue
        found += len(names)
        todo = [name for name in names if not (options.resume and results.is_known(part.name, name))]
        for row in measure(part, todo, begun + 60 * minutes, results):
            bad += row["status"] in BAD
        rows = results.rows(part.name)
        print(f"\n{part.name}: {part.about}\n{part.render({name: rows[name] for name in names})}", flush=True)
    if not found:
        print(f"nothing was measured{f': no row has {options.only!r} in its name' if options.only else ''}; "
              "--list shows the parts", file=sys.stderr)
        return 2
    print(f"\n{time.perf_counter() - begun:.0f} s; written to {results.path}")
    return 1 if bad else 0


def main() -> int:
    """Measures, or says what is missing."""
    options = parse_args()
    if options.list:
        for part in PARTS.values():
            try: rows = f"{len(list_rows(part, options))} rows"
            except NotMeasured as why: rows = f"not measured: {why}"
            print(f"{part.name}: {part.about}; {rows}")
        return 0
    if find_spec("torch") is None:
        print("nothing to measure with: torch is not installed; it makes the inputs. To fix: pip install -e "
              "'.[cpu,test,bench]' in the checkout", file=sys.stderr)
        return 2
    if not options.emulate and (lacking := missing()):
        print(f"nothing to measure on: {lacking} (needed: {NEEDED}; without: --emulate)", file=sys.stderr)
        return 2
    return work(PARTS[options.work], options) if options.work else run(options)


if __name__ == "__main__": sys.exit(main())
