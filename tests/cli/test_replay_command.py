"""`tinygrad-nv generate --record LOG` and `tinygrad-nv replay LOG`."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv import config
from tinygrad_nv.numerics.replay.log import read


def test_an_answer_is_repeated_or_parts(command: Any, tiny: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch):
    log, words = tmp_path / "run.log", ("--prompt-ids", "5,6,7", "--max-tokens", "4", "--device", "CPU")
    written = command("generate", tiny, *words, "--temperature", "1", "--record", log).succeeded()
    found = read(log)
    kept = found.header.what["command"]
    assert "--record" not in kept
    assert kept[:3] == ["generate", "--seed", str(found.header.seed)]
    assert len({run.layer for run in found.kernels}) > 4
    again = command("replay", log).succeeded()
    assert again.out == f"repeated bit for bit: {len(found.kernels)} kernels\n"
    assert written.out not in again.out

    # a kernel of another schedule
    monkeypatch.setenv("NV_DETERMINISTIC", "1")
    parted = command("replay", log)
    assert parted.code == 1
    first = next(run for run in found.kernels if run.kernel.startswith("gemv"))
    assert f"{first.kernel}, source {first.text}, results {first.written[0]}" in parted.out
    assert f"layer {first.layer}" in parted.out
    assert "NV_DETERMINISTIC: recorded with none, now 1" in parted.out
    told = json.loads(command("replay", "--json", log).out)
    assert told["same"] is False
    assert told["parted"]["before"]["kernel"] == first.kernel


def test_an_option_that_kernels_depend_on_is_repeated(command: Any, tiny: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DETERMINISTIC", "0")
    log = tmp_path / "run.log"
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2", "--device", "CPU",
            "--deterministic", "--record", log).succeeded()
    monkeypatch.setenv("NV_DETERMINISTIC", "0")     # another process
    assert command("replay", log).succeeded().out.startswith("repeated bit for bit")


def test_what_is_no_log(command: Any, tmp_path: Path):
    (tmp_path / "x.log").write_text("hello")
    command("replay", tmp_path / "x.log").refused("is no log of a run", "expected:", "to fix:")
    (tmp_path / "y.log").write_text(json.dumps(
        {"format": "tinygrad_nv run", "version": 1, "what": {"command": ["serve"]}, "seed": 0, "versions": {},
         "settings": {}, "inputs": "", "inputs_hash": ""}) + '\n{"end": 0, "result": ""}\n')
    command("replay", tmp_path / "y.log").refused("a log of tinygrad-nv serve", "one of generate")


def test_deterministic_is_a_setting_of_the_process(command: Any, tiny: Path,
                                                   monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DETERMINISTIC", "0")
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2").succeeded()
    assert config.get("NV_DETERMINISTIC") == 0
    command("generate", tiny, "--prompt-ids", "5,6,7", "--max-tokens", "2", "--deterministic").succeeded()
    assert config.get("NV_DETERMINISTIC") == 1
