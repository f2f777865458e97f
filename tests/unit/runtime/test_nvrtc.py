"""Which renderer DEV=CUDA takes, what NVRTC is asked for, and what goes into the key of the disk cache."""
from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda import pathfinder
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context, Target

from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.runtime.cuda import nvrtc
from tinygrad_nv.runtime.cuda.device import CUDADevice
from tinygrad_nv.runtime.cuda.nvrtc import NVRTC, CUDARenderer, image_for
from tinygrad_nv.runtime.program import WAIT
from tinygrad_nv.runtime.ptx_renderer import PTXRenderer

KERNEL = 'extern "C" __global__ void k(int *out) { out[threadIdx.x] = threadIdx.x; }'
PTX = "// a remark\n.version 7.8\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n"
SM_90 = Target("CUDA", arch="sm_90")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CUDADevice]:
    """`opened(nvrtc, driver, DEV)`: the device with NVRTC and a driver of these releases."""
    def make(compiler: tuple[int, int] | None, driver: tuple[int, int], dev: str = "CUDA",
             arch: str = "sm_90a") -> CUDADevice:
        def version() -> tuple[int, int]:
            if compiler is None: raise ToolchainError("NVRTC cannot be loaded: no such file")
            return compiler
        monkeypatch.setattr(nvrtc, "version", version)
        with installed(arch=arch, version=driver), Context(DEV=dev):
            device = CUDADevice("CUDA")
            _ = device.renderer
        return device
    return make


# **** which renderer ****

@pytest.mark.parametrize(("compiler", "driver", "image"), [
    ((13, 0), (13, 0), "ptx"), ((13, 0), (13, 4), "ptx"), ((12, 9), (13, 0), "ptx"),
    ((13, 5), (13, 0), "cubin"), ((13, 0), (12, 9), None), ((12, 9), (12, 8), "cubin")])
def test_what_a_driver_takes(compiler: tuple[int, int], driver: tuple[int, int], image: str | None):
    assert image_for(compiler, driver) == image
    assert image_for(compiler, driver, native=False) == (image if image == "ptx" else None)


def renderer_of(device: CUDADevice) -> type:
    """The one in use: the last that was made."""
    return type(next(iter(device.cached_renderer.values())))


@pytest.mark.parametrize(("compiler", "driver", "wanted"), [
    ((13, 0), (13, 0), CUDARenderer), ((13, 5), (13, 0), CUDARenderer), ((13, 0), (12, 8), PTXRenderer),
    (None, (13, 0), PTXRenderer)])
def test_cuda_c_where_it_can_be_used_and_ptx_otherwise(opened: Callable[..., CUDADevice], compiler, driver,
                                                       wanted: type):
    assert renderer_of(opened(compiler, driver)) is wanted


def test_a_renderer_that_is_asked_for(opened: Callable[..., CUDADevice]):
    assert renderer_of(opened((13, 0), (13, 0), "CUDA:PTX")) is PTXRenderer
    assert renderer_of(opened((13, 0), (13, 0), "CUDA:CUDA")) is CUDARenderer
    with pytest.raises(ToolchainError, match="NVRTC cannot be loaded"): opened(None, (13, 0), "CUDA:CUDA")
    with pytest.raises(RuntimeError, match="CUDA has no renderer 'PTTX', did you mean: 'PTX'"):
        opened((13, 0), (13, 0), "CUDA:PTTX")


@pytest.mark.parametrize(("gpu", "arch"), [("sm_80", "sm_80"), ("sm_89", "sm_89"), ("sm_90a", "sm_90")])
def test_both_renderers_are_for_the_gpu(opened: Callable[..., CUDADevice], gpu: str, arch: str):
    for dev in ("CUDA:CUDA", "CUDA:PTX"):
        (renderer,) = opened((13, 0), (13, 0), dev, gpu).cached_renderer.values()
        assert renderer.target.arch == arch


# **** what NVRTC is asked for ****

def test_ptx_text_ends_without_a_zero():
    made = NVRTC("sm_90").compile(KERNEL)
    assert re.search(rb"^\.target sm_90$", made, re.MULTILINE)
    assert made.rstrip().endswith(b"}")
    assert b"\0" not in made


def test_machine_code_for_a_driver_that_compiles_no_newer_ptx():
    assert NVRTC("sm_90", "cubin").compile(KERNEL)[:4] == b"\x7fELF"


def test_a_gpu_that_nvrtc_does_not_know_yet_gets_ptx_of_the_latest_before():
    made = NVRTC("sm_999").compile(KERNEL)
    assert re.search(rb"^\.target sm_1\d\d$", made, re.MULTILINE)


def test_headers_of_every_narrow_type_are_found():
    headers = "".join(f"#include <cuda_{name}.h>\n" for name in ("fp16", "bf16", "fp8"))
    assert NVRTC("sm_90").compile(headers + KERNEL)


def unknown(name: str) -> str: raise RuntimeError(f"UNKNOWN libname={name!r}")


@pytest.mark.parametrize("find", [None, unknown, lambda name: None])
def test_headers_beside_nvcc_where_pathfinder_knows_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                         find: Callable[[str], None] | None):
    if find is None: monkeypatch.delattr(pathfinder, "find_nvidia_header_directory")
    else: monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", find)
    nvcc, header = tmp_path / "cuda" / "bin" / "nvcc", tmp_path / "cuda" / "include" / "cuda_bf16.h"
    nvcc.parent.mkdir(parents=True)
    header.parent.mkdir()
    nvcc.touch()
    monkeypatch.setattr(nvrtc, "find_program", lambda name: nvcc)
    assert nvrtc.headers() is None
    header.touch()
    assert nvrtc.headers() == str(header.parent)
    monkeypatch.setattr(nvrtc, "find_program", lambda name: None)
    assert nvrtc.headers() is None


def test_the_ptx_of_a_kernel_that_waits_says_so():
    """By which runtime/program.py launches it with PDL."""
    waiting = KERNEL.replace("{ ", f"{{ {nvrtc.EARLY} ")
    assert WAIT in NVRTC("sm_90").compile(waiting)
    assert WAIT not in NVRTC("sm_90").compile(KERNEL)
    assert WAIT not in NVRTC("sm_90", "cubin").compile(waiting)


def test_kernels_given_as_ptx_pass_through():
    assert NVRTC("sm_90").compile(PTX) == PTX.encode()


# **** keys ****

def test_the_cache_key_tells_releases_images_gpus_and_options_apart(monkeypatch: pytest.MonkeyPatch):
    keys = [NVRTC("sm_90").cachekey, NVRTC("sm_90", "cubin").cachekey, NVRTC("sm_89").cachekey]
    known = nvrtc.version()
    monkeypatch.setattr(nvrtc, "version", lambda: (known[0], known[1] + 1))
    keys.append(NVRTC("sm_90").cachekey)
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "headers", lambda: "/elsewhere")
    keys.append(NVRTC("sm_90").cachekey)
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert NVRTC("sm_90").cachekey == keys[0]


def test_spawned_workers_make_what_their_parent_makes():
    for image in ("ptx", "cubin"):
        # no driver is asked
        made = pickle.loads(pickle.dumps(CUDARenderer(SM_90, image)))
        assert (made.image, made.compiler.cachekey) == (image, NVRTC("sm_90", image).cachekey)


def test_tf32_only_when_it_is_allowed():
    def float32_cores() -> list[object]:
        return [core for core in CUDARenderer(SM_90, "ptx").tensor_cores if core.dtype_in == dtypes.float]
    assert not float32_cores()
    with Context(ALLOW_TF32=1): assert float32_cores()


def test_bf16_and_fp8_are_types_of_its_own():
    known = CUDARenderer(SM_90, "ptx").supported_dtypes()
    assert {dtypes.bfloat16, dtypes.half, dtypes.fp8e4m3, dtypes.fp8e5m2} <= known
    assert dtypes.fp8e4m3 not in CUDARenderer(Target("CUDA", arch="sm_80"), "ptx").supported_dtypes()
