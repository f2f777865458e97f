"""Rewrites that are registered when something is lowered first."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinygrad_nv import functional, hooks
from tinygrad_nv.hooks import rewrites
from tinygrad_nv.models.families import EMBEDDERS, FAMILIES

ROOT = Path(__file__).resolve().parents[3]
PATTERNS = "sum(name.startswith('tinygrad_nv.patterns.') for name in sys.modules)"


def said(script: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True,
                          check=True).stdout


def test_what_lowers_nothing_loads_no_patterns():
    assert said("import sys\nfrom tinygrad_nv import Tensor, hooks, LLM, SamplingParams, KernelRecord\n"
                "from tinygrad_nv.engine.bundled import opened\n"
                "with hooks.disabled(): Tensor([1.0]).add(1).realize()\n"
                f"print({PATTERNS})") == "0\n"


def test_the_first_graph_loads_them():
    assert said("import sys\nfrom tinygrad_nv import Tensor, hooks\n"
                "Tensor([1.0]).add(1).realize()\n"
                "print(*(f'tinygrad_nv.patterns.{name}' in sys.modules for name in ('program', 'gemm')),\n"
                "      *hooks.rewrites.rewrites, sep=', ')"
                ) == ("True, False, stable, statistics, division, named, attention, grouped_gemm, gemm, "
                      "norm, several devices\n")


@pytest.mark.parametrize("first", ["hooks.add_rewrite('mine', lambda sink: sink)",
                                   "hooks.remove_check('building')", "explain(Tensor([1.0]).sum())"])
def test_what_asks_for_them_loads_them(first: str):
    text = said(f"from tinygrad_nv import Tensor, explain, hooks\n{first}\nprint(*hooks.rewrites.rewrites)")
    assert text.startswith("stable statistics division named"), text
    assert "mine" not in text or text.endswith("mine\n"), "ours come first"


def test_each_is_called_once_and_again_after_an_exception():
    calls = []

    def register() -> None:
        calls.append(len(calls))
        hooks.configuration()       # asks for what is being registered
        if len(calls) == 1: raise RuntimeError("once")
    hooks.load_later()
    hooks.add_later(register)
    assert calls == []
    assert rewrites.has_rewrites()
    with pytest.raises(RuntimeError, match="once"): hooks.configuration()
    for _ in range(2): hooks.configuration()
    assert calls == [0, 1]


def test_names_of_functional_are_where_it_says():
    assert sorted(functional.PLACES) == sorted(functional.__all__) == sorted({*functional.__all__} &
                                                                           {*dir(functional)})
    assert all(getattr(functional, name) is not None for name in functional.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atention'"): functional.__getattr__("atention")


def test_families_are_where_they_say():
    assert [family.architecture for family in FAMILIES.values()] == list(FAMILIES)
    assert all(family.architecture for family in EMBEDDERS.values())
    assert "NoSuchModel" not in FAMILIES
