"""Runs tinygrad's own tests out of a checkout of tinygrad 0.14.0, plain and with the hooks on, and compares.

    python bench/interop/upstream_tests.py PATH [--device CPU|EMU] [--only test_ops …] [--jobs N] [--resume]
    [--quick]

A test that passes plain and does not pass hooked is a difference. The exit code is 1 when there is one that
bench/interop/upstream_known.json does not list (tests that count kernels, with reasons and the words they
fail in), or when no test passes on either side.
Tests that fail plain do not count. The tests meet the installed tinygrad: of the checkout only its test files
are used. Plain is NV=0: tinygrad's schedules and kernels, with this package's compiler and emulated GPU.

Each file runs in a process of its own. A test that takes longer than --timeout seconds, or ends the process,
is reported, and the rest of its file runs in a new process. Everything is noted as it happens in
bench/results/cache/upstream/: --resume runs what is missing there. --quick runs plain only what did not pass
hooked: a failure that comes from an earlier test (DEV=EMU tells findings at the next synchronisation) is then
shown as a difference, too.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tinygrad

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, save, table

KNOWN = Path(__file__).parent / "upstream_known.json"
FOLDERS = ("backend", "unit")
NEEDED = ("test", "extra", "examples")     # of a checkout; tests import from all three
CPU_FILES = ("test_ops", "test_nn", "test_tensor", "test_jit", "test_schedule", "test_multitensor",
             "test_symbolic_jit", "test_symbolic_ops", "test_tensor_variable", "test_function", "test_call",
             "test_assign", "test_setitem", "test_setitem_schedule", "test_dtype", "test_dtype_alu",
             "test_dtype_weak", "test_gradient", "test_randomness", "test_optim", "test_arange",
             "test_attention", "test_softmax_fusion", "test_const_folding", "test_custom_kernel",
             "test_edgecases", "test_graph", "test_pickle", "test_rangeify", "test_subbuffer",
             "test_transcendental", "test_linearizer", "test_conv", "test_indexing", "test_getitem_ops",
             "test_linalg", "test_masked_tensor", "test_invalid_tensor", "test_jit_cases",
             "test_jit_footguns", "test_winograd", "test_hashing", "test_llm_mla", "test_llm_moe",
             "test_allreduce", "test_realize_is_realize", "test_schedule_cache", "test_symbolic_tensor",
             "test_tensor_data", "test_callify", "test_zero_copy", "test_to_numpy", "test_profiler")
EMU_FILES = ("test_ops", "test_nn", "test_tensor", "test_jit", "test_symbolic_jit", "test_symbolic_ops",
             "test_function", "test_assign", "test_setitem", "test_gradient", "test_optim",
             "test_softmax_fusion", "test_attention")
SIDES = {"hooked": "1", "plain": "0"}      # and NV
POLL_S = 0.2
START_S = 120                              # for imports and collection, beyond the time of a test


@dataclass(frozen=True)
class Run:
    """Settings of a whole call."""
    tests: Path         # the copy that is run
    logs: Path
    device: str
    timeout_s: float
    quick: bool = False

    def log(self, file: str, side: str) -> Path:
        """Returns the path at which the outcomes of a file's tests are noted."""
        return self.logs / side / (file.replace("/", ".") + "l")


@dataclass(frozen=True)
class Difference:
    """A test that passes plain and not hooked. `known`: the reason in the list, "" when it is not there."""
    test: str
    outcome: str
    why: str
    known: str


# **** running ****

def copy_needed(checkout: Path, folder: Path) -> None:
    """Copies what the tests need, without the checkout's tinygrad, which would be imported first."""
    for name in NEEDED:
        if (checkout / name).is_dir(): shutil.copytree(checkout / name, folder / name)


def find_files(tests: Path, names: Sequence[str]) -> list[str]:
    """Paths of the test files with these names, in this order."""
    places = [(tests / "test" / folder / f"{name}.py") for name in names for folder in FOLDERS]
    return [place.relative_to(tests).as_posix() for place in places if place.exists()]


def lines(log: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def note(log: Path, **line: Any) -> None:
    """Appends a line to a log."""
    with log.open("a") as file: file.write(json.dumps(line) + "\n")


def find_unfinished(log: Path) -> str | None:
    """The test that has begun and has no outcome."""
    known = lines(log)
    return known[-1]["begin"] if known and "begin" in known[-1] and "passed" not in known[-1] else None


def in_process(run: Run, file: str, side: str, log: Path) -> tuple[str, str]:
    """Runs a file's tests that the log has not, until they end or one takes too long. How it ended: "" when
    all was well, "timeout", or in words; and the end of what was printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NV")}
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:], str(RESULTS.parents[1])])
    env = {**kept, "NV": SIDES[side], "NV_STRICT": "1", "DEV": run.device, "UPSTREAM_LOG": str(log),
           "DERANDOMIZE_CI": "1", "RUN_SLOW": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "upstream_plugin", "-p", "no:cacheprovider",
               "-c", os.devnull, "--rootdir", str(run.tests), file]
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(command, cwd=run.tests, env=env, stdout=out, stderr=subprocess.STDOUT)
        size, since = -1, time.monotonic()
        while child.poll() is None:
            if (now := log.stat().st_size if log.exists() else 0) != size: size, since = now, time.monotonic()
            limit_s = run.timeout_s if find_unfinished(log) else run.timeout_s + START_S
            if time.monotonic() - since > limit_s:
                child.kill()
                child.wait()
                return "timeout", ""
            time.sleep(POLL_S)
        out.seek(0)
        said = out.read()[-2000:]
    # 0: passed, 1: some failed, 2: some could not be imported, 5: none left
    return ("", said) if child.returncode in (0, 1, 2, 5) else (f"exit code {child.returncode}", said)


def run_file(run: Run, file: str, side: str) -> None:
    """Runs a file to its end, in as many processes as it takes."""
    log = run.log(file, side)
    log.parent.mkdir(parents=True, exist_ok=True)
    if run.quick and side == "plain" and not log.exists():
        hooked = outcomes(run, file, "hooked")
        for name, line in hooked.items():
            if line["outcome"] == "passed": note(log, begin=name, passed=True)
        if count_passed(hooked) == len(hooked): note(log, end=True)
    if find_unfinished(log) is not None:       # a call before was ended here
        log.write_text("".join(json.dumps(line) + "\n" for line in lines(log)[:-1]))
    while not any("end" in line for line in lines(log)):
        ended, said = in_process(run, file, side, log)
        test = find_unfinished(log)
        if ended == "timeout": why = f"no end within {run.timeout_s:g} s"
        else: why = f"{ended}: {' '.join(said.split())[-300:]}"
        how = "timeout" if ended == "timeout" else "crashed"
        if test is not None or ended: note(log, id=test or file, outcome=how, why=why)
        if test is None: note(log, end=True)
    counts = Counter(line["outcome"] for line in lines(log) if "id" in line)
    print(f"{side:6} {file}: {', '.join(f'{count} {name}' for name, count in sorted(counts.items()))}",
          file=sys.stderr, flush=True)


# **** comparing ****

def outcomes(run: Run, file: str, side: str) -> dict[str, dict[str, Any]]:
    """Outcomes of a file's tests by id."""
    return {line["id"]: line for line in lines(run.log(file, side)) if "id" in line}


def reason_for(known: Sequence[dict[str, Any]], device: str, test: str, why: str) -> str:
    """The reason why this test may differ, "" when there is none: the device, the test and the words of its
    failure must be those of an entry."""
    for each in known:
        if device in each["devices"] and test in each["tests"] and each["says"] in why: return each["reason"]
    return ""


def differences(plain: dict[str, dict[str, Any]], hooked: dict[str, dict[str, Any]],
                known: Sequence[dict[str, Any]], device: str) -> list[Difference]:
    """Tests that pass plain and do not pass hooked."""
    made = []
    for test, before in plain.items():
        after = hooked.get(test, {"outcome": "not run"})
        if before["outcome"] != "passed" or after["outcome"] == "passed": continue
        why = after.get("why", "")
        made.append(Difference(test, after["outcome"], why, reason_for(known, device, test, why)))
    return made


def count_passed(found: Mapping[str, dict[str, Any]]) -> int:
    """How many tests passed."""
    return sum(each["outcome"] == "passed" for each in found.values())


def cells(counts: Mapping[str, int]) -> list[str]:
    """A row of the table."""
    both = [f"{counts[side]} of {counts[f'{side}_run']}" for side in SIDES]
    return [*both, str(counts["known"]), str(counts["differ"])]


def compare(run: Run, files: Sequence[str], known: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The table with what differs below it, and the record."""
    rows, record, shown = [], {}, []
    totals: Counter[str] = Counter()
    for file in files:
        plain, hooked = outcomes(run, file, "plain"), outcomes(run, file, "hooked")
        differ = differences(plain, hooked, known, run.device)
        counts = {"hooked": count_passed(hooked), "hooked_run": len(hooked),
                  "plain": count_passed(plain), "plain_run": len(plain),
                  "known": sum(bool(each.known) for each in differ),
                  "differ": sum(not each.known for each in differ)}
        totals.update(counts)
        rows.append([file, *cells(counts)])
        record[file] = {**counts, "differences": [vars(each) for each in differ]}
        shown += [f"{each.test}: {each.outcome}: {each.known or each.why}"
                  for each in sorted(differ, key=lambda each: bool(each.known))]
    rows.append(["all", *cells(totals)])
    head = ["", "passed hooked", "passed plain", "differ as known", "differ"]
    text = "\n".join([table(head, rows), *(["", "pass plain, do not pass hooked:", *shown] if shown else [])])
    return text, {**totals, "files": record}


def find_changed(checkout: Path) -> list[str]:
    """Files of tinygrad that are others in the checkout than installed, or missing there: its tests are near
    to those of the installed version, not the same."""
    installed = Path(tinygrad.__file__).parent
    theirs = (checkout / "tinygrad").rglob("*.py")
    pairs = [(path, installed / path.relative_to(checkout / "tinygrad")) for path in theirs]
    return [str(path.relative_to(checkout)) for path, own in pairs
            if not own.exists() or own.read_bytes() != path.read_bytes()]


def main() -> None:
    """Runs the tests on both sides; the exit code is 1 when something differs that is not listed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="a checkout of tinygrad 0.14.0")
    parser.add_argument("--device", choices=("CPU", "EMU"), default="CPU", help="the tests' default device")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="files by name, such as test_ops")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time (default 1)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one test (default 300)")
    parser.add_argument("--known", type=Path, default=KNOWN, help="the list of known differences")
    parser.add_argument("--logs", type=Path, default=RESULTS / "cache" / "upstream", help="where outcomes go")
    parser.add_argument("--quick", action="store_true", help="plain only what did not pass hooked")
    parser.add_argument("--resume", action="store_true", help="keep the outcomes that are there")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    own = version("tinygrad")
    if not (args.path / "test").is_dir():
        parser.error(f"{args.path} has no folder test; expected: a checkout of tinygrad {own}")
    names = args.only or (CPU_FILES if args.device == "CPU" else EMU_FILES)
    logs = args.logs / args.device
    if not args.resume: shutil.rmtree(logs, ignore_errors=True)
    known = json.loads(args.known.read_text())
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), logs.resolve(), args.device, args.timeout, args.quick)
        copy_needed(args.path, run.tests)
        files = find_files(run.tests, names)
        if not files: parser.error(f"no test file is called {', '.join(names)} in {args.path}/test")
        with ThreadPoolExecutor(args.jobs) as pool:
            for side in SIDES: list(pool.map(partial(run_file, run, side=side), files))
        text, record = compare(run, files, known)
    others = find_changed(args.path)
    print(text)
    if others: print(f"{len(others)} files of the checkout's tinygrad are not those of {own}")
    record = {"tinygrad": own, "checkout_changed": others, "device": args.device,
              "quick": args.quick, **record}
    if not args.dry: save(f"upstream_{args.device.lower()}", record)
    if not record["hooked"] and not record["plain"]:
        raise SystemExit("no test passes on either side, so nothing was compared; expected: what the tests "
                         "import is installed; --logs has their errors")
    raise SystemExit(1 if record["differ"] else 0)


if __name__ == "__main__": main()
