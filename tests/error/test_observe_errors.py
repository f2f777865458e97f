"""What is said of telemetry that cannot be read, and of timelines and ranges that cannot be written."""

import sys
import types

import pynvml
import pytest

from tinygrad_nv import timeline
from tinygrad_nv.errors import ConfigError, DriverError, RequestError
from tinygrad_nv.runtime.observe import ranges, telemetry


def nvml(init: int = 0) -> types.ModuleType:
    """A pynvml with one GPU that only says its UUID, or that does not start."""
    def start():
        if init: raise pynvml.NVMLError(init)
    def refused(name):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    module = types.ModuleType("pynvml")
    vars(module).update(NVMLError=pynvml.NVMLError, nvmlInit=start, nvmlDeviceGetCount=lambda: 1,
                        nvmlDeviceGetHandleByIndex=lambda i: i if i == 0 else refused(i),
                        nvmlDeviceGetUUID=lambda gpu: "GPU-aaaa", nvmlDeviceGetHandleByUUID=refused,
                        nvmlDeviceGetHandleByPciBusId=refused)
    return module


def test_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert telemetry.missing() == "nvidia-ml-py is not installed: pip install nvidia-ml-py"


@pytest.mark.parametrize(("code", "words"), [
    (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
    (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
    (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch.")])
def test_no_driver(monkeypatch, code, words):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(code))
    assert telemetry.missing() == f"NVML does not answer: {words}"
    assert not telemetry.Telemetry(0).available


@pytest.mark.parametrize("device", [3, "GPU-zzzz", "0000:FF:00.0"])
@pytest.mark.parametrize("bus", [None, ""])
def test_no_such_gpu(monkeypatch, device, bus):
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monkeypatch.setattr(telemetry, "_bus_id", lambda ordinal: bus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DriverError) as caught: telemetry.Telemetry(device)
    assert caught.value.found == f"telemetry of GPU {device}: Not Found"
    assert caught.value.expected == "one of GPU-aaaa"
    assert caught.value.fix == "an ordinal is CUDA's, after CUDA_VISIBLE_DEVICES"


def test_a_directory_that_does_not_exist(tmp_path):
    path = tmp_path / "none" / "trace.json"
    with pytest.raises(RequestError) as caught, timeline(path): raise AssertionError("not reached")
    assert caught.value.found == f"a trace cannot be written to {path}: No such file or directory"
    assert caught.value.expected == "a file in a directory that exists and can be written"
    assert caught.value.fix == "name another file"
    assert not ranges.tracking()


def test_a_directory_in_place_of_a_file(tmp_path):
    with pytest.raises(RequestError) as caught, timeline(tmp_path): raise AssertionError("not reached")
    assert caught.value.found == f"a trace cannot be written to {tmp_path}: Is a directory"


def test_the_command_line_says_so_before_anything_is_loaded(command, tmp_path):
    command("generate", "--trace", tmp_path / "none" / "t.json", "Once").refused(
        "a trace cannot be written to", "No such file or directory", "to fix:   name another file")


def test_one_timeline_at_a_time():
    def nested() -> None:
        with timeline(): raise AssertionError("not reached")
    with timeline(), pytest.raises(RequestError) as caught: nested()
    assert str(caught.value).splitlines() == [
        "a timeline inside a timeline", "  expected: one at a time", "  to fix:   end the other first"]
    with timeline(): pass


def test_nvtx_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("NV_NVTX", "1")
    with pytest.raises(ConfigError) as caught: ranges.enable_nvtx()
    assert caught.value.found == "NV_NVTX=1 without the package nvtx"
    assert caught.value.expected == "nvtx, which makes the ranges"
    assert caught.value.fix == "pip install nvtx, or unset NV_NVTX"
    assert not ranges.tracking()
