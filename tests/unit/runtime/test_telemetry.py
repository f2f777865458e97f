"""Telemetry against an NVML that answers from a table: what is read, what is left out, which GPU it is."""
import sys
import threading
import types

import pynvml
import pytest

from tests.support.runtime.nvml_fake import FakeNVML
from tinygrad_nv.runtime.observe import telemetry
from tinygrad_nv.runtime.observe.telemetry import GPUSample, Samples, Spread, Telemetry

REFUSALS = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(telemetry, "_bus_id", lambda ordinal: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_reading_has_every_field_in_its_unit(nvml):
    nvml.reasons = 0x4 | 0x20
    reading = Telemetry(0).now()
    assert reading == GPUSample(reading.seconds, 1980, 2619, 350.0, 1 << 30, 61,
                              ("power cap", "too hot (software)"))


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize(("refused", "name"), [
    ("sm", "sm_mhz"), ("memory", "memory_mhz"), ("bytes", "memory_used_bytes"),
    ("temperature", "temperature_c"), ("reasons", "throttled")])
def test_what_is_refused_is_none_and_the_rest_is_there(nvml, code, refused, name):
    nvml.refused[refused] = code
    reading = vars(Telemetry(0).now())
    assert reading.pop(name) is None
    assert None not in reading.values()


def test_watts_of_the_moment_then_of_the_last_second_then_none(nvml):
    gpu = Telemetry(0)
    assert gpu.now().watts == 350.0
    nvml.refused["instant"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    assert gpu.now().watts == 175.0
    nvml.refused["power"] = pynvml.NVML_ERROR_NO_PERMISSION
    assert gpu.now().watts is None


def test_reasons_in_words_and_unknown_bits_by_number(nvml):
    assert Telemetry(0).now().throttled == ()
    nvml.reasons = 0x1 | 0x8000
    assert Telemetry(0).now().throttled == ("idle", "reason 0x8000")


def test_joules_are_the_counters_where_there_is_one(nvml):
    with Telemetry(0).sample(period_s=60) as samples: nvml.joules += 40
    assert samples.joules == pytest.approx(40)
    assert samples.joules_from == "energy counter"
    assert samples.per_joule(200) == pytest.approx(5)


def test_joules_are_watts_over_time_where_there_is_no_counter(nvml):
    nvml.refused["energy"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    with Telemetry(0).sample(period_s=60) as samples: nvml.milliwatts = 450_000
    assert samples.joules_from == "watts over time"
    assert samples.joules == pytest.approx(400 * samples.seconds)


def test_trapezoids_by_hand_skip_readings_without_watts():
    samples = Samples([GPUSample(1.0, watts=100.0), GPUSample(2.0), GPUSample(3.0, watts=300.0),
                       GPUSample(3.5, watts=100.0)])
    assert samples.joules_from_watts == 400 + 100
    assert Samples([GPUSample(1.0, watts=100.0)]).joules_from_watts is None
    assert Samples().seconds == 0


def test_no_joules_are_said_as_such(nvml):
    nvml.refused = dict.fromkeys(("energy", "instant", "power"), pynvml.NVML_ERROR_NOT_SUPPORTED)
    with Telemetry(0).sample(period_s=60) as samples: pass
    assert (samples.joules, samples.joules_from, samples.per_joule(3)) == (None, "", None)
    assert "W not read, joules not known" in str(samples)


def test_the_block_is_sampled_in_between_and_the_thread_ends(nvml):
    seen, asked = threading.Event(), list[int]()
    ask = nvml.nvmlDeviceGetTemperature
    def counted(gpu, sensor):
        if threading.current_thread().name == "telemetry": asked.append(sensor)
        if len(asked) > 1: seen.set()  # one reading is whole
        return ask(gpu, sensor)
    nvml.nvmlDeviceGetTemperature = counted
    with Telemetry(0).sample(period_s=0.001) as samples:
        nvml.mhz = 1200
        asked.clear()   # the reading before this may have the other clock
        seen.clear()
        assert seen.wait(30)
        nvml.mhz = 1980
    assert len(samples.readings) >= 3
    assert samples.readings == sorted(samples.readings, key=lambda each: each.seconds)
    assert samples.sm_mhz.low == 1200 < samples.sm_mhz.mean < samples.sm_mhz.high == 1980
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]


def test_an_error_in_the_block_ends_the_thread_and_passes(nvml):
    with pytest.raises(ZeroDivisionError), Telemetry(0).sample(period_s=0.001): raise ZeroDivisionError
    assert "telemetry" not in [thread.name for thread in threading.enumerate()]


def test_a_gpu_that_is_lost_in_between_leaves_none(nvml):
    with Telemetry(0).sample(period_s=60) as samples:
        nvml.refused = dict.fromkeys(("sm", "memory", "instant", "power", "bytes", "temperature", "reasons",
                                      "energy"), pynvml.NVML_ERROR_GPU_IS_LOST)
    assert samples.sm_mhz == Spread(1980, 1980, 1980)
    assert samples.joules is None


def test_the_record_is_plain_json(nvml):
    nvml.reasons = 0x4
    with Telemetry(0).sample(period_s=60) as samples: nvml.joules += 1
    record = samples.record()
    assert record["sm_mhz"] == {"mean": 1980, "low": 1980, "high": 1980}
    assert record["memory_used_bytes"]["high"] == 1 << 30
    assert (record["joules_from"], record["readings"]) == ("energy counter", 2)
    assert record["throttled"] == ["power cap"]
    assert str(samples) == ("SM 1980 MHz (1980 … 1980), memory 2619 MHz (2619 … 2619), 350 W (350 … 350), "
                            "1 J (energy counter); held back by: power cap")


# **** which GPU ****

def used(device) -> int: return Telemetry(device).now().memory_used_bytes >> 30


def test_a_gpu_by_uuid_and_by_bus_id(nvml):
    assert (used("GPU-aaaa"), used("GPU-bbbb"), used("0000:0B:00.0")) == (1, 2, 2)


def test_an_ordinal_is_cudas_and_found_by_bus_id(nvml, monkeypatch):
    monkeypatch.setattr(telemetry, "_bus_id", lambda ordinal: ("0000:0B:00.0", "0000:0A:00.0")[ordinal])
    assert (used(0), used(1)) == (2, 1)


@pytest.mark.parametrize(("visible", "found"), [("", 1), ("1", 2), ("1,0", 2), (" 0 ", 1), ("GPU-bbbb", 2)])
def test_without_cuda_the_environments_order_holds(nvml, monkeypatch, visible, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert used(0) == found


def cuda(init=0, count=1):
    """cuda.bindings.driver with `count` devices, the first of which has bus 0B."""
    return types.SimpleNamespace(
        cuInit=lambda flags: (init,), cuDeviceGet=lambda i: (0, i) if i < count else (101, None),
        cuDeviceGetPCIBusId=lambda length, i: (0, b"0000:0B:00.0\0\0"))


@pytest.mark.parametrize(("driver", "ordinal", "bus"), [
    (cuda(), 0, "0000:0B:00.0"), (cuda(), 1, ""), (cuda(init=100), 0, None)])
def test_cuda_is_asked_for_the_bus_id(monkeypatch, driver, ordinal, bus):
    package = types.ModuleType("cuda.bindings")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    assert telemetry._bus_id(ordinal) == bus


def test_without_cuda_python_cuda_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert telemetry._bus_id(0) is None


# **** where there is no NVML ****

def test_without_the_package_nothing_is_read_and_nothing_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu = Telemetry(0)
    assert not gpu.available
    assert (gpu.name, gpu.uuid, gpu.energy_joules()) == ("", "", None)
    with gpu.sample(period_s=60) as samples: pass
    assert set(vars(samples.readings[0])) - {"seconds"} == {
        name for name, value in vars(samples.readings[0]).items() if value is None}


def test_with_a_driver_nothing_is_missing(nvml):
    assert telemetry.missing() == ""
    assert (Telemetry(0).name, Telemetry(1).uuid) == ("NVIDIA H100 80GB HBM3", "GPU-bbbb")
