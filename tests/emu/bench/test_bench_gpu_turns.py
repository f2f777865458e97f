"""Cycle counters around bursts, schedules beside each other, and the campaign: on the emulator."""
from __future__ import annotations

import subprocess
from argparse import Namespace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.gpu import campaign, run, sweep
from bench.gpu.launch import schedule_for
from bench.gpu.parts import PARTS
from bench.gpu.turns import CTAS_OF_SM, WORDS, Bursts, Stamps, read_stamps
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.template import GPU

OPTIONS = Namespace(arch="sm_90a", seed=1, emulate=True, seconds=1.0)


def test_stamps_of_every_sm_around_a_burst():
    driver = EmulatedDriver("sm_90a")
    sms = driver.properties.sm_count
    words = np.empty((2, CTAS_OF_SM * sms, WORDS), np.int64)
    address = driver.alloc(words.nbytes)
    stamps = Stamps(driver, None, address)
    for place in range(2): stamps.write(place)
    driver.copy_out(memoryview(words).cast("B"), address)
    for place in words: assert {*place[:, 0]} == {*range(1, sms + 1)}, "each SM wrote both"
    assert np.isfinite(read_stamps(words)).all(), "the emulator counts from each launch on"


def test_cycles_are_medians_of_the_sms_that_have_both_stamps():
    """CTAs of the second launch lie on other SMs than those of the first."""
    begin = [(1, 100, 1000), (2, 50, 1000), (3, 10, 1000), (4, 7, 1000)]
    end = [(3, 3010, 2200), (1, 2100, 2000), (0, 0, 0), (2, 2250, 2100)]    # and none of SM 4
    assert read_stamps(np.array([begin, end])) == (2200.0, 1100e-9)
    assert np.isnan(read_stamps(np.array([begin[3:], end[:1]]))).all()


def test_cycles_of_one_run_and_the_clock():
    words = np.array([[[1, 0, 1]], [[1, 19800, 10001]]])
    stamps = SimpleNamespace(words=SimpleNamespace(cpu=lambda: SimpleNamespace(numpy=lambda: words)))
    burst = Bursts(lambda i: None, 1, 10, stamps=stamps)  # type: ignore[arg-type]
    cycles, mhz = burst.cycles()
    assert (cycles, mhz) == (1980.0, pytest.approx(1980.0))
    assert np.isnan(Bursts(lambda i: None, 1).cycles()).all(), "without stamps"


# **** sweep ****

def test_a_schedule_that_is_preferred_is_chosen():
    """The default is what a graph would get, which an entry that comes with the package may say."""
    spec = sweep.find_workloads()["gemm: Llama 8B gate_up M=16"][1].spec  # type: ignore[attr-defined]
    default, other = sweep.candidates(spec, GPU("sm_90a"), 1)
    assert default == schedule_for(spec, "sm_90a") != other
    with sweep.prefer(spec, other, "sm_90a"): assert schedule_for(spec, "sm_90a") == other
    assert schedule_for(spec, "sm_90a") == default


def test_every_workload_that_is_named_is_found():
    found = sweep.find_workloads()
    for part, wanted in sweep.SWEPT.items():
        for words in wanted:
            assert any(name.startswith(f"{part}: {words}") for name in found), words


@pytest.mark.parametrize("name", ["gemm: Llama 8B gate_up M=16", "paged: batch 1, 512 tokens"])
def test_schedules_of_a_row_are_right_on_the_emulator(name: str):
    row = PARTS["sweep"].open_worker(OPTIONS)(name, 60.0)  # type: ignore[misc]
    assert row["status"] == "emulated", row["why"]
    assert len(row["why"].split(", ")) > sweep.FEW, "the default and others"


def test_the_table_has_the_best_schedule():
    rows: dict[str, Any] = {
        "a": {"status": "measured", "schedule": "x",
              "seconds": {"ours": [2e-6, 2e-6], "y": [1e-6], "z": [3e-6]},
              "cycles": {"ours": [3000], "y": [2000]}},
        "b": {"status": "not measured", "why": "out of time"}}
    said = sweep.render(rows)
    assert said.splitlines()[1].split() == ["a", "x", "2.0", "y", "2.000", "1.500"]
    assert "b: not measured: out of time" in said


# **** campaign ****

def parse(words: str) -> Namespace: return campaign.parse_args(words.split())


@pytest.mark.parametrize("step", campaign.STEPS, ids=lambda step: step.question)
def test_a_step_asks_for_what_there_is(step: campaign.Step):
    command = step.command(2.0, parse("--emulate --folder /tmp"))
    assert Path(command[1]).exists()
    if step.script != "run.py": return
    options = run.parse_args(command[2:])
    assert (options.minutes, options.resume, options.emulate) == (2.0, True, True)
    part = PARTS[options.part]
    assert 60 * step.minutes >= 2 * part.expected_s, "no row is begun with less time left"
    assert part.absent or options.part in ("correctness", "chains") or run.list_rows(part, options), "no row"


def test_half_an_hour_has_all_that_no_gpu_has_run():
    ends = accumulate(step.minutes for step in campaign.STEPS)
    chosen = [step for step, end in zip(campaign.STEPS, ends, strict=True) if end <= 30]
    assert {"latent", "conv", "train", "language", "memory", "moe", "step",
            "decode", "chains"} <= {step.words[-1] for step in chosen}


def test_steps_share_the_minutes_and_the_next_call_goes_on(monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]):
    now, ran = [0.0], list[list[str]]()

    def take_all(command: list[str], timeout: float, check: bool) -> SimpleNamespace:
        ran.append(command)
        now[0] += 60 * float(command[command.index("--minutes") + 1])
        return SimpleNamespace(returncode=len(ran) % 2)

    monkeypatch.setattr(campaign.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(campaign.subprocess, "run", take_all)
    steps = tuple(campaign.Step(f"what {i}?", "run.py", ("--part", "gemm"), 4.0) for i in range(4))
    assert campaign.run(parse("--minutes 9.5"), steps) == 1
    assert [float(words[words.index("--minutes") + 1]) for words in ran] == [4.0, 4.0, 1.5]
    assert "the same command goes on with step 4 of 4" in capsys.readouterr().out
    assert campaign.run(parse("--minutes 9.5 --from 4"), steps) == 0
    assert "step 4 of 4: what 3?" in capsys.readouterr().out


def test_a_step_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch):
    def hang(command: list[str], timeout: float, check: bool) -> None:
        raise subprocess.TimeoutExpired(command, timeout)
    monkeypatch.setattr(campaign.subprocess, "run", hang)
    assert campaign.run(parse("--minutes 1"), campaign.STEPS[:1]) == 1


def test_a_call_runs_on_the_emulator(tmp_path: Path):
    """A step of each script, small."""
    steps = tuple(step for step in campaign.STEPS if step.words[-1] in ("beside", "conv"))
    assert [step.script for step in steps] == ["calibrate.py", "run.py"]
    assert campaign.run(parse(f"--emulate --minutes 3 --folder {tmp_path}"), steps) == 0
    assert {file.name for file in tmp_path.glob("*.json")} >= {"calibrate.json", "run.json"}
