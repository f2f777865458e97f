"""Recorded runs: repeated bit for bit, or the kernel at which they part, by name and both hashes."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.support.numerics import replay_case
from tinygrad_nv.cpu.norm import kernel as norm
from tinygrad_nv.errors import ReplayError
from tinygrad_nv.numerics.policy import deterministic
from tinygrad_nv.numerics.replay import record, replay
from tinygrad_nv.numerics.replay.log import read


def rows(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(3).standard_normal(shape).astype(np.float32)).realize()


@pytest.fixture
def log(tmp_path: Path) -> Path: return tmp_path / "run.log"


def test_the_same_bits(log: Path):
    made = record(log, replay_case.step, rows(3, 64), scale=2.0)
    found = read(log)
    assert [run.layer for run in found.kernels] == ["blocks.0", "blocks.1"]
    assert found.header.what["function"] == "tests.support.numerics.replay_case:step"
    assert (log.with_name("run.log.safetensors")).is_file()
    assert made.shape == (3, 48)
    report = replay(log)
    assert (report.same, report.kernels, report.rewritten) == (True, 2, 0)
    assert str(report) == "repeated bit for bit: 2 kernels"


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.int32], ids=str)
def test_arguments_of_every_kind(log: Path, dtype: Any):
    x = rows(3, 64).cast(dtype).realize()
    record(log, lambda_free, x, [1, 2.5], None, name="a")
    assert replay(log).same


def lambda_free(x: Tensor, numbers: list[float], nothing: None, name: str) -> tuple[Tensor, Tensor]:
    return x * numbers[0], (x.float() + numbers[1]) * len(name)


def test_a_kernel_that_changed_is_named(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(1, 64))
    with deterministic(): report = replay(log)
    parted = report.parted
    assert parted is not None
    assert (parted.number, parted.before.kernel, parted.now.kernel) == (1, "gemv_1x48x64", "gemm_1x48x64")
    assert ("NV_DETERMINISTIC", "none", "1") in report.changed


def test_a_kernel_with_another_source_and_other_bits(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(3, 64))
    build = norm.build
    monkeypatch.setenv("NV_PROGRAM_CACHE", "0")

    def broken(spec: Any, schedule: Any) -> Any:
        made = build(spec, schedule)
        return replace(made, source=made.source.replace("= exp2_(", "= 0.001f + exp2_("))
    monkeypatch.setattr(norm, "build", broken)
    from tinygrad_nv.hooks.rewrites import configured_cache
    from tinygrad_nv.patterns.target import Chosen
    Chosen.build.cache_clear()
    configured_cache.clear()
    try: report = replay(log)
    finally:
        monkeypatch.undo()
        Chosen.build.cache_clear()
        configured_cache.clear()
    assert report.parted is not None
    assert (report.parted.number, report.parted.before.layer) == (2, "blocks.1")
    words = str(report)
    assert "equal operands, another source, other results" in words
    for run in (report.parted.before, report.parted.now):
        assert f"{run.kernel}, source {run.text}, results {run.written[0]}" in words
    assert report.parted.before.text != report.parted.now.text
    assert replay(log).same


def test_a_weight_that_changed_is_told_from_a_kernel(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(3, 64))
    other = replay_case.WEIGHT.copy()
    other[5, 7] = 0
    monkeypatch.setitem(replay_case.held, "weight", Tensor(other).realize())
    parted = replay(log).parted
    assert parted is not None
    assert parted.number == 1
    assert parted.what == "operand 2 of 2 differs, and no kernel wrote it: it was loaded"


def test_generators_begin_at_the_seed(log: Path):
    made = record(log, replay_case.drawn, 5, seed=11)
    again = record(log, replay_case.drawn, 5, seed=12)
    assert all((made[name].numpy() != again[name].numpy()).any() for name in made)
    assert replay(log).same


def test_a_captured_function_runs_kernel_by_kernel(log: Path):
    for _ in range(3): replay_case.captured(rows(3, 64))
    record(log, replay_case.captured, rows(3, 64))
    assert len(read(log).kernels) >= 1
    assert replay(log).same


def test_a_result_without_tensors(log: Path):
    assert record(log, replay_case.counted, 100) == 4950
    assert replay(log).same


def test_another_kernel_runs(log: Path):
    record(log, replay_case.forgetful, rows(40, 50).abs())
    parted = replay(log).parted
    assert parted is not None
    assert parted.number == 1


def test_what_does_not_run_any_more(log: Path):
    record(log, replay_case.step, rows(3, 64))
    parted = replay(log, lambda x: x @ replay_case.held["weight"]).parted
    assert parted is not None
    assert parted.number == 1 or parted.what == "it does not run now"


def test_large_memory_is_hashed_again_when_it_was_written(log: Path):
    def twice(x: Tensor) -> Tensor:
        x.assign(x + 1).realize()
        x.assign(x * 2).realize()
        return x + 0
    record(log, grown, rows(600, 600))
    assert len({run.read for run in read(log).kernels}) == len(read(log).kernels) > 2
    assert replay(log).same
    assert not replay(log, twice).same


def grown(x: Tensor) -> Tensor:
    x.assign(x + 1).realize()
    x.assign(x + 1).realize()
    return x + 0


def test_a_run_that_fails_leaves_a_log_that_is_refused(log: Path):
    with pytest.raises(ZeroDivisionError): record(log, failing, rows(3, 64))
    assert json.loads(log.read_text().splitlines()[-1])["kernel"]
    with pytest.raises(ReplayError, match="and the run did not"): replay(log)


def failing(x: Tensor) -> Tensor:
    (x + 1).realize()
    return x / (1 // 0)
