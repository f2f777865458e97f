"""bench/cpu/mutants.py: its list fits the sources, and it finds the tests that are near a file."""
from __future__ import annotations

from bench.cpu import mutants
from tests.support import ROOT


def test_each_mutant_can_be_made():
    """Where a line of the list was changed: change the list, too, or take another fault of the same kind."""
    listed = mutants.read_mutants()
    assert mutants.problems(listed) == []
    assert len(listed) == 100


def test_tests_near_a_file():
    found = list(mutants.select_tests(mutants.Mutant("", "tinygrad_nv/quant/packing.py", "a", "b", "",
                                                     ["tests/unit/quant/test_layouts.py"]), ROOT))
    assert found[0] == ["tests/unit/quant/test_layouts.py"]
    assert "tests/unit/quant/test_reader_gptq.py" in found[-1]
    every = [test for tests in found for test in tests]
    assert len(every) == len(set(every))


def test_the_test_that_failed():
    """As `pytest -rfE` names it: a case, a file that cannot be imported, none."""
    file = "tests/a/test_b.py"
    for line, test in ((f"FAILED {file}::test_c[x - y[0]] - assert [1] == 2", f"{file}::test_c[x - y[0]]"),
                       (f"FAILED {file}::C::test_c - assert [1] == 2", f"{file}::C::test_c"),
                       (f"ERROR {file} - NameError", file), (f"ERROR {file}", file), ("3 passed", "")):
        assert mutants.failed_test(f"x\n{line}\n1 failed") == test
