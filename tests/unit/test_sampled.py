"""What tests/support/sampling.py and durations.py do: cases of sweeps, and processor time of tests."""
from __future__ import annotations

import gc
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ROOT, durations, sampling
from tests.support.lazy import lazy


class Case:
    """What there is of a test when tests are collected."""
    path = Path("test_some.py")

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks, self.user_properties = nodeid, [each.mark for each in marks], []

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None: self.marks.append(mark.mark)


def choose(cases: list[Case], seed: str = "0", always: tuple[str, ...] = ()) -> tuple[set[str], set[str]]:
    """The cases that are not slow, and those of them that were drawn."""
    sampling.mark_slow(cases, seed, always)
    quick = [case for case in cases if case.get_closest_marker("slow") is None]
    return {case.nodeid for case in quick}, {case.nodeid for case in quick if case.user_properties}


def sweep(name: str, *marks: pytest.MarkDecorator) -> list[Case]:
    return [Case(f"test_some.py::{name}[{a}-{b}]", *marks) for a in range(12) for b in range(4)]


def test_some_cases_are_always_the_same_and_some_drawn_by_the_commit():
    sampled = pytest.mark.sampled(16)
    chosen = {seed: choose(sweep("test_a", sampled) + sweep("test_b", sampled), seed) for seed in "012"}
    same = set.intersection(*(quick - drawn for quick, drawn in chosen.values()))
    for quick, drawn in chosen.values():
        for name in ("test_a", "test_b"):
            assert len([each for each in quick if name in each]) == 16 + 4
            assert len([each for each in drawn if name in each]) == 4
        assert quick - drawn == same
    assert {each.rpartition("-")[2] for each in same if "test_a" in each} == {"0]", "1]", "2]", "3]"}
    assert len(set(map(frozenset, (drawn for _, drawn in chosen.values())))) == 3
    assert choose(sweep("test_b", sampled) + sweep("test_a", sampled), "1") == chosen["1"]


def test_four_hundred_commits_try_nearly_every_case():
    chosen = [choose(sweep("test_a", pytest.mark.sampled(1)), str(seed)) for seed in range(400)]
    tried = set.union(*(quick for quick, _ in chosen))
    assert 48 * 0.9 < len(tried) <= 48      # (1 - 1/94)^400 are left, 1 of 48
    assert {len(drawn) for _, drawn in chosen} == {0, 1}
    assert 160 < sum(len(drawn) for _, drawn in chosen) < 240


def test_listed_cases_run_each_time_and_others_are_left_as_they_are():
    assert len(choose(sweep("test_c"))[0]) == 48
    last = sweep("test_c")[-1].nodeid
    one = pytest.mark.sampled(1)
    for seed in "012345": assert last in choose(sweep("test_c", one), seed, (last,))[0]
    assert choose([Case("test_some.py::test_d[1]", pytest.mark.slow, pytest.mark.sampled(2)),
                   Case("test_some.py::test_d[2]", pytest.mark.sampled(2))])[0] == {"test_some.py::test_d[2]"}


def test_the_seed_is_the_commit(tmp_path: Path, pytestconfig: pytest.Config):
    assert sampling.commit_seed(tmp_path) == "0"
    git = ("git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run([*git, *command], check=True)
    seed = sampling.commit_seed(tmp_path)
    assert len(seed) == 12
    assert int(seed, 16)
    assert pytestconfig.option.sample_seed      # that of all workers


def test_a_drawn_case_that_failed_is_listed(tmp_path: Path):
    listed = tmp_path / "always.txt"
    assert sampling.read_always(listed) == []
    listed.write_text("# a comment\n")
    sampling.add_always(["a.py::test[1]", "a.py::test[2]"], listed)
    sampling.add_always(["a.py::test[2]", "a.py::test[3]"], listed)
    assert sampling.read_always(listed) == [f"a.py::test[{number}]" for number in (1, 2, 3)]


def test_the_list_names_tests_that_there_are():
    for case in sampling.read_always():
        file, _, name = case.partition("[")[0].partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (ROOT / file).read_text(), case


# **** processor time ****

def report(nodeid: str, **noted: float) -> Any: return SimpleNamespace(nodeid=nodeid, **noted)


def test_processor_time_is_added_up_by_file_and_folder(pytestconfig: pytest.Config):
    plugin = durations.Durations(pytestconfig)
    for name, seconds in (("unit/cpu/test_a.py::test[1]", 1.0), ("unit/cpu/deep/test_b.py::test", 2.0),
                          ("cli/test_c.py::test", 4.0)):
        plugin.pytest_runtest_logreport(report(f"tests/{name}", processor_seconds=seconds))
    plugin.pytest_runtest_logreport(report("tests/cli/test_c.py::test_that_is_slow"))
    assert plugin.files["tests/unit/cpu/test_a.py"] == 1
    assert durations.sum_folders(plugin.files) == Counter({"unit/cpu": 3.0, "cli": 4.0})
    made = tomllib.loads(durations.budgets_of({"tests/unit/cpu/a.py": 8.5, "tests/cli/b.py": 1.0}, 0.02))
    assert made == {"headroom": 2.0, "loop": 0.02, "other": 60, "seconds": {"unit/cpu": 9, "cli": 5}}
    assert made.keys() == tomllib.loads(durations.BUDGETS.read_text()).keys()


def test_processor_time_has_children_and_workers():
    before = durations.processor_seconds()
    subprocess.run(["sh", "-c", "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"], check=True)
    assert durations.processor_seconds() - before > 0.01
    assert durations.loop_seconds() > 0


def test_a_folder_over_its_budget_is_named():
    budgets = {"headroom": 2.0, "loop": 0.5, "other": 10, "seconds": {"unit/cpu": 100}}
    assert durations.exceeded({"unit/cpu": 199, "cli": 19}, budgets, 0.5) == []
    assert durations.exceeded({"unit/cpu": 199, "cli": 19}, budgets, 0.1) == []     # a faster processor
    assert durations.exceeded({"unit/cpu": 399, "cli": 39}, budgets, 1.0) == []     # one half as fast
    [cpu, cli] = reversed(durations.exceeded({"unit/cpu": 201, "cli": 21}, budgets, 0.5))
    assert cpu.startswith("tests/unit/cpu took 201 s of processor time, and may take 200 here")
    assert cli.startswith("tests/cli took 21 s of processor time, and may take 20 here")


def test_shards_have_each_file_once_and_equal_shares():
    seconds = {f"tests/test_{number}.py": float(number) for number in range(40)}
    files = [*seconds, "tests/test_new.py"]
    parts = [durations.pick_shard(files, f"{part}/3", seconds) for part in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    shares = [sum(seconds.get(file, 1.0) for file in part) for part in parts]
    assert max(shares) - min(shares) < 4
    with pytest.raises(pytest.UsageError, match="--shard 4/3"): durations.pick_shard([], "4/3", seconds)


# **** collection ****

def test_collections_of_garbage_are_on_and_modules_are_imported_on_use():
    assert gc.isenabled()       # tests/conftest.py disables them until tests are collected
    assert not hasattr(lazy("antigravity"), "__wrapped__")      # pytest asks this of everything in a module
    assert "antigravity" not in sys.modules
    assert lazy("json").dumps([1]) == "[1]"


def test_a_shuffled_run_has_the_files_in_another_order_and_the_tests_of_each():
    cases = [Case(f"test_{file}.py::test_{i}") for file in "abcdef" for i in range(6)]
    names = [[case.nodeid for case in sampling.shuffle(cases, seed)] for seed in ("1", "1", "2")]
    assert names[0] == names[1] != names[2]
    assert sorted(names[0]) == sorted(case.nodeid for case in cases)
    files = [name.partition("::")[0] for name in names[0]]
    assert files == [file for file in dict.fromkeys(files) for _ in range(6)] != sorted(files)
    assert names[0][:6] != sorted(names[0][:6])
