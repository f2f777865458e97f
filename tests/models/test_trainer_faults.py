"""Runs that are killed at random moments: nothing is lost beyond the interval of checkpoints."""
from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

STEPS, EVERY = 12, 2


def command(model: Path, data: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "tinygrad_nv", "train", str(model), str(data), "--max-steps", str(STEPS),
            "--per-device-train-batch-size", "2", "--max-length", "48", "--learning-rate", "1e-2",
            "--save-steps", str(EVERY), "--output-dir", str(output), "--report-to", "none",
            "--resume-from-checkpoint", "latest"]


def steps_of(output: Path) -> int:
    """The last step that a log has."""
    path = output / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(found, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_a_killed_run_goes_on(hf_model: Callable[[str], Path], tmp_path: Path, kills: int) -> None:
    """The weights at the end have the bits of a run that was left alone, and no kill costs more than the
    steps since the last checkpoint."""
    data, chance = tmp_path / "ids.npy", random.Random(kills)
    np.save(data, np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    subprocess.run(command(hf_model("llama"), data, alone), check=True, capture_output=True)
    begun = time.monotonic()
    subprocess.run(command(hf_model("llama"), data, tmp_path / "timed"), check=True, capture_output=True)
    usual = time.monotonic() - begun    # compiled before
    for _ in range(kills):
        process = subprocess.Popen(command(hf_model("llama"), data, killed), stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 1) * usual)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        before = steps_of(killed)
        whole = [int(each.name.rpartition("-")[2]) for each in killed.glob("checkpoint-*")]
        assert max(whole, default=0) >= before - EVERY, (whole, before)
    subprocess.run(command(hf_model("llama"), data, killed), check=True, capture_output=True)
    assert steps_of(killed) == STEPS
    assert (killed / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_goes_on(hf_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Ctrl-C ends after the step that runs, with a checkpoint of it."""
    data = tmp_path / "ids.npy"
    np.save(data, np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    subprocess.run(command(hf_model("llama"), data, alone), check=True, capture_output=True)
    process = subprocess.Popen(command(hf_model("llama"), data, stopped), stderr=subprocess.PIPE, text=True)
    while steps_of(stopped) < 3: time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1]
    assert process.returncode == 130, told
    assert f"stopped after step {steps_of(stopped)}" in told
    assert (stopped / f"checkpoint-{steps_of(stopped)}").is_dir()
    subprocess.run(command(hf_model("llama"), data, stopped), check=True, capture_output=True)
    assert (stopped / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
