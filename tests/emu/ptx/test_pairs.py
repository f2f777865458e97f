"""Every seeded bug is found, at its line, under every seed; the cured kernels give the right numbers and no
finding. ptxas says of all of them that they are PTX."""
from __future__ import annotations

import pytest
from pairs import ALL, PAIRS, SEEDS, Kernel, assembles, points, rows, run, table

from tinygrad_nv.ptx.emulator.report import KINDS

NAMES = [f"{case.name}-{bug}" for case, bug in PAIRS]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_cure_is_right(case: Kernel):
    for seed in SEEDS:
        outcome = run(case, None, seed)
        assert outcome.findings == [], seed
        assert outcome.exact, seed


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_a_cure_is_ptx(case: Kernel):
    assert assembles(case, None)


@pytest.mark.parametrize(("case", "bug"), PAIRS, ids=NAMES)
def test_a_bug_is_found(case: Kernel, bug: str):
    for seed in SEEDS:
        findings = run(case, bug, seed).findings
        said = "\n".join(map(str, findings)) or "no finding"
        assert any(points(case, bug, finding) for finding in findings), \
            f"seed {seed}: {case.bugs[bug]} at lines {sorted(case.lines(bug))} expected\n{said}"


@pytest.mark.sampled(81)
@pytest.mark.parametrize(("case", "bug"), PAIRS, ids=NAMES)
def test_a_bug_is_ptx(case: Kernel, bug: str):
    assert assembles(case, bug) is (bug not in case.refused)


@pytest.mark.parametrize(("case", "bug"), PAIRS, ids=NAMES)
def test_a_pair_differs_in_its_cure_alone(case: Kernel, bug: str):
    cured, bugged = case.source(None).splitlines(), case.source(bug).splitlines()
    assert len(cured) == len(bugged)
    changed = [(x, y) for x, y in zip(cured, bugged, strict=True) if x != y]
    assert 1 <= len(changed) <= 8
    assert all(not x or not y for x, y in changed)  # a line is there or not, and otherwise the same


def test_all_kinds_are_covered():
    assert {case.bugs[bug][0] for case, bug in PAIRS} == set(KINDS)
    assert len(PAIRS) >= 40


def test_table(capsys: pytest.CaptureFixture[str]):
    made = rows(ALL)
    with capsys.disabled(): print("\n" + table(made))
    assert [r for r in made if r.seeds < len(SEEDS) or r.alarms] == []
