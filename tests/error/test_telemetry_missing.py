"""What telemetry says where it cannot read: no package, no driver, no such GPU."""
import sys
import types

import pynvml
import pytest

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.observe import telemetry


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
