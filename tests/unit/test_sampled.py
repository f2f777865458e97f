"""Sweeps that are marked `sampled` (tests/conftest.py)."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


class Case:
    """What there is of a test when tests are collected."""
    path = Path("test_some.py")

    def __init__(self, nodeid: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.marks = nodeid, [each.mark for each in marks]

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None: self.marks.append(mark.mark)

    @property
    def slow(self) -> bool: return self.get_closest_marker("slow") is not None


@pytest.fixture
def chosen(request: pytest.FixtureRequest) -> Callable[[list[Case]], set[str]]:
    """The cases that are not slow."""
    plugin = next(one for one in request.config.pluginmanager.get_plugins()
                  if Path(getattr(one, "__file__", None) or "") == CONFTEST)

    def quick(cases: list[Case]) -> set[str]:
        plugin.pytest_collection_modifyitems(cases)
        return {case.nodeid for case in cases if not case.slow}
    return quick


def sweep(name: str, *marks: pytest.MarkDecorator) -> list[Case]:
    return [Case(f"test_some.py::{name}[{a}-{b}]", *marks) for a in range(12) for b in range(4)]


def test_all_cases_but_so_many_are_slow_and_always_the_same(chosen: Callable[[list[Case]], set[str]]):
    sampled = pytest.mark.sampled(16)
    found = chosen(sweep("test_a", sampled) + sweep("test_b", sampled))
    for name in ("test_a", "test_b"): assert len([each for each in found if name in each]) == 16
    assert found == chosen(sweep("test_b", sampled) + sweep("test_a", sampled))
    assert {each.rpartition("-")[2] for each in found if "test_a" in each} == {"0]", "1]", "2]", "3]"}


def test_others_are_left_as_they_are(chosen: Callable[[list[Case]], set[str]]):
    assert len(chosen(sweep("test_c"))) == 48
    assert chosen([Case("test_some.py::test_d[1]", pytest.mark.slow, pytest.mark.sampled(2)),
                   Case("test_some.py::test_d[2]", pytest.mark.sampled(2))]) == {"test_some.py::test_d[2]"}
