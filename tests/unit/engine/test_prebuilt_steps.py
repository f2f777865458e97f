"""Steps that come with the bundled model: used where they are of these sources and for this machine."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.engine import prebuild
from tinygrad_nv.engine.worker import prebuilt_steps, step_file
from tinygrad_nv.tile import database

FACTS, PLACES = ("weights", 16), [("model.embedding", 1024, "float", 0)]
STEPS = {"step": UOp(Ops.LINEAR, src=(UOp(Ops.CUSTOM_FUNCTION, src=(UOp(Ops.LINEAR),), arg="graph").call(),))}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a file of steps, on a machine that runs them."""
    monkeypatch.setattr(prebuilt_steps, "flags", lambda: prebuilt_steps.LEVEL_3)
    monkeypatch.setattr(prebuilt_steps.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(database, "state", lambda: ("", None))
    for name in ("CC", "NV_CPU_ISA", "NV_QUANT_ACTIVATIONS"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(prebuilt_steps, "BUNDLED", tmp_path.resolve())
    prebuilt_steps.write(tmp_path / prebuilt_steps.NAME, STEPS, FACTS, PLACES)
    return tmp_path


def test_they_are_read(model: Path):
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == STEPS


def test_those_of_another_model_are_not(model: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps have machine code: no directory of a user's may bring some."""
    monkeypatch.setattr(prebuilt_steps, "BUNDLED", model.parent)
    monkeypatch.setattr(step_file, "loads", lambda data, target: pytest.fail("a file was read"))
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == {}


def test_those_of_other_sources_weights_or_options_are_not(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert prebuilt_steps.read(model, "CPU", ("weights", 8), PLACES) == {}
    assert prebuilt_steps.read(model, "CPU", FACTS, []) == {}
    monkeypatch.setattr(step_file, "sources", lambda: "others")
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == {}
    assert "other sources" in prebuilt_steps.why_unused(model, "CPU", FACTS, PLACES)


def test_why_they_are_not_used_is_said(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert prebuilt_steps.why_unused(model, "CPU", FACTS, PLACES) == ""
    assert prebuilt_steps.why_unused(model.parent, "CPU", FACTS, PLACES) == "", "another model has none"
    assert prebuilt_steps.why_unused(model, "EMU", FACTS, PLACES) == "the device is EMU"
    (model / prebuilt_steps.NAME).unlink()
    assert prebuilt_steps.why_unused(model, "CPU", FACTS, PLACES) == f"there is no {prebuilt_steps.NAME}"
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == {}


@pytest.mark.parametrize(("name", "value", "why"), [
    ("CC", "clang", "CC is set"), ("NV_CPU_ISA", "portable", "NV_CPU_ISA is set")])
def test_a_setting_that_changes_kernels_leaves_them_out(model: Path, monkeypatch: pytest.MonkeyPatch,
                                                        name: str, value: str, why: str):
    monkeypatch.setenv(name, value)
    assert prebuilt_steps.why_not("CPU") == why
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == {}


def test_another_processor_or_device_leaves_them_out(model: Path, monkeypatch: pytest.MonkeyPatch):
    assert prebuilt_steps.why_not("EMU") == "the device is EMU"
    monkeypatch.setattr(prebuilt_steps, "flags", lambda: prebuilt_steps.LEVEL_3 - {"fma"})
    assert prebuilt_steps.why_not("CPU") == "the processor lacks fma"
    assert prebuilt_steps.read(model, "CPU", FACTS, PLACES) == {}


@pytest.mark.slow
def test_a_start_from_an_empty_cache_compiles_nothing_once_they_are_built(tmp_path: Path):
    """Builds the file (a minute); it is part of no checkout."""
    command = [sys.executable, "-m", "tinygrad_nv.engine.prebuild"]
    assert subprocess.run(command, check=False).returncode == 0
    assert subprocess.run([*command, "--check"], check=False).returncode == 0
    own = {"NV_CACHE_DIR": str(tmp_path), "CACHEDB": str(tmp_path / "cache.db")}
    server = subprocess.Popen([sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0"], text=True,
                              stderr=subprocess.PIPE, env={**os.environ, **own})
    try:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if " ready " in line: break
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert re.findall(r"compiled=(\d+)", "".join(lines)) == ["0"], lines
    with (prebuild.model_directory() / prebuilt_steps.NAME).open("r+b") as file: file.write(b"0" * 64)
    assert subprocess.run([*command, "--check"], check=False).returncode == 1
