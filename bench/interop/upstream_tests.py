"""Runs tinygrad's own tests out of a checkout of tinygrad 0.14.0, plain and with the hooks on, and compares.

    python bench/interop/upstream_tests.py PATH [--device CPU|EMU] [--only test_ops …] [--jobs N] [--resume]
    [--quick]

A test that passes plain and does not pass hooked is a difference. The exit code is 1 when there is one that
bench/interop/upstream_known.json does not list (tests that count kernels, with reasons and the words they
fail in), or when no test passes on either side.
Tests that fail plain do not count. The tests meet the installed tinygrad: of the checkout only its test files
are used. Plain is NV=0: tinygrad's schedules and kernels, with this package's compiler and emulated GPU.

Outcomes are noted as they happen in bench/results/cache/upstream/ (peer_tests.py): --resume runs what is
missing there. --quick runs plain only what did not pass hooked: a failure that comes from an earlier test
(DEV=EMU tells findings at the next synchronisation) is then shown as a difference, too.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import tinygrad

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.interop.peer_tests import PYTEST, Run, compare, exit_with, run_files
from bench.lib.measure import RESULTS, save

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


def copy_needed(checkout: Path, folder: Path) -> None:
    """Copies what the tests need, without the checkout's tinygrad, which would be imported first."""
    for name in NEEDED:
        if (checkout / name).is_dir(): shutil.copytree(checkout / name, folder / name)


def find_files(tests: Path, names: Sequence[str]) -> list[str]:
    """Paths of the test files with these names, in this order."""
    places = [(tests / "test" / folder / f"{name}.py") for name in names for folder in FOLDERS]
    return [place.relative_to(tests).as_posix() for place in places if place.exists()]


def start(tests: Path, device: str, file: str, side: str) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and folder of a process that runs a file's tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NV")}
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:], str(RESULTS.parents[1])])
    env = {**kept, "NV": SIDES[side], "NV_STRICT": "1", "DEV": device, "DERANDOMIZE_CI": "1", "RUN_SLOW": "1",
           "PYTHONPATH": paths}
    return [sys.executable, *PYTEST, "-p", "upstream_plugin", "--rootdir", str(tests), file], env, tests


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
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder)
        run = Run("hooked", "plain", logs.resolve(), args.timeout, partial(start, tests, args.device),
                  json.loads(args.known.read_text()), args.device, quick=args.quick)
        copy_needed(args.path, tests)
        files = find_files(tests, names)
        if not files: parser.error(f"no test file is called {', '.join(names)} in {args.path}/test")
        run_files(run, files, args.jobs)
        text, record = compare(run, files)
    others = find_changed(args.path)
    print(text)
    if others: print(f"{len(others)} files of the checkout's tinygrad are not those of {own}")
    record = {"tinygrad": own, "checkout_changed": others, "device": args.device,
              "quick": args.quick, **record}
    if not args.dry: save(f"upstream_{args.device.lower()}", record)
    exit_with(run, record)


if __name__ == "__main__": main()
