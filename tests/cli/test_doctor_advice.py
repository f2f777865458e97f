"""Doctor's advice is a command of the Python that runs it."""
from __future__ import annotations

import importlib.util
import sys

import pytest

from tinygrad_nv.cli import doctor
from tinygrad_nv.cli.doctor_finding import CheckResult


@pytest.mark.parametrize(("has_pip", "command"), [
    (True, f"{sys.executable} -m pip install nvidia-cuda-nvcc"),
    (False, f"UV_PYTHON={sys.executable} uv pip install nvidia-cuda-nvcc")])
def test_packages_go_to_this_python(monkeypatch: pytest.MonkeyPatch, has_pip: bool, command: str):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: (found("sys") if has_pip else None)
                        if name == "pip" else found(name))
    shown = doctor.table([CheckResult("ptxas", "missing", "not there", "pip install nvidia-cuda-nvcc")])
    assert shown.splitlines()[1].strip() == f"→ {command}"
