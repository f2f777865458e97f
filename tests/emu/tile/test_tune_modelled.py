"""Tuning by the timing model, of every family that has candidates; where there is a GPU, what the model likes
is measured."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from tinygrad.helpers import Context

from bench.lib.specs import decode as paged
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.errors import ConfigError, DriverError, PTXError, ToolchainError
from tinygrad_nv.runtime.clock import DriverClock
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile import database, emulated, tune
from tinygrad_nv.tile.arguments import integers, launches
from tinygrad_nv.tile.attention.dense import dense as attention
from tinygrad_nv.tile.attention.dense import gradient
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.clock import Conditions, How, figures_of
from tinygrad_nv.tile.decode.dense import dense as decode
from tinygrad_nv.tile.emulated import ModelledClock, clock_of, launch_all, timings
from tinygrad_nv.tile.gemm.dense import dense as matmul
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HOPPER = GPU("sm_90a", 132)
SPECS = {"matmul": matmul(256, 256, 256), "attention": attention(1, 2, 256, 64, causal=True),
         "gradient": gradient(attention(1, 2, 128, 64)), "decode": decode(2, 4, 512, 64, kv_heads=2)}


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    monkeypatch.setattr(tune, "PER_BEAM", 2)
    return tmp_path / "schedules.json"


@dataclass(frozen=True)
class FakeGPU:
    """Times schedules by their place among those that it is asked for."""
    times: tuple[float, ...]
    asked: list[Any]
    clusters: ClassVar[tuple[()]] = ()
    how: ClassVar[How] = "measured"

    def conditions(self) -> Conditions: return {"driver": "580.1", "throttled": True}

    def seconds(self, made: Any, spec: Any, assembled: Sequence[Any] = ()) -> float:
        self.asked.append(assembled)
        return self.times[len(self.asked) - 1]


def by_the_model(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[Any]:
    """The model's seconds of the n-th kernel that it is asked for."""
    asked: list[Any] = []

    def fake(self: ModelledClock, made: Any, spec: Any, assembled: Sequence[Any] = ()) -> float:
        asked.append(made)
        return seconds(len(asked) - 1)
    monkeypatch.setattr(ModelledClock, "seconds", fake)
    return asked


# **** without a GPU ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_each_family_is_tuned_by_the_model(name: str):
    spec = SPECS[name]
    tried = tune.tune(spec, HOPPER)
    winner, default = tried[0], TABLE.family("gpu", type(spec)).default(spec, HOPPER)
    assert winner.how == "modelled"
    assert 1e-6 < winner.seconds == winner.modelled < 1e-3
    assert default in [each.schedule for each in tried]
    assert len(tried) == tune.PER_BEAM + 1 == len({each.schedule for each in tried})
    (entry,) = database.entries()
    assert (entry.how, entry.gpu, entry.provenance) == ("modelled", "h100", "modelled for h100")
    assert (entry.schedule, entry.seconds) == (winner.schedule, winner.seconds)
    assert TABLE.choose(spec, HOPPER) == winner.schedule
    alone = sum(each.seconds for each in timings(TABLE.build(spec, winner.schedule, HOPPER), spec, "h100"))
    assert 0.5 * alone < winner.seconds < 1.01 * alone      # launches in a row overlap


def test_the_model_decides_and_of_times_as_near_as_it_is_exact_the_default(monkeypatch: pytest.MonkeyPatch):
    spec = SPECS["attention"]
    by_the_model(monkeypatch, lambda n: (1.0, 0.995, 1.2)[n] * 1e-5)
    assert tune.tune(spec, HOPPER)[0].schedule == TABLE.choose(spec, GPU("sm_90a", 132, model=""))
    by_the_model(monkeypatch, lambda n: (1.0, 0.9, 1.2)[n] * 1e-5)
    assert tune.tune(spec, HOPPER)[0].schedule != TABLE.choose(spec, GPU("sm_90a", 132, model=""))


def test_what_is_modelled_for_one_gpu_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch):
    spec = SPECS["attention"]
    before = TABLE.choose(spec, HOPPER)
    by_the_model(monkeypatch, lambda n: 1e-5 / (1 + n))
    tune.tune(spec, replace(HOPPER, model="h200"))
    assert TABLE.choose(spec, replace(HOPPER, model="h200")) != before == TABLE.choose(spec, HOPPER)
    monkeypatch.setenv("NV_TIMING_GPU", "h200")
    assert TABLE.choose(spec, HOPPER) != before
    monkeypatch.setenv("NV_TIMING_GPU", "h900")
    with pytest.raises(ConfigError, match="no figures of a GPU 'h900'\n  expected: one of a100, h100, h200"):
        TABLE.choose(spec, HOPPER)


@pytest.mark.slow
def test_beam_tries_every_family_once(monkeypatch: pytest.MonkeyPatch):
    asked = by_the_model(monkeypatch, lambda n: 1e-5 / (1 + n))
    for count, spec in enumerate(SPECS.values(), 1):
        default = choose(spec, HOPPER)
        with Context(BEAM=1):
            found = choose(spec, HOPPER)
            assert choose(spec, HOPPER) == found != default
        assert choose(spec, HOPPER) == found
        assert len(asked) == count * (tune.PER_BEAM + 1)


def test_explain_says_of_an_attention_how_its_time_is_known(monkeypatch: pytest.MonkeyPatch):
    by_the_model(monkeypatch, lambda n: 1e-5)
    with Context(DEV="EMU"):
        q, k, v = (Tensor.empty(1, 4, 256, 64, dtype=dtypes.bfloat16) for _ in range(3))
        def words() -> str:
            return explain(q.scaled_dot_product_attention(k, v, is_causal=True)).kernels[0].reason
        assert "modelled" not in words()
        with Context(BEAM=1): assert words().endswith(", modelled for h100: 10.0 µs")
        assert words().endswith(", modelled for h100: 10.0 µs")
        monkeypatch.setenv("NV_TIMING_GPU", "h200")
        assert "modelled" not in words()


def test_what_the_model_refuses_is_out(monkeypatch: pytest.MonkeyPatch):
    def refused(n: int) -> float:
        if n != 1: return 1e-5
        raise PTXError("the timing model does not go on")
    by_the_model(monkeypatch, refused)
    tried = tune.tune(SPECS["attention"], HOPPER)
    assert [each.seconds for each in tried] == [1e-5, 1e-5, None]
    assert tried[-1].why == "the timing model does not go on"


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch):
    by_the_model(monkeypatch, lambda n: 1e-5)
    told: list[tuple[int, int]] = []
    tune.tune(SPECS["decode"], HOPPER, 1, lambda *at: told.append(at))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_without_figures_or_programs_a_matmul_is_counted_and_others_keep_their_default(
        monkeypatch: pytest.MonkeyPatch):
    ampere, spec = GPU("sm_80", 100), SPECS["attention"]
    assert clock_of(ampere) is None
    with pytest.raises(ToolchainError, match="nothing times attention kernels on sm_80"):
        tune.tune(spec, ampere)
    with Context(BEAM=1): assert choose(spec, ampere) == TABLE.family("gpu", type(spec)).default(spec, ampere)
    assert database.entries() == []
    monkeypatch.setattr(emulated, "disassembler", lambda: None)
    assert clock_of(HOPPER) is None
    assert {each.how for each in tune.tune(SPECS["matmul"], HOPPER)} == {"counted"}


def test_figures_of_a_device_are_those_that_it_names():
    for words in (("sm_90a", 132), ("sm_90a",), ("sm_90a", 132, "emulated sm_90a")):
        assert figures_of(*words) == "h100"
    assert figures_of("sm_90a", 132, "NVIDIA H200") == "h200"
    for words in (("sm_90a", 132, "NVIDIA H20"), ("sm_90a", 16), ("sm_80", 100)):
        assert figures_of(*words) == ""
    assert clock_of(GPU("sm_90a", 132, model="")) is None


# **** with a GPU ****

def test_the_best_by_the_model_are_measured(monkeypatch: pytest.MonkeyPatch):
    spec = attention(1, 2, 2048, 64)
    by_the_model(monkeypatch, lambda n: (5e-6, 2e-6, 4e-6, 1e-6, 3e-6)[n])
    gpu = FakeGPU((9e-6, 7e-6), [])
    told: list[tuple[int, int]] = []
    tried = tune.tune(spec, replace(HOPPER, clock=gpu), 1, lambda *at: told.append(at))
    assert len(gpu.asked) == tune.PER_BEAM
    assert all(each for each in gpu.asked), "what is assembled is measured"
    assert [(each.modelled, each.seconds) for each in tried] == \
        [(2e-6, 7e-6), (1e-6, 9e-6), (3e-6, None), (4e-6, None), (5e-6, None)]
    assert {each.how for each in tried} == {"measured"}
    assert {each.why for each in tried[2:]} == {"modelled slower than what was measured"}
    kept, = database.entries()
    assert (kept.how, kept.gpu, kept.seconds, kept.driver, kept.throttled) == \
        ("measured", "h100", 7e-6, "580.1", True)
    assert told == [*((n, 7) for n in range(1, 8))]


@pytest.mark.slow
def test_what_the_model_refuses_may_be_measured(monkeypatch: pytest.MonkeyPatch):
    def refused(n: int) -> float: raise PTXError("the timing model does not go on")
    by_the_model(monkeypatch, refused)
    tried = tune.tune(SPECS["attention"], replace(HOPPER, clock=FakeGPU((9e-6, 7e-6), [])))
    assert [(each.seconds, each.modelled) for each in tried[:2]] == [(7e-6, None), (9e-6, None)]
    assert {each.why for each in tried[2:]} == {"the timing model does not go on"}


def test_what_was_modelled_is_measured_once_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch):
    spec = SPECS["attention"]
    by_the_model(monkeypatch, lambda n: 1e-6 * (1 + n % 5))
    with Context(BEAM=1):
        choose(spec, HOPPER)
        gpu = FakeGPU((9e-6, 7e-6), [])
        there = replace(HOPPER, clock=gpu)
        found = choose(spec, there)
        assert len(gpu.asked) == tune.PER_BEAM
        assert choose(spec, HOPPER) == found       # and is not modelled again without one
    assert [each.how for each in database.entries()] == ["modelled", "measured"]


def test_what_a_sibling_measured_is_worth_more_than_a_model_and_less_than_a_measurement(
        monkeypatch: pytest.MonkeyPatch):
    spec = SPECS["attention"]
    by_the_model(monkeypatch, lambda n: 1e-6 * (1 + n % 5))
    last = tune.schedules(spec, HOPPER, 8)[-1]
    database.store([database.Entry(database.tuning_key(spec), HOPPER.arch, database.toolchain(), last, 1e-6,
                                   "measured", "h800")])
    gpu = FakeGPU((9e-6, 7e-6), [])
    with Context(BEAM=1):
        assert choose(spec, HOPPER) == last
        assert choose(spec, replace(HOPPER, clock=gpu)) != last
    assert len(gpu.asked) == tune.PER_BEAM
    kept = [(each.how, each.gpu) for each in database.entries()]
    assert kept == [("measured", "h800"), ("measured", "h100")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["attention", "gradient", "decode"])
def test_a_driver_times_each_family(name: str):
    driver = EmulatedDriver("sm_90a", check=False)
    spec = SPECS[name]
    assert DriverClock(driver).seconds(TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER), spec) > 0


@pytest.mark.parametrize(("reasons", "throttled"), [(("idle",), False), (("idle", "power cap"), True)])
def test_a_clock_tells_the_driver_and_what_held_clocks_back(reasons: tuple[str, ...], throttled: bool):
    watched: Any = SimpleNamespace(available=True, driver_version="580.1", throttle_reasons=lambda: reasons)
    clock, spec = DriverClock(EmulatedDriver("sm_90a"), lambda: watched), SPECS["decode"]
    assert clock.conditions() == {"driver": "580.1", "throttled": False}
    clock.seconds(TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER), spec)
    assert clock.conditions() == {"driver": "580.1", "throttled": throttled}
    assert clock.conditions() == {"driver": "580.1", "throttled": False}    # of what was timed since


def test_a_gpu_that_telemetry_cannot_name_is_timed_all_the_same():
    """In some containers NVML counts other GPUs than CUDA."""
    def watch() -> Any: raise DriverError("telemetry of GPU 7")
    clock, spec = DriverClock(EmulatedDriver("sm_90a"), watch), SPECS["decode"]
    assert clock.seconds(TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER), spec) > 0
    assert clock.conditions() == DriverClock(EmulatedDriver("sm_90a")).conditions() == {}


# **** what a call is given ****

def test_a_cache_has_pages_of_its_own_for_each_request_and_all_tokens():
    spec = decode(8, 4, 512, 64, kv_heads=2)
    given: list[np.ndarray] = []

    def alloc(nbytes: int, contents: np.ndarray | None) -> int:
        if contents is not None: given.append(contents)
        return nbytes
    kernels = [*launches(TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER), spec, alloc)]
    table, lengths = given
    assert sorted(table) == [*range(8 * 32)]
    assert set(lengths) == {512}
    assert {kernel.grid[2] for kernel, _ in kernels} == {8}
    cache = 2 * 8 * 2 * 512 * 64 * 2
    made = TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER)
    read = sum(each.stats.global_read_bytes + each.stats.asynchronous_bytes
               for each in launch_all(made, spec, "sm_90a"))
    assert read > cache


def test_integers_of_a_launch_are_at_their_most():
    spec = replace(attention(1, 2, 256, 64), symbolic=("s_q", "s_kv"))
    assert integers(spec) == (256, 256)
    assert integers(matmul(100, 64, 64, symbolic=True)) == (100,)
    assert integers(paged(page_size=512, pages=1, table=False, length="argument")) == (512,)
    assert timings(TABLE.build(spec, TABLE.choose(spec, HOPPER), HOPPER), spec, "h100")[0].cycles > 1000


def test_schedules_beside_the_default_are_tried():
    spec: Any = attention(1, 16, 4096, 128)
    found: list[Schedule] = tune.schedules(spec, HOPPER, 8)
    assert found[0] == TABLE.choose(spec, HOPPER)
    assert {each.mode for each in found} == {"pingpong", "cooperative"}
    assert not any(TABLE.problems(spec, each, HOPPER) for each in found)
