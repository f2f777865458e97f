"""Every seeded bug is found, at its line, under every seed; the cured kernels give the right numbers and no
finding. ptxas says of all of them that they are PTX."""
from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.ptx.pairs import ALL, PAIRS, SEEDS, Kernel, assembles, points, rows, run, table
from tinygrad_nv.ptx.emulator import Emulator
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


def test_buffers_that_are_handed_back_in_a_scope_too_small_are_noted():
    """CUTLASS's consumers arrive at the producer's mbarrier without .cluster, after they have read."""
    case = next(each for each in ALL if each.name == "multicast")
    emu = Emulator(arch=case.arch)
    arguments, outputs = case.setup(emu)
    text = case.source(None).replace("arrive.release.cluster.shared::cluster", "arrive.shared::cluster")
    report = emu.launch(text, grid=case.grid, block=case.block, cluster=case.cluster, args=arguments)
    assert report.findings == []
    assert any("by an arrival at another CTA's mbarrier" in note.message for note in report.notes)
    assert all(np.array_equal(buffer.numpy(), expected) for buffer, expected in outputs)


# reads that come too early in some order of the warps; in others what they read is there
EARLY = {"ring-full-unawaited", "copied-no-copy-wait", "pipeline-no-wait", "epilogue-no-barrier-after",
         "tree-no-first-barrier", "double-no-barrier", "count-clear-races", "last-no-first-barrier",
         "flag-no-receiver-barrier", "exchange-no-first-barrier", "exchange-cta-barrier"}


def test_a_race_is_not_said_to_be_of_unwritten_bytes_alone():
    said = [finding for name, (case, bug) in zip(NAMES, PAIRS, strict=True) if name in EARLY
            for seed in SEEDS for finding in run(case, bug, seed).findings]
    assert set(NAMES) >= EARLY
    assert [str(finding) for finding in said if finding.kind == "uninitialized"] == []
    early = [finding for finding in said if "of what was not written yet" in finding.message]
    assert {finding.kind for finding in early} >= {"race"}
    assert all(re.search(r"the write \(line \d+, CTA \d\) is not ordered", each.message) for each in early)


def test_all_kinds_are_covered():
    assert {case.bugs[bug][0] for case, bug in PAIRS} == set(KINDS)
    assert len(PAIRS) >= 40


def test_table(capsys: pytest.CaptureFixture[str]):
    made = rows(ALL)
    with capsys.disabled(): print("\n" + table(made))
    assert [r for r in made if r.seeds < len(SEEDS) or r.alarms] == []
