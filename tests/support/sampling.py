"""Which cases of a sweep run: tests that are marked `sampled(n)` (tests/conftest.py has the hooks).

Of such a test all cases but some are slow. Those that run without `-m slow` are n cases that are the same at
every run, n // 4 that the commit draws, so that other commits try other cases (where n < 4, one for half of
the commits), and those listed in tests/always.txt, which a draw found to fail once. `--sample-seed` repeats
the draw of another commit.
"""
from __future__ import annotations

import hashlib
import subprocess
import zlib
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from pathlib import Path
from random import Random

import pytest

ALWAYS = Path(__file__).resolve().parents[1] / "always.txt"
DRAWN = "drawn"     # the property of a case that the commit drew
NO_COMMIT = "0"


def commit_seed(root: Path) -> str:
    """Returns the commit that is checked out; "0" outside of a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try: done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError: return NO_COMMIT
    return done.stdout.strip()[:12] if done.returncode == 0 else NO_COMMIT


def read_always(path: Path = ALWAYS) -> list[str]:
    """Returns the cases of the list, without its comments."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.strip() and not line.startswith("#")]


def add_always(cases: Iterable[str], path: Path = ALWAYS) -> None:
    """Adds cases to the list."""
    known = read_always(path)
    with path.open("a") as file: file.writelines(f"{case}\n" for case in cases if case not in known)


def mark_slow(items: Iterable[pytest.Item], seed: str, always: Collection[str]) -> None:
    """Marks what does not run of each sweep as slow, and what the seed draws with the property `DRAWN`.
    Both orders are of hashes: unlike equal steps through a product of parameters, they have every value of
    each."""
    sweeps: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            sweeps.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for (_, name), cases in sweeps.items():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        fixed = mark.args[0]
        draws = fixed // 4 or hashlib.sha256(f"{seed} {name}".encode()).digest()[0] & 1
        cases.sort(key=lambda case: zlib.crc32(case.nodeid.encode()))
        rest = sorted(cases[fixed:],
                      key=lambda case: hashlib.sha256(f"{seed} {case.nodeid}".encode()).digest())
        for case in rest[:draws]: case.user_properties.append((DRAWN, seed))
        for case in rest[draws:]:
            if case.nodeid not in always: case.add_marker(pytest.mark.slow)


def shuffle(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Returns the tests file by file, in a random order of files and of the tests of each."""
    random, files = Random(seed), dict[str, list[pytest.Item]]()
    for item in items: files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    order = [*files.values()]
    for tests in (order, *order): random.shuffle(tests)
    return [*chain(*order)]
