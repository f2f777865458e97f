"""DEV=CUDA, its driver, NVRTC and bench/gpu/run.py where something is missing: one line that says what, and
what works without."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinygrad.device import CompileError
from tinygrad.helpers import Context

from tests.support.runtime.cuda_fake import Fake, installed
from tinygrad_nv import Device, Tensor, hooks
from tinygrad_nv.cli import doctor
from tinygrad_nv.errors import DriverError, ToolchainError
from tinygrad_nv.hooks import devices as hook_devices
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import device as cuda_device
from tinygrad_nv.runtime.cuda import nvrtc
from tinygrad_nv.runtime.cuda.device import CUDADevice
from tinygrad_nv.runtime.cuda.driver import CUDADriver, missing
from tinygrad_nv.runtime.cuda.nvrtc import NVRTC

OLD = ("the NVIDIA driver supports CUDA 12.4 (PTX 8.4); our kernels are PTX 8.7, which needs a driver for "
       "CUDA 12.8 or later")


def refused(words: str, ordinal: int = 0) -> DriverError:
    """Both say so, and the driver what would help."""
    assert missing(ordinal) == words
    with pytest.raises(DriverError, match=f"^{re.escape(words)}\n") as caught: CUDADriver(ordinal)
    assert "compute capability 8.0" in caught.value.expected
    assert "DEV=EMU" in caught.value.fix
    assert "DEV=CPU" in caught.value.fix
    return caught.value


def test_all_is_there():
    with installed() as fake:
        assert missing() == ""
        assert fake.left() == {}  # asking holds nothing


def test_no_cuda_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused("cuda-python is not installed")
    def fails(name: str) -> None: raise ModuleNotFoundError("No module named 'cuda'", name="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", fails)
    refused("cuda-python is not installed")


@pytest.mark.parametrize("error", [RuntimeError("Failed to dlopen libcuda.so.1"), OSError("no such file")])
def test_no_driver_library(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fails(self: Fake, flags: int) -> None: raise error
    with installed():
        monkeypatch.setattr(Fake, "_cuInit", fails)
        refused("no NVIDIA driver library (libcuda.so.1)")


def test_a_library_of_another_kind(monkeypatch: pytest.MonkeyPatch):
    def fails() -> None: raise AttributeError("module 'cuda' has no\nattribute 'x'")
    monkeypatch.setattr(cuda_api, "bindings", fails)
    refused("cuda-python cannot be used: AttributeError: module 'cuda' has no attribute 'x'")


def test_no_gpu():
    with installed(gpus=0): refused("no NVIDIA GPU")


@pytest.mark.parametrize(("gpus", "ordinal", "words"), [
    (1, 1, "no GPU 1: there is 1, counted from 0"), (2, 5, "no GPU 5: there are 2, counted from 0"),
    (2, -1, "no GPU -1: there are 2, counted from 0")])
def test_no_such_gpu(gpus: int, ordinal: int, words: str):
    with installed(gpus=gpus): refused(words, ordinal)


def test_a_gpu_older_than_ampere():
    with installed() as fake:
        fake.devices[0].capability = 7, 5
        refused("GPU 0 has compute capability 7.5; 8.0 (Ampere) or later is needed")


def test_a_driver_too_old_names_both_versions():
    with installed(version=(12, 4)): refused(OLD)
    with installed(version=(12, 8)): assert missing() == ""


@pytest.mark.parametrize(("function", "status", "words"), [
    ("cuInit", "CUDA_ERROR_SYSTEM_NOT_READY",
     "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_NOT_READY (words for 802)"),
    ("cuInit", "CUDA_ERROR_NO_DEVICE", "no NVIDIA GPU"),
    ("cuDeviceGetCount", "CUDA_ERROR_NOT_INITIALIZED", "no NVIDIA GPU"),
    ("cuDeviceGet", "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "GPU 0 cannot be used: CUDA_ERROR_DEVICE_UNAVAILABLE (words for 46)")])
def test_a_driver_that_fails(function: str, status: str, words: str):
    with installed() as fake:
        fake.fail(function, status, times=2)
        refused(words)


def test_a_gpu_in_exclusive_use_by_another_process():
    with installed() as fake:
        fake.fail("cuDevicePrimaryCtxRetain", "CUDA_ERROR_DEVICE_UNAVAILABLE")
        with pytest.raises(DriverError, match="opening a GPU: CUDA_ERROR_DEVICE_UNAVAILABLE"): CUDADriver()
        assert fake.left() == {}


@pytest.mark.parametrize("function", ["cuMemPoolCreate", "cuStreamCreate", "cuEventCreate",
                                      "cuMemPoolSetAttribute", "cuDeviceGetName"])
def test_a_gpu_that_opens_halfway_is_closed(function: str):
    with installed() as fake:
        fake.fail(function, "CUDA_ERROR_OUT_OF_MEMORY")
        with pytest.raises(DriverError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"): CUDADriver()
        assert fake.left() == {}


@pytest.mark.parametrize(("ptx", "cuda"), [((7, 0), (11, 0)), ((7, 8), (11, 8)), ((8, 0), (12, 0)),
                                           ((8, 5), (12, 5)), ((8, 6), (12, 7)), ((8, 7), (12, 8)),
                                           ((8, 8), (12, 9)), ((9, 0), (13, 0)), ((9, 1), (13, 1))])
def test_releases_of_ptx(ptx: tuple[int, int], cuda: tuple[int, int]):
    """PTX ISA, release notes."""
    assert cuda_api.cuda_of_ptx(ptx) == cuda
    assert cuda_api.ptx_of_cuda(cuda) == ptx
    assert cuda_api.too_old(cuda, ptx) == ""


def test_the_module_needs_no_cuda_to_be_imported():
    code = ("import sys; import tinygrad_nv; "
            "assert not [m for m in sys.modules if m.split('.')[0] == 'cuda']; "
            "from tinygrad_nv.runtime.cuda import driver; assert 'cuda.bindings.driver' not in sys.modules; "
            "assert isinstance(driver.missing(), str)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# **** NVRTC ****

def test_a_driver_that_takes_nothing_of_what_it_makes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    with installed(version=(12, 8)), Context(DEV="CUDA:CUDA"), pytest.raises(ToolchainError) as caught:
        _ = CUDADevice("CUDA").renderer
    assert caught.value.found == "NVRTC 13.0 makes nothing that a driver for CUDA 12.8 takes"
    assert caught.value.expected == "a driver for CUDA 13 or later"
    assert caught.value.fix == "update the NVIDIA driver, or render PTX (DEV=CUDA:PTX)"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    nvrtc._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError) as caught: nvrtc.version()
    assert caught.value.found.startswith("NVRTC cannot be loaded: ")
    assert caught.value.expected == "cuda-python and libnvrtc"
    assert caught.value.fix == "pip install cuda-python nvidia-cuda-nvrtc"
    nvrtc._nvrtc.cache_clear()


def test_without_its_headers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvrtc, "headers", lambda: None)
    with pytest.raises(ToolchainError) as caught: NVRTC("sm_90")
    assert caught.value.found == "cuda_bf16.h is not found"
    assert caught.value.fix == "pip install nvidia-cuda-runtime"


def test_a_gpu_that_it_knows_no_more():
    with pytest.raises(ToolchainError, match=r"NVRTC \d+\.\d+ does not compile for sm_50") as caught:
        NVRTC("sm_50")
    assert "sm_80" in caught.value.expected


def test_a_text_that_does_not_compile():
    with pytest.raises(CompileError, match=r'(?s)NVRTC_ERROR_COMPILATION.*identifier "oops" is undefined'):
        NVRTC("sm_90").compile("oops k;")


# **** the device ****

INSTEAD = "; DEV=EMU emulates a GPU, DEV=CPU needs none"


class Status:
    """A status of the CUDA driver: true when it is an error."""

    def __init__(self, name: str = "CUDA_SUCCESS") -> None: self.name = name

    def __bool__(self) -> bool: return self.name != "CUDA_SUCCESS"


def machine(release: int = 13000, gpus: int = 1, capability: tuple[int, int] = (9, 0),
            init: str = "CUDA_SUCCESS") -> Any:
    """cuda.bindings.driver of a machine, as far as it is asked before a device opens."""
    names = SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
                            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1)
    return SimpleNamespace(
        CUdevice_attribute=names, cuInit=lambda flags: (Status(init),),
        cuDriverGetVersion=lambda: (Status(), release), cuDeviceGetCount=lambda: (Status(), gpus),
        cuDeviceGet=lambda n: (Status() if n < gpus else Status("CUDA_ERROR_INVALID_DEVICE"), n),
        cuDeviceGetAttribute=lambda which, device: (Status(), capability[which]),
        cuGetErrorString=lambda status: (Status(), b"words of the driver"))


def no_library() -> Any:
    """A machine without libcuda, as cuda-python tells it."""
    def fails(*args: int) -> Any: raise RuntimeError("libcuda.so.1 cannot be found")
    return SimpleNamespace(cuInit=fails, cuDeviceGet=fails)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """`on(machine(...))`: what cuda-python finds; `on(None)`: there is no cuda-python."""
    monkeypatch.setattr(cuda_device, "has_library", lambda: True)

    def put(found: Any) -> None:
        monkeypatch.setattr(cuda_device, "has_bindings", lambda: found is not None)
        monkeypatch.setattr(cuda_api, "bindings", lambda: found)

    yield put
    if "CUDA" not in hook_devices._devices: hooks.add_device("CUDA", cuda_device.CUDADevice)


def message(device: str = "CUDA") -> str:
    """What opening a device raises."""
    with pytest.raises(DriverError) as caught: Device[device]
    return str(caught.value)


MISSING: dict[str, tuple[Any, str, str]] = {
    "library": (no_library(), "CUDA", "no NVIDIA driver library (libcuda.so.1)"),
    "gpu": (machine(init="CUDA_ERROR_NO_DEVICE"), "CUDA", "no NVIDIA GPU"),
    "start": (machine(init="CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), "CUDA", "the NVIDIA driver does not start: "
              "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (words of the driver)"),
    "ordinal": (machine(gpus=2), "CUDA:2", "no GPU 2: there are 2, counted from 0"),
    "name": (machine(), "CUDA:X", "what follows the colon is the number of a GPU"),
}


@pytest.mark.parametrize(("found", "device", "reason"), MISSING.values(), ids=MISSING)
def test_one_line_says_what_is_missing(on: Callable[[Any], None], found: Any, device: str, reason: str):
    on(found)
    assert message(device) == f"device {device} cannot be opened: {reason}{INSTEAD}"


@pytest.mark.parametrize("missing", ["library", "gpu", "start"])
def test_the_command_line_prints_that_line_alone(on: Callable[[Any], None], command: Any, missing: str):
    found, device, reason = MISSING[missing]
    on(found)
    made = command("generate", "hello", "--device", device)
    made.refused()
    assert made.err == f"tinygrad-nv: device {device} cannot be opened: {reason}{INSTEAD}\n"


def test_a_tensor_says_it_too(on: Callable[[Any], None]):
    on(machine(init="CUDA_ERROR_NO_DEVICE"))
    with pytest.raises(DriverError) as caught: Tensor([1.0], device="CUDA").realize()
    assert str(caught.value) == f"device CUDA cannot be opened: no NVIDIA GPU{INSTEAD}"


def test_a_driver_too_old_for_our_ptx(on: Callable[[Any], None]):
    on(machine(release=12040))
    found = message()
    assert found.count("\n") == 0
    assert found.endswith(INSTEAD)
    ptx = cuda_api.format_version(cuda_api.PTX_VERSION)
    needed = cuda_api.format_version(cuda_api.cuda_of_ptx(cuda_api.PTX_VERSION))
    assert "supports CUDA 12.4 (PTX 8.4)" in found
    assert f"PTX {ptx}, which needs a driver for CUDA {needed} or later" in found


def test_doctor_shows_the_same_facts(on: Callable[[Any], None]):
    for found, reason in ((machine(init="CUDA_ERROR_NO_DEVICE"), "no NVIDIA GPU"),
                          (machine(release=12040), "supports CUDA 12.4")):
        on(found)
        (finding,) = (each for each in doctor.examine() if each.subject == "DEV=CUDA")
        assert finding.state == "missing"
        assert reason in finding.what
        assert finding.what.endswith(INSTEAD)


def test_doctor_says_what_other_kernels_are_written_in(on: Callable[[Any], None],
                                                       monkeypatch: pytest.MonkeyPatch):
    from tinygrad_nv.runtime.cuda import nvrtc
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 2))
    for release, capability, words in (
            (13020, (9, 0), "CUDA C, compiled to PTX by NVRTC 13.2"),
            (13000, (9, 0), "CUDA C, compiled to machine code by NVRTC 13.2"),
            (13000, (10, 0), "PTX: NVRTC 13.2 makes nothing that a driver for CUDA 13.0 takes"),
            (12080, (9, 0), "PTX: NVRTC 13.2 makes nothing that a driver for CUDA 12.8 takes")):
        on(machine(release, capability=capability))
        (finding,) = (each for each in doctor.examine() if each.subject == "DEV=CUDA")
        assert finding.state == "ok"
        assert finding.what.startswith(f"tinygrad_nv's device; other kernels are {words}")


# **** tinygrad's own device ****

@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for tinygrad's device, which opens."""
    device = SimpleNamespace(device="CUDA", finalize=lambda: None)
    monkeypatch.setattr(cuda_device, "_their_class", lambda: lambda name: device)
    return device


@pytest.mark.parametrize(("found", "reason"), [
    (None, "cuda-python is not installed"),
    (machine(capability=(7, 5)), "GPU 0 has compute capability 7.5; 8.0 (Ampere) or later is needed")],
    ids=["cuda-python", "capability"])
def test_a_line_says_that_it_is_tinygrads(on: Callable[[Any], None], theirs: SimpleNamespace,
                                          capsys: pytest.CaptureFixture[str], found: Any, reason: str):
    on(found)
    assert cuda_device.CUDADevice("CUDA") is theirs
    assert capsys.readouterr().err == f"tinygrad_nv: CUDA is tinygrad's own CUDA device: {reason}\n"
    assert "CUDA" not in hook_devices._devices, "the name is tinygrad's from now on"


def test_tinygrads_device_does_not_open_either(on: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch):
    def fails(name: str) -> None: raise RuntimeError("CUDA Error 100,\nno device")
    monkeypatch.setattr(cuda_device, "_their_class", lambda: fails)
    on(None)
    assert message() == ("device CUDA cannot be opened: cuda-python is not installed, and tinygrad's own "
                         f"CUDA device does not open (CUDA Error 100, no device){INSTEAD}")
    assert "CUDA" in hook_devices._devices, "the next try says the same"


def test_without_cuda_python_and_without_a_driver(on: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch):
    on(None)
    monkeypatch.setattr(cuda_device, "has_library", lambda: False)
    assert message() == f"device CUDA cannot be opened: no NVIDIA driver library (libcuda.so.1){INSTEAD}"


def test_tinygrads_class_is_found_under_the_name():
    hooks.remove_device("CUDA")
    try: assert cuda_device._their_class().__module__ == cuda_device.TINYGRADS
    finally: cuda_device.register()
    assert Device.get_class("CUDA") is cuda_device.CUDADevice


def test_a_device_that_was_open_before_stays(capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch):
    registered = dict(hook_devices._devices)
    monkeypatch.setattr(Device, "_opened_devices", {"CUDA:1"})
    cuda_device.register()
    assert hook_devices._devices == registered
    assert capsys.readouterr().err == ("tinygrad_nv: CUDA is tinygrad's own CUDA device: it was open before "
                                       "tinygrad_nv was imported\n")


def test_a_second_gpu_that_is_too_old(on: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch):
    on(machine(gpus=2, capability=(7, 5)))
    monkeypatch.setattr(Device, "_opened_devices", {"CUDA"})
    assert message("CUDA:1") == ("device CUDA:1 cannot be opened: GPU 1 has compute capability 7.5; 8.0 "
                                 f"(Ampere) or later is needed{INSTEAD}")


def test_nv_0_leaves_the_name_to_tinygrad():
    code = ("import sys, tinygrad_nv; from tinygrad_nv import Device; from tinygrad_nv.hooks import devices; "
            "print(sorted(devices._devices), Device.get_class('CUDA').__module__)")
    for nv, wanted in (("0", "['EMU'] tinygrad.runtime.ops_cuda"),
                       ("1", "['CUDA', 'EMU'] tinygrad_nv.runtime.cuda.device")):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={"NV": nv, "PATH": "/usr/bin", "HOME": str(Path.home())})
        assert done.stdout.strip() == wanted


ROOT = Path(__file__).parents[2]


def test_without_a_gpu_one_line_says_what_is_missing():
    code = ("import sys; from bench.gpu import run; run.missing = lambda: 'no NVIDIA GPU'; "
            "sys.exit(run.main())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    line, = done.stderr.splitlines()
    assert line.startswith("nothing to measure on: no NVIDIA GPU (needed: an NVIDIA GPU")
    assert "--emulate" in line
