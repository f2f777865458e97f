"""bench/gpu/run.py --part decode, on DEV=EMU: the same network in models/llama.py and in torch, side by
side."""
from __future__ import annotations

import json
from argparse import Namespace

import pytest

from bench.gpu import decode as gpu_decode
from bench.gpu.decode import TINY, DecodeWorkload, StepProcess
from bench.gpu.parts import NotMeasured


@pytest.mark.sampled(1)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_step_on_the_emulated_device_gives_the_logits_of_torch(batch: int):
    row = gpu_decode.run_emulated(DecodeWorkload("Llama-3.2-1B", batch, 1024), Namespace(arch="sm_90a"))
    assert row["status"] == "emulated", row
    ours, theirs = row["logits"]["ours"], row["logits"]["torch"]
    assert len(ours) == len(theirs) == 32
    assert max(map(abs, theirs)) > 0.1
    assert ours != theirs  # two networks, not one


@pytest.mark.slow
def test_sides_answer_with_seconds_of_a_step_and_give_the_same_work_each_time():
    side = StepProcess("torch", json.dumps(TINY), 1, 5, "cpu")
    assert list(side.answer(100)["logits"]) == ["torch"]
    found = [side.steps(2) for _ in range(3)]
    side.end()
    assert all(0 < seconds["torch"] < 5 for seconds, _ in found)
    assert all(joules == {"torch": None} for _, joules in found)  # no GPU, no joules


class Metered:
    """A side that says what it took."""

    def __init__(self, name: str, seconds: float, joules: float | None) -> None:
        self.took = {name: seconds}, {name: joules}

    def steps(self, count: int) -> tuple[dict[str, float], dict[str, float | None]]: return self.took


def test_tokens_for_each_joule():
    row = gpu_decode.in_turns({"ours": Metered("tinygrad", 0.01, 4.0), "torch": Metered("torch", 0.02, 8.0),
                               "tinygrad": Metered("tinygrad", 0.1, None)}, 0.0)
    assert row["joules"] == {"ours": [4.0] * len(row["seconds"]["ours"]),
                             "torch": [8.0] * len(row["seconds"]["torch"])}
    shown = gpu_decode.per_joule({"a step": {"work": 8, **row}, "another": {"why": "no time"}})
    assert shown.split("\n")[-1].split() == ["a", "step", "2", "1", "-", "-"]
    assert gpu_decode.per_joule({"another": {"why": "no time"}}) == ""


def test_a_side_that_fails_says_its_last_words():
    notes: dict[str, str] = {}
    sides = {"ours": StepProcess("torch", json.dumps({**TINY, "hidden_size": 0}), 1, 5, "cpu")}
    assert gpu_decode.await_sides(sides, notes, 100) == {}
    assert sides == {}
    assert "hidden_size" in notes["ours"]


def test_logits_that_are_not_those_of_torch():
    torch = [1.0, -4.0, 2.0]
    assert gpu_decode.unlike({"ours": [1.1, -4.0, 2.1], "torch": torch}) == ""
    assert gpu_decode.unlike({"ours": [1.1, -4.0, 2.2], "torch": torch}) == "ours: logit 2 is 2.2, torch's 2"
    assert "logit 0 is nan" in gpu_decode.unlike({"ours": [float("nan"), -4.0, 2.0], "torch": torch})
    assert gpu_decode.unlike({"ours": torch}) == ""


def test_a_side_that_does_not_answer_is_not_waited_for():
    side = StepProcess("torch", json.dumps(TINY), 1, 5, "cpu")
    with pytest.raises(NotMeasured, match="no answer in 0 s"): side.answer(0.001)
    side.end()


def test_bytes_of_a_step():
    """1.24e9 parameters of two bytes, and 16 layers of 8 heads of 64, twice, for 1025 tokens."""
    step = DecodeWorkload("Llama-3.2-1B", 1, 1024)
    assert abs(step.config.parameters - 1.236e9) < 1e6
    assert step.nbytes == 2 * step.config.parameters + 2 * 2 * 16 * 8 * 64 * 1025
    whole = DecodeWorkload("Llama-3.1-8B", 8, 1024)
    assert abs(whole.config.parameters - 8.03e9) < 1e7
    assert whole.nbytes == 2 * (whole.config.parameters - 128256 * 4096) + 8 * 2 * 2 * 32 * 8 * 128 * 1025
