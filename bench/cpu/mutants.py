"""How many wrong edits of the sources the quick test run finds.

    python bench/cpu/mutants.py [--only TEXT ...] [--again] [--commit cba39c3d --results FILE.json]

Protocol. `mutants.toml` has the edits: a text that is found once in a file, and what takes its place. Each is
made in a worktree of git's in a temporary folder, never in the checkout, and quick tests run until one fails:
those that the mutant names, then those that import the file or lie in its folder, then those of its package.
A mutant is

    failed      a test fails; at the end all such tests are run without an edit, and the mutant is
    killed      where its test passes then
    survived    none of these tests fails
    unclear     its test fails without the edit, too, or tests take longer than --limit

The results, bench/results/mutants.json, are written after each mutant. A run goes on where the last one
ended: what was killed is not tried again without `--again`; what survived is, and edits that have changed.
"""
from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import table

ROOT = Path(__file__).resolve().parents[2]
MUTANTS, RESULTS = Path(__file__).with_suffix(".toml"), ROOT / "bench" / "results" / "mutants.json"
OWN_TEST = "tests/unit/bench/test_mutants.py"   # fails with every mutant, as its text is not there
LIMIT_S = 3600      # of one selection of tests
KEPT = ("killed", "failed")     # verdicts that a later run takes over
PASSED, FAILED, INTERRUPTED, MISUSED, NONE = 0, 1, 2, 4, 5   # exit codes of pytest
# folders of tests/ for what is in a package, besides unit/ and emu/ with its name
MORE = {"torch": ["unit/torch_backend"], "quantize": ["unit/quant"], "models": ["models"],
        "tile": ["emu/patterns", "unit/cpu"], "cpu": ["unit/patterns"], "patterns": ["unit/cpu"],
        "quant": ["models"], "ptx": ["emu/tile"], "train": ["models"], "server": ["error", "cli"],
        "engine": ["models"], "kvcache": ["unit/engine"], "dist": ["models"], "numerics": ["unit/train"]}


@dataclass(frozen=True)
class Mutant:
    """An edit of `file`, what is wrong with it, and the tests that are tried first."""
    name: str
    file: str
    old: str
    new: str
    fault: str
    tests: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Equal for equal edits."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Row:
    """Verdict on a mutant: `test` is the one that killed it."""
    name: str
    file: str
    verdict: str
    test: str
    seconds: float
    commit: str
    seed: str
    key: str


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """Returns the mutants of a file."""
    return [Mutant(**each) for each in tomllib.loads(path.read_text())["mutant"]]


def problems(mutants: Sequence[Mutant], root: Path = ROOT) -> list[str]:
    """Says which mutants cannot be made in a tree; empty where all can."""
    out = [f"{name!r} twice" for name in {each.name for each in mutants}
           if sum(each.name == name for each in mutants) > 1]
    for each in mutants:
        path = root / each.file
        found = path.read_text().count(each.old) if path.is_file() else 0
        if found != 1: out.append(f"{each.name!r}: {found} times in {each.file}: {each.old!r}")
        if not each.fault or each.old == each.new: out.append(f"{each.name!r} is no fault")
        out += [f"{each.name!r}: there is no {test}" for test in each.tests
                if not (root / test.partition("::")[0]).exists()]
    return out


# **** tests ****

def select_tests(mutant: Mutant, root: Path) -> Iterator[list[str]]:
    """Yields tests, nearest first: those that the mutant names, those that import its file or lie in its
    folder, those of its package. None twice."""
    seen: set[str] = set()
    for chosen in (mutant.tests, near_tests(mutant.file, root), package_tests(mutant.file)):
        files = [test for each in chosen for test in (
            [str(path.relative_to(root)) for path in sorted((root / each).rglob("test_*.py"))]
            if (root / each).is_dir() or "." not in each else [each])]
        if new := [each for each in dict.fromkeys(files) if each not in seen]: yield new
        seen.update(files)


def near_tests(file: str, root: Path) -> list[str]:
    """Returns the tests that import a file, and the folders of tests/ that mirror the one it is in."""
    package, stem = file.removeprefix("tinygrad_nv/").rpartition("/")[0], Path(file).stem
    dotted = "tinygrad_nv." + package.replace("/", ".")
    imports = re.compile(rf"{re.escape(dotted)}(\.| import .*\b){stem}\b")
    found = [path for path in sorted((root / "tests").rglob("test_*.py")) if imports.search(path.read_text())]
    folders = [f"tests/{kind}/{package.removesuffix('/csrc')}" for kind in ("unit", "emu")]
    return [*(str(path.relative_to(root)) for path in found), *(each for each in folders if "/" in package)]


def package_tests(file: str) -> list[str]:
    """Returns the folders of tests of a file's package."""
    package = file.removeprefix("tinygrad_nv/").split("/")[0]
    return [f"tests/{each}" for each in (f"unit/{package}", f"emu/{package}", *MORE.get(package, ()))]


def find_failures(output: str) -> list[str]:
    """Returns the tests that pytest's summary names as failed, or as not there."""
    return re.findall(r"(?m)^(?:FAILED|ERROR|ERROR: not found:) (?:/\S*/)?(tests/\S+?\.py"
                      r"(?:::[^\s\[]+(?:\[.*?\])?)?)(?= - |$)", output)


class Tree:
    """A commit's files in a temporary folder."""

    def __init__(self, root: Path, seed: str, limit: float, selections: int) -> None:
        self.root, self.limit, self.selections = root, limit, selections
        self.options = ["-q", "-rfE", "--tb=no", "-m", "not slow", "-p", "no:cacheprovider"]
        # what draws cases is younger than some commits
        if "--sample-seed" in (root / "tests" / "conftest.py").read_text():
            self.options.append(f"--sample-seed={seed}")

    def test(self, *arguments: str) -> tuple[int, str]:
        """Runs pytest; returns its exit code and what it printed. Raises `subprocess.TimeoutExpired`."""
        more = {"PYTHONPATH": str(self.root), "NV_SPEC": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
        done = subprocess.run([sys.executable, "-m", "pytest", *self.options, f"--ignore={OWN_TEST}",
                               *arguments], cwd=self.root, env={**os.environ, **more}, capture_output=True,
                              text=True, check=False, timeout=self.limit, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    @contextlib.contextmanager
    def edit(self, mutant: Mutant) -> Iterator[None]:
        """Has the file edited inside."""
        path = self.root / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, mutant
        try:
            self._write(path, text.replace(mutant.old, mutant.new))
            yield
        finally: self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # compiled code is found by seconds and size, which may be the same
        if path.suffix == ".py": Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """Returns the verdict on a mutant, and the test that fails."""
        try:
            with self.edit(mutant):
                for tests in islice(select_tests(mutant, self.root), self.selections):
                    code, output = self.test("-x", *tests)
                    if code in (FAILED, INTERRUPTED):
                        return "failed", next(iter(find_failures(output)), output[-300:])
                    if code < 0: return "failed", tests[0]      # the process died, in one of them
                    if code not in (PASSED, NONE): raise RuntimeError(f"pytest ended with {code}: {output}")
        except subprocess.TimeoutExpired: return "unclear", f"no end within {self.limit:g} s"
        return "survived", ""

    def find_failing(self, tests: Sequence[str]) -> set[str]:
        """Returns those of some tests that fail, or are not there, in the files as they are."""
        files = [test for test in tests if "::" not in test]    # that could not be imported
        bad = set(find_failures(self.test("--collect-only", *files)[1])) if files else set()
        left = [test for test in tests if test not in files]
        while left:
            code, output = self.test(*left)
            found = set(find_failures(output))
            bad |= found
            if code in (PASSED, FAILED) or not found: break
            left = [test for test in left if test not in found]
        return bad


# **** runs ****

def git(*words: str) -> str:
    """Returns what git prints in this checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


@contextlib.contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """Yields a folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        path = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(path), commit)
        try: yield path
        finally: git("worktree", "remove", "--force", str(path))


def read_rows(path: Path) -> dict[str, Row]:
    """Returns the rows of a run before, by name."""
    if not path.exists(): return {}
    return {each["name"]: Row(**each) for each in json.loads(path.read_text())["mutants"]}


def write_rows(path: Path, mutants: Sequence[Mutant], rows: dict[str, Row]) -> None:
    """Writes the rows of mutants that there are, in their order."""
    kept = [rows[each.name] for each in mutants if each.name in rows and rows[each.name].key == each.key]
    record: dict[str, Any] = {"of": len(mutants), "tried": len(kept),
                              "killed": sum(row.verdict == "killed" for row in kept),
                              "mutants": [asdict(row) for row in kept]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def run(options: argparse.Namespace) -> dict[str, Row]:
    """Tries the mutants, and returns the rows of all that were tried."""
    mutants, rows = read_mutants(options.mutants), read_rows(options.results)
    commit = git("rev-parse", options.commit)[:12]
    seed = options.sample_seed or commit
    with check_out(commit) as root:
        if found := problems(mutants, root): raise SystemExit("\n".join(found))
        tree = Tree(root, seed, options.limit, options.selections)
        wanted = [each for each in mutants if not options.only or any(text in each.name or text in each.file
                                                                      for text in options.only)]
        for number, each in enumerate(wanted, 1):
            known = rows.get(each.name)
            if known and known.key == each.key and known.verdict in KEPT and not options.again: continue
            begun = time.perf_counter()
            verdict, test = tree.judge(each)
            took = round(time.perf_counter() - begun, 1)
            rows[each.name] = row = Row(each.name, each.file, verdict, test, took, commit, seed, each.key)
            write_rows(options.results, mutants, rows)
            print(f"{number} of {len(wanted)}: {row.verdict} after {row.seconds:.0f} s: {each.name}"
                  f"{f' ({test})' if test else ''}", flush=True)
        if unchecked := [row for row in rows.values() if row.verdict == "failed"]:
            bad = tree.find_failing(sorted({row.test for row in unchecked}))
            for row in unchecked:
                rows[row.name] = replace(row, verdict="unclear" if row.test in bad else "killed")
            write_rows(options.results, mutants, rows)
    return {each.name: rows[each.name] for each in mutants if each.name in rows}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those whose name or file has such a text")
    parser.add_argument("--again", action="store_true", help="try those that were killed, too")
    parser.add_argument("--commit", default="HEAD", help="the commit that is tested (default: HEAD)")
    parser.add_argument("--sample-seed", metavar="SEED", help="draw cases of sweeps so (default: the commit)")
    parser.add_argument("--selections", type=int, default=3, choices=(1, 2, 3), metavar="N",
                        help="only the first N selections of tests (default: 3)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for some tests")
    parser.add_argument("--mutants", type=Path, default=MUTANTS, help="another list")
    parser.add_argument("--results", type=Path, default=RESULTS, help="another file for the results")
    options = parser.parse_args()
    rows = list(run(options).values())
    lines = [[each.name, each.verdict, f"{each.seconds:.0f} s", each.test] for each in rows]
    print(table(["mutant", "", "time", "test"], lines))
    killed = sum(each.verdict == "killed" for each in rows)
    print(f"{killed} of {len(rows)} killed")
    return int(killed < len(rows))


if __name__ == "__main__": sys.exit(main())
