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
    """Those that it names, those that import it, those of its package."""
    first = "tests/unit/quant/test_layouts.py"
    found = list(mutants.select_tests(mutants.Mutant("", "tinygrad_nv/quant/gguf/blocks.py", "a", "b", "",
                                                     [first]), ROOT))
    assert found[0] == [first]
    assert "tests/unit/quant/test_gguf_model.py" in found[1]
    assert "tests/unit/quant/test_reader_gptq.py" in found[2]
    every = [test for tests in found for test in tests]
    assert len(every) == len(set(every))


def test_tests_that_failed():
    """As `pytest -rfE` names them: a case, a file that cannot be imported, none."""
    file = "tests/a/test_b.py"
    for line, test in ((f"FAILED {file}::test_c[x - y[0]] - assert [1] == 2", f"{file}::test_c[x - y[0]]"),
                       (f"FAILED {file}::C::test_c - assert [1] == 2", f"{file}::C::test_c"),
                       (f"ERROR {file} - NameError", file), (f"ERROR {file}", file), ("3 passed", "")):
        assert mutants.find_failures(f"x\n{line}\n1 failed") == [test] * bool(test)
