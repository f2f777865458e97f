"""The survey of mutants tells crashes from limits of time, and runs what reached one again, alone."""
from __future__ import annotations

import os
import time

import pytest

from tests.support.ptx import fuzz_ptx


def test_what_ends_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(seed: int, index: int) -> str:
        if index == 1: time.sleep(1.5)
        if index == 2: time.sleep(60)
        if index == 3: os._exit(7)
        if index == 4: raise ValueError("one of ours")
        return "found" if index == 1 else "runs"

    monkeypatch.setattr(fuzz_ptx, "outcome", outcome)
    monkeypatch.setattr(fuzz_ptx, "kernels", tuple)
    monkeypatch.setattr(fuzz_ptx, "library", lambda: None)
    told: list[str] = []
    counts, bad = fuzz_ptx.survey(0, 6, told.append, seconds=1, alone=4)
    assert counts == {"runs": 2, "found": 1, "slow": 1, "timeout": 1, "crash": 2}
    assert bad == [2, 3, 4]
    text = "\n".join(told)
    assert [word for word in ("mutant 1: 1 s were too few; alone within 4 s: found", "mutant 2: timeout",
                              "mutant 3: ended its process (7)", "ValueError: one of ours")
            if word not in text] == [], text
