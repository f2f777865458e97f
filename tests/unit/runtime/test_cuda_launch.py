"""Modules and launches of CUDADriver: images, argument blocks, attributes, what the driver refuses."""
from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.runtime.cuda_fake import Fake, installed
from tests.unit.runtime.test_driver import ADD, HEAD, N, Numbers
from tinygrad_nv.errors import DriverError, NVError, PTXError
from tinygrad_nv.ptx.builder import core as builder_core
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import code as cuda_code
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Launch, TensorMapSpec, Window, integer, pointer, real

# all kinds of parameters, each stored as 8 bytes of the array
MIXED = HEAD + """.visible .entry mixed(.param .u64 p, .param .u8 a, .param .u16 b, .param .u32 c,
                                        .param .f64 d, .param .align 64 .b8 m[128], .param .u8 e)
{
.reg .u64 %a<4>;
.reg .u16 %h<4>;
.reg .u32 %r<4>;
.reg .u64 %v<8>;
ld.param.u64 %a1, [p];
ld.param.u8 %h1, [a];
cvt.u64.u16 %v1, %h1;
st.global.u64 [%a1], %v1;
ld.param.u16 %h1, [b];
cvt.u64.u16 %v1, %h1;
st.global.u64 [%a1+8], %v1;
ld.param.u32 %r1, [c];
cvt.u64.u32 %v1, %r1;
st.global.u64 [%a1+16], %v1;
ld.param.u64 %v1, [d];
st.global.u64 [%a1+24], %v1;
ld.param.u64 %v1, [m];
st.global.u64 [%a1+32], %v1;
ld.param.u64 %v1, [m+120];
st.global.u64 [%a1+40], %v1;
ld.param.u8 %h1, [e];
cvt.u64.u16 %v1, %h1;
st.global.u64 [%a1+48], %v1;
ret;
}
"""


# **** modules ****

def test_our_ptx_is_of_the_version_that_is_asked_for():
    assert builder_core.Core("k").version == cuda_api.PTX_VERSION


def test_a_log_of_the_compiler(fake: Fake, gpu: CUDADriver):
    fake.fail("cuModuleLoadDataEx", "CUDA_ERROR_INVALID_PTX", b"ptxas application ptx input, line 9; error\n")
    with pytest.raises(DriverError, match="loading a module: ptxas application ptx input, line 9; error: "
                                          r"CUDA_ERROR_INVALID_PTX \(words for 218\)"):
        gpu.load(ADD.encode())
    fake.fail("cuModuleLoadDataEx", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="module: CUDA_ERROR_OUT_OF_MEMORY"): gpu.load(ADD.encode())


def test_a_driver_too_old_for_a_text():
    with installed(version=(12, 8)) as fake:
        gpu = CUDADriver()
        with pytest.raises(DriverError, match=r"supports CUDA 12.8 \(PTX 8.7\); our kernels are PTX 9.0, "
                                              r"which needs a driver for CUDA 13.0 or later"):
            gpu.load(ADD.replace("8.0", "9.0").encode())
        gpu.close()
        assert fake.left() == {}


@pytest.mark.parametrize(("target", "runs"), [("sm_80", True), ("sm_89", True), ("sm_90", False),
                                              ("sm_90a", False), ("sm_89a", True)])
def test_targets(target: str, runs: bool):
    with installed("sm_89"):
        gpu = CUDADriver()
        text = ADD.replace("sm_80", target).replace("8.0", "8.7").encode()
        if runs and target != "sm_89a": gpu.load(text)
        elif not runs:
            with pytest.raises(DriverError, match=f"module is for {target}, GPU 0 is sm_89"): gpu.load(text)
        gpu.close()


def test_what_is_neither_ptx_nor_a_cubin(gpu: CUDADriver):
    with pytest.raises(DriverError, match=r"a module without \.version or \.target"): gpu.load(b"hello")
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_IMAGE"): gpu.load(b"\x7fELF...")


def test_cubins_where_there_is_ptxas():
    with installed(ptxas=True) as fake:
        gpu = CUDADriver()
        numbers = Numbers(gpu)
        gpu.submit(numbers.twice())
        assert (numbers.read() == 2 * np.arange(N)).all()
        cubin, = fake.sources
        module = gpu.load(cubin)
        with pytest.raises(DriverError, match="no kernel 'sub'") as caught: module.function("sub")
        assert sorted(caught.value.expected.removeprefix("one of: ").split(", ")) == ["add", "twice"]
        with pytest.raises(PTXError, match="ptxas refuses the kernel"):
            gpu.load(ADD.replace("mov", "mow").encode())
        gpu.close()
        assert fake.left() == {}


def test_ptxas_newer_than_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    with installed(version=(12, 8), ptxas=True) as fake:
        monkeypatch.setattr(cuda_code, "release", lambda: (13, 0))
        gpu = CUDADriver()
        gpu.load(ADD.encode())
        assert fake.sources == {}
        monkeypatch.setattr(cuda_code, "release", lambda: (12, 9))
        gpu.load(ADD.encode())
        assert len(fake.sources) == 1
        gpu.close()


def test_modules_go_when_nothing_holds_them(fake: Fake, numbers: Numbers):
    gpu = numbers.gpu
    module = gpu.load(ADD.encode())
    graph = gpu.graph()
    graph.add(Launch(module.function("twice"), (1, 1, 1), (N, 1, 1), (pointer(numbers.address),)))
    ready = graph.instantiate()
    module.unload()
    ready.launch()  # the graph holds the code
    assert (numbers.read() == 2 * np.arange(N)).all()
    assert fake.left()["Module"] == 2
    del ready, graph
    assert fake.left()["Module"] == 1
    with pytest.raises(DriverError, match="kernel add of a module that was unloaded"): module.function("add")


# **** arguments ****

def test_arguments_of_every_kind(gpu: CUDADriver):
    address = gpu.alloc(56)
    mixed = gpu.load(MIXED.encode()).function("mixed")
    assert mixed.handle.sizes == (8, 1, 2, 4, 8, 128, 1)
    args = (pointer(address), integer(200, 1), integer(-2, 2), integer(70000), real(0.5, 8),
            bytes(range(128)), integer(9, 1))
    gpu.submit(Launch(mixed, (1, 1, 1), (1, 1, 1), args))
    out = bytearray(56)
    gpu.copy_out(memoryview(out), address)
    assert struct.unpack("<QQQdQQQ", out) == (200, 65534, 70000, 0.5, *struct.unpack("<Q", bytes(range(8))),
                                             *struct.unpack("<Q", bytes(range(120, 128))), 9)


def test_arguments_that_do_not_fit(numbers: Numbers):
    with pytest.raises(DriverError, match="1 arguments for the 2 parameters of add"):
        numbers.gpu.submit(numbers.launch("add", pointer(numbers.address)))
    with pytest.raises(DriverError, match="argument 1 of add has 8 bytes") as caught:
        numbers.gpu.submit(numbers.launch("add", pointer(numbers.address), pointer(1)))
    assert caught.value.expected == "4 bytes"


def test_a_driver_that_does_not_tell_of_parameters():
    with installed(version=(12, 8)) as fake:
        gpu = CUDADriver()
        gpu.version = (12, 3)
        numbers = Numbers(gpu)
        assert fake.calls["cuFuncGetParamInfo"] == 0
        gpu.submit(numbers.twice())
        assert (numbers.read() == 2 * np.arange(N)).all()
        gpu.close()


# **** attributes ****

def test_attributes_reach_the_driver(fake: Fake, numbers: Numbers, monkeypatch: pytest.MonkeyPatch):
    gpu, seen = numbers.gpu, []
    gpu.set_persisting_l2(1 << 20)
    monkeypatch.setattr(fake.devices[0].emu, "submit", lambda work, stream: seen.append(work))
    window = Window(numbers.address, 256, 0.25)
    for change in ({}, {"cluster": (2, 1, 1)}, {"pdl": True}, {"window": window}, {"dynamic_smem": 232448},
                   {"cluster": (2, 2, 4), "pdl": True, "window": window, "dynamic_smem": 1024}):
        asked = replace(numbers.twice(), grid=(4, 2, 4), **change)
        gpu.submit(asked)
        assert replace(seen[-1], function=asked.function) == asked
    gpu.submit(replace(numbers.twice(), grid=(4, 2, 4)))  # from the same configuration as the first
    assert len(gpu.launcher.configs) == 6


def test_what_a_device_cannot_do(numbers: Numbers):
    gpu, plain = numbers.gpu, numbers.twice()
    for words, change in {
        "a cluster of 32 CTAs": {"grid": (32, 1, 1), "cluster": (32, 1, 1)},
        r"grid=\(3, 1, 1\) is not a multiple of cluster=\(2, 1, 1\)":
            {"grid": (3, 1, 1), "cluster": (2, 1, 1)},
        "a window of 0 bytes": {"window": Window(0, 0)},
        "a window of 134217729 bytes": {"window": Window(0, (128 << 20) + 1)},
        "hit_ratio=1.5": {"window": Window(0, 1, 1.5)},
        r"kernel twice with grid=\(1, 1, 1\), block=\(1025, 1, 1\), shared memory 0 \+ 0 bytes":
            {"block": (1025, 1, 1)},
        r"cluster=\(2, 1, 1\), shared memory 0 \+ 232449 bytes":
            {"grid": (2, 1, 1), "cluster": (2, 1, 1), "dynamic_smem": 232449},
    }.items():
        work, graph = replace(plain, **change), gpu.graph()
        with pytest.raises(DriverError, match=words): gpu.submit(work)
        with pytest.raises(DriverError, match=words): graph.add(work)


def test_ampere_has_neither_clusters_nor_overlap():
    with installed("sm_80"):
        gpu = CUDADriver()
        assert gpu.properties.arch == "sm_80"
        numbers = Numbers(gpu)
        two = (2, 1, 1)
        for words, change in {"programmatic dependent launch on sm_80": {"pdl": True},
                              r"cluster=\(2, 1, 1\) on sm_80": {"grid": two, "cluster": two}}.items():
            with pytest.raises(DriverError, match=words): gpu.submit(replace(numbers.twice(), **change))
        with pytest.raises(NVError, match="a tensor map on sm_80"):
            gpu.tensor_map(TensorMapSpec("f16", 0, (64,), (), (64,)))
        gpu.close()


def test_a_function_of_another_gpu(fake: Fake, numbers: Numbers):
    other = CUDADriver(1)
    with pytest.raises(DriverError, match="kernel twice is launched"): other.submit(numbers.twice())
    other.close()


# **** tensor maps ****

CUBE: dict[str, Any] = {"dims": (64, 8, 4), "strides": (256, 2048)}
KINDS: list[dict[str, Any]] = [
    *({"dtype": dtype} for dtype in ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64",
                                     "tf32")),
    *({"swizzle": swizzle} for swizzle in ("32B", "64B", "128B")),
    *({"l2_promotion": size} for size in ("64B", "128B", "256B")),
    {"fill": "nan"}, {"element_strides": (1, 2)}, {**CUBE, "box": (16, 2, 2)},
    {**CUBE, "box": (8, 2, 2), "interleave": "16B"},
    {**CUBE, "box": (8, 2, 2), "interleave": "32B", "swizzle": "32B"},
    {"dims": (4, 4, 4, 4, 4), "strides": (16, 64, 256, 1024), "box": (8, 1, 1, 1, 1)},
    {"dims": (64,), "strides": (), "box": (16,)},
    {**CUBE, "box": (16, 32), "lower": (-2,), "upper": (1,), "element_strides": (1, 2, 1)},
    {"dims": (64, 9, 7, 3), "strides": (128, 1152, 8064), "box": (64, 128), "lower": (-1, -2),
     "upper": (-1, 0), "element_strides": (1, 2, 3, 1), "swizzle": "128B"}]
BOXES = {"u8": (16, 8), "u64": (2, 8), "s64": (2, 8), "f64": (2, 8)}


def spec_of(change: dict[str, Any]) -> TensorMapSpec:
    """A map over 32 rows of 64 elements, but for `change`."""
    given = {"dtype": "f16", "dims": (64, 32), "strides": (256,), "address": 0x700000, **change}
    return TensorMapSpec(**{"box": BOXES.get(given["dtype"], (16, 8)), **given})


@pytest.mark.parametrize("change", KINDS)
def test_tensor_maps(fake: Fake, gpu: CUDADriver, change: dict[str, Any]):
    spec = spec_of(change)
    assert gpu.tensor_map(spec) == fake.devices[0].emu.tensor_map(spec)
    assert fake.maps.l2 == spec.l2_promotion  # not in the bytes


@pytest.mark.parametrize(("change", "words"), [
    ({"dtype": "f8"}, "element type 'f8'"), ({"dims": ()}, "a tensor map of rank 0"),
    ({"dims": (1,) * 6}, "a tensor map of rank 6"), ({"strides": ()}, "for rank 2 2 extents of the box"),
    ({"box": (64,)}, "for rank 2"), ({"element_strides": (1,)}, "for rank 2"),
    ({"address": 0x700008}, "a tensor at address 0x700008"), ({"strides": (250,)}, "a stride of 250 bytes"),
    ({"box": (257, 1)}, "an extent of 257"), ({"box": (-1, 1)}, "an extent of -1"),
    ({"box": (2**33, 1)}, "an extent of 8589934592"), ({"dims": (0, 1)}, "a dimension of 0"),
    ({"dims": (2**65, 1)}, "a dimension of"), ({"box": (128, 8), "swizzle": "128B"}, "with swizzle='128B'"),
    ({"element_strides": (1, 9)}, "stride of 9"),
    ({"dtype": "u16", "fill": "nan"}, "NaN for elements out of bounds"),
    ({"interleave": "16B"}, "interleave='16B' for rank 2"),
    ({"lower": (0,), "upper": (0,)}, "for an im2col map of rank 2"),
    ({**CUBE, "box": (16, 32), "lower": (-2,), "upper": ()}, "for an im2col map of rank 3"),
    ({**CUBE, "box": (16, 2000), "lower": (0,), "upper": (0,)}, "pixels=2000")])
def test_tensor_maps_beyond_the_limits(gpu: CUDADriver, change: dict[str, Any], words: str):
    with pytest.raises(NVError, match=words): gpu.tensor_map(spec_of(change))


def test_a_driver_without_tensor_maps(fake: Fake, gpu: CUDADriver, monkeypatch: pytest.MonkeyPatch):
    missing = fake.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    monkeypatch.setattr(type(fake), "_cuGetProcAddress",
                        lambda self, *args: (self.CUresult.CUDA_SUCCESS, 0, missing), raising=False)
    with pytest.raises(NVError, match="VERSION_NOT_SUFFICIENT"):
        gpu.tensor_map(TensorMapSpec("f16", 0, (64,), (), (64,)))
