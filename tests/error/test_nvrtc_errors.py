"""What is said where NVRTC is missing, does not fit the driver or the GPU, or refuses a text."""
from __future__ import annotations

import sys

import pytest
from tinygrad.device import CompileError
from tinygrad.helpers import Context

from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.runtime.cuda import nvrtc
from tinygrad_nv.runtime.cuda.device import CUDADevice
from tinygrad_nv.runtime.cuda.nvrtc import NVRTC


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
