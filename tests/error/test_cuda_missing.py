"""What CUDADriver and `missing` say where something is not there."""
from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.support.runtime.cuda_fake import Fake, installed
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda.driver import CUDADriver, missing

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
