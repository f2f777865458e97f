"""A warm-up that takes long says how far it is."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.server import startup
from tinygrad_nv.server.waterfall import Waterfall


@pytest.mark.parametrize(("patience", "lines"), [(0.0, ["warm_up done=1 steps=3", "warm_up done=2 steps=3"]),
                                                 (60.0, [])])
def test_a_warm_up_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, patience: float, lines: list[str]):
    def steps(progress: Any) -> None:
        for done in range(4): progress(done, 3)

    monkeypatch.setattr(startup, "PROGRESS_S", patience)
    said: list[str] = []
    monkeypatch.setattr(startup.LOG, "info", said.append)
    llm = SimpleNamespace(runner=SimpleNamespace(step_store=None), defaults=SamplingParams(), embedder=None,
                          capture=steps, warm_up=lambda params, length: None, ready=lambda: None)
    startup.warm_up(llm, Waterfall())  # type: ignore[arg-type]
    assert said[:-1] == lines
    assert said[-1].startswith('startup stage="compile and capture" steps=3')
