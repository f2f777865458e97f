"""Schedules by trying, on the emulator: counters agree with the plan, the same one wins each time and is
kept, what spills or fails is out."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tinygrad.helpers import Context

from tinygrad_nv.errors import KernelError, PTXError
from tinygrad_nv.ptx.assemble import Assembly, Resources
from tinygrad_nv.runtime.clock import DriverClock, seconds
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile import database, tune
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm import tune as trial
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Mma, Wgmma
from tinygrad_nv.tile.gemm.work import Work
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

W, V = Wgmma(), Gemv()
SMALL = dense(96, 80, 512)
A100 = GPU("sm_80", model="")    # whose times are not modelled


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    return tmp_path / "schedules.json"


# **** counters ****

def work_of(model: CostModel, s: GemmSchedule, arch: str) -> Work:
    return trial.work_from_trial(trial.counters(model.spec, s, arch), model, s)


@pytest.mark.parametrize(("arch", "spec", "schedule"), [
    ("sm_80", dense(1024, 1024, 1024), Mma().block(64, 64)),
    ("sm_80", dense(1024, 1024, 1024, "s8"), Mma().block(128, 64).k(64).split(2)),
    ("sm_89", dense(1000, 1000, 1000, "f16", majors="NN"), Mma().block(64, 128).stages(4)),
    ("sm_90a", dense(8192, 8192, 8192), W.block(128, 128)),
    ("sm_90a", dense(8192, 8192, 8192), W.block(64, 128).pingpong().cluster(2)),
    ("sm_90a", dense(8192, 8192, 8192, majors="TN"), W.block(64, 64).warps(8).stages(3)),
    ("sm_90a", dense(16, 4096, 4096), W.block(64, 16).warps(8).swap_operands()),
])
def test_counters_of_a_small_product_are_the_plan(arch, spec, schedule):
    model = CostModel(spec, gpu_model_for(arch))
    counted = work_of(model, schedule, arch)
    planned = model.plan_work(schedule)
    assert counted.tensor == pytest.approx(planned.tensor)
    assert counted.shared == pytest.approx(planned.shared, rel=0.15)
    assert 0.4 < counted.issue / planned.issue < 3
    assert 0.3 < counted.finish / planned.finish < 3
    assert model.predict_work(schedule, counted).seconds == pytest.approx(model.predict(schedule).seconds,
                                                                          rel=0.3)


@pytest.mark.parametrize(("arch", "spec", "schedule"), [
    ("sm_80", dense(1, 4096, 4096), V.columns(16).k(512).warps(4)),
    ("sm_90a", dense(8, 4096, 4096), V.columns(32).k(64).warps(4)),
    ("sm_90a", dense(4096, 3, 4096, majors="NN"), V.columns(64).k(64).warps(4).swap_operands()),
])
def test_counters_of_few_rows(arch, spec, schedule):
    model = CostModel(spec, gpu_model_for(arch))
    assert TABLE.problems(spec, schedule, GPU(arch)) == []
    counted = work_of(model, schedule, arch)
    assert counted.issue > 0
    assert model.predict_work(schedule, counted).bound == "HBM"


def test_what_is_run_is_small_and_of_the_same_kind():
    spec = dense(8192, 8192, 320, epilogue="bias+residual", batch=(64,))
    s = W.block(128, 64).cluster(2)
    small = trial.shrink(spec, s, 640, 1)
    assert (small.m, small.n, small.k, small.batch) == (256, 64, 640, (1,))
    assert small.a.mn >= 640
    assert (small.a.mn - spec.a.mn) % 64 == 0
    assert small.epilogue == spec.epilogue
    swapped = trial.shrink(dense(16, 8192, 8192), W.block(64, 16).swap_operands(), 640, 1)
    assert (swapped.m, swapped.n) == (16, 64)
    gate = trial.shrink(dense(8192, 8192, 8192, epilogue="gate"), W.block(128, 256), 640, 1)
    assert (gate.n, gate.parts) == (128, 2)
    assert TABLE.problems(small, s, GPU("sm_90a")) == []


# **** tuning ****

def test_the_same_schedule_wins_each_time_and_is_kept(file):
    first = tune.tune(SMALL, A100)
    winner = first[0]
    assert [c.schedule for c in tune.tune(SMALL, A100)] == [c.schedule for c in first]
    assert len(first) == tune.PER_BEAM + 1 == len({c.schedule for c in first})
    assert first == sorted(first, key=lambda c: c.seconds)
    assert winner.registers > 0
    assert winner.smem_bytes > 0
    assert analytic(SMALL, "sm_80") in [c.schedule for c in first]
    assert database.lookup(SMALL, "sm_80") == winner.schedule == choose(SMALL, A100)
    assert [(e.how, e.seconds) for e in database.entries()] == [("counted", winner.seconds)]


def test_beam_makes_choose_try_once(monkeypatch):
    monkeypatch.setattr(tune, "PER_BEAM", 1)
    calls = []
    real = tune.tune
    monkeypatch.setattr(tune, "tune", lambda *args: calls.append(args[2]) or real(*args))
    assert choose(SMALL, A100) == analytic(SMALL, "sm_80")
    assert calls == []
    with Context(BEAM=2):
        found = choose(SMALL, A100)
        assert choose(SMALL, A100) == found == database.lookup(SMALL, "sm_80")
    assert calls == [2]
    assert choose(SMALL, A100) == found
    with Context(BEAM=1): assert choose(dense(64, 64, 64, "f32"), A100) is None


def test_candidates_differ_in_more_than_their_stages():
    found = tune.schedules(dense(4096, 4096, 4096), GPU("sm_90a"), 4 * tune.PER_BEAM)
    assert len(found) == 4 * tune.PER_BEAM + 1
    assert len({s.without_stages for s in found}) >= 2 * tune.PER_BEAM
    assert found[0] == analytic(dense(4096, 4096, 4096), "sm_90a")


def assembly(spilled: int, registers: int = 100):
    used = {"gemm_mma": Resources(registers, spilled, 0, 0, 0, 1)}
    return lambda text, arch, flags: Assembly(arch, b"", used, ())


@pytest.mark.slow
def test_what_spills_is_out(monkeypatch):
    monkeypatch.setattr(tune, "assemble", assembly(24))
    tried = tune.tune(SMALL, A100)
    assert {c.why for c in tried} == {"spills 24 B"}
    assert {c.seconds for c in tried} == {None}
    assert database.lookup(SMALL, "sm_80") is None
    with Context(BEAM=1): assert choose(SMALL, A100) == analytic(SMALL, "sm_80")


def test_what_ptxas_changes_or_the_emulator_refuses_is_out(monkeypatch):
    def changed(text, arch, flags): raise PTXError("ptxas changed the kernel: (C7510)")
    monkeypatch.setattr(tune, "assemble", changed)
    assert {c.why for c in tune.tune(SMALL, A100)} == {"ptxas changed the kernel: (C7510)"}
    monkeypatch.setattr(tune, "assemble", assembly(0))
    def hangs(*args): raise KernelError("deadlock: line 3")
    monkeypatch.setattr(trial, "emulate", hangs)
    assert {c.why for c in tune.tune(SMALL, A100)} == {"deadlock: line 3"}


@pytest.mark.slow
def test_without_ptxas_nothing_is_assembled(monkeypatch):
    monkeypatch.setattr(tune, "find_program", lambda name: None)
    tried = tune.tune(SMALL, A100)
    assert {c.registers for c in tried} == {0}
    assert all(c.seconds for c in tried)


@pytest.mark.slow
def test_bank_conflicts_lose(monkeypatch):
    real = trial.emulate
    favourite = tune.tune(SMALL, A100)[0].schedule

    def conflicting(kernel, spec, arch):
        stats = real(kernel, spec, arch)
        if kernel.threads != favourite.threads: return stats
        return replace(stats, sites=tuple(replace(site, passes=60 * site.passes) for site in stats.sites))
    monkeypatch.setattr(trial, "emulate", conflicting)
    tried = tune.tune(SMALL, A100, 4)
    assert tried[0].schedule.threads != favourite.threads


# **** a device ****

@pytest.mark.parametrize(("spec", "schedule"), [
    (dense(40, 48, 300, majors="NN", epilogue="bias+residual"),
     Mma().block(32, 32).warps(1, 2).split(2)),
    (dense(128, 64, 512, symbolic=True), W.block(64, 64).warps(8).stages(3)),
    (dense(3, 64, 512), V.columns(16).k(64).warps(4))])
def test_a_kernel_is_timed_by_a_driver(spec, schedule):
    arch = "sm_90a"
    driver = EmulatedDriver(arch, check=False)
    assert TABLE.problems(spec, schedule, GPU(arch)) == []
    assert seconds(driver, TABLE.build(spec, schedule, GPU(arch)), spec) > 0
    assert driver.used_bytes == 0


def test_on_a_device_the_clock_decides(monkeypatch):
    times = iter((3e-6, 2e-6, 1e-6, 4e-6, 5e-6))
    monkeypatch.setattr("tinygrad_nv.runtime.clock.seconds", lambda *args: next(times))
    tried = tune.tune(SMALL, replace(A100, clock=DriverClock(EmulatedDriver("sm_80"))))
    assert [c.seconds for c in tried] == [1e-6, 2e-6, 3e-6, 4e-6, 5e-6]
    assert [(e.schedule, e.how) for e in database.entries()] == [(tried[0].schedule, "measured")]


def test_a_database_that_cannot_be_written_is_noted(file, monkeypatch):
    monkeypatch.setattr(database, "_noted", set())
    monkeypatch.setenv("NV_SCHEDULES", "/proc/nowhere/schedules.json")
    with Context(BEAM=1), pytest.warns(database.ScheduleWarning, match="cannot be written"):
        assert choose(SMALL, A100) == analytic(SMALL, "sm_80")
