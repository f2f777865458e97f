"""Programs under `ptx run` that are wrong, or cannot be emulated: CUDA's error codes, and the words for
them."""
from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled
from tinygrad_nv.cli import main
from tinygrad_nv.host import fatbin, run_program

START = "void *a, *b; int count = 32; cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaMemset(a, 0, 128);"
CONFIG = """
    struct { unsigned name, pad, value[16]; } cluster = {4, 0, {%s, 1, 1}};
    struct { dim3 grid, block; size_t smem; void *stream, *attributes; unsigned count; } config = {
        {%s, 1, 1}, {32, 1, 1}, 0, 0, &cluster, 1};
    TRY(cudaLaunchKernelExC(&config, &scaled, (void *[]){&a, &b, &count}));"""
LAUNCH = "TRY(RUN(scaled, 1, 32, &a, &b, &count));"


def ends(folder: Path, body: str, capfd: pytest.CaptureFixture[str], *options: str, ptx: str = SCALE,
         **how: object) -> tuple[int, str, str]:
    """Exit status, what the program said, and what `ptx run` said."""
    program = compiled(folder, START + body, ptx, **how)    # type: ignore[arg-type]
    code = main(["ptx", "run", *options, str(program)])
    return code, *capfd.readouterr()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("body", "error", "words"), [
    ("dim3 x = {1, 1, 1}; TRY(cudaLaunchKernel(&scaled, x, x, (void *[]){&a, &b, &count}, 49153, 0));",
     "cudaErrorInvalidValue", ["49153 bytes of dynamic shared memory of scaled", "49152",
                               "cudaFuncAttributeMax"]),
    ("TRY(cudaFuncSetAttribute(&scaled, 8, 232449));", "cudaErrorInvalidValue", ["232449 bytes",
                                                                                 "0 to 232448"]),
    ("TRY(RUN(scaled, 1, 1025, &a, &b, &count));", "cudaErrorInvalidConfiguration", ["1025", "1 to (1024, "]),
    ("TRY(RUN(scaled, 0, 32, &a, &b, &count));", "cudaErrorInvalidConfiguration", ["a grid of (0, 1, 1)"]),
    (CONFIG % (16, 16), "cudaErrorInvalidClusterSize", ["a cluster of 16 CTAs",
                                                        "8; 16 with cudaFuncAttribute"]),
    (CONFIG % (4, 6), "cudaErrorInvalidValue", ["a grid of (6, 1, 1)", "whole clusters of (4, 1, 1)"]),
    ("TRY(cudaMemcpy(a, b, 256, DtoD));", "cudaErrorInvalidValue", ["256 bytes at",
                                                                    "byte 0 of an allocation of 128"]),
    ("TRY(cudaMemcpy(a, &count, 4, DtoH));", "cudaErrorInvalidValue",
     ["the target of a copy of kind 2 is device"]),
    ("TRY(cudaFree((char *)a + 8));", "cudaErrorInvalidValue", ["is freed: byte 8 of an allocation of 128"]),
    ("TRY(cudaLaunchKernel(&count, (dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, 0, 0));",
     "cudaErrorInvalidDeviceFunction",
     ["is no kernel of the program"]),
    ("TRY(cudaStreamSynchronize(START));".replace("START", "(void *)77ul"), "cudaErrorInvalidResourceHandle",
     ["0x4d is no stream"]),
    ("TRY(cudaSetDevice(1));", "cudaErrorInvalidDevice", ["device 1; one GPU is emulated, device 0"]),
    ("TRY(cudaDeviceEnablePeerAccess(1, 0));", "cudaErrorInvalidDevice", ["one GPU is emulated"]),
    ("TRY(cudaMalloc(&a, 1ul << 40));", "cudaErrorMemoryAllocation", ["1099511627776 bytes asked for"])],
    ids=["dynamic shared memory", "attribute", "threads", "empty grid", "cluster of 16", "part of a cluster",
         "copy past the end", "copy of the wrong kind", "free inside", "no kernel", "no stream", "no device",
         "peer", "out of memory"])
def test_what_cuda_refuses_is_refused_in_words(tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str,
                                               error: str, words: list[str]):
    code, out, err = ends(tmp_path, body + "TRY(cudaGetLastError()); TRY(cudaGetLastError());", capfd)
    assert (code, out) == (0, f"{error} {error} cudaSuccess ")
    assert f"returned {error}" in err
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize(("body", "error", "kind", "line"), [
    ("count = 40; TRY(RUN(scaled, 2, 32, &a, &b, &count));", "cudaErrorIllegalAddress", "out-of-bounds",
     "ld.global.f32 %f1, [%rd1];"),
    ("a = 0; " + LAUNCH, "cudaErrorIllegalAddress", "out-of-bounds", "ld.global.f32 %f1, [%rd1];"),
    ("void *of_host = &count; TRY(RUN(scaled, 1, 32, &a, &of_host, &count));", "cudaErrorIllegalAddress",
     "out-of-bounds", "st.global.f32 [%rd2], %f1;"),
    ("a = (char *)a + 2; " + LAUNCH, "cudaErrorMisalignedAddress", "misaligned",
     "ld.global.f32 %f1, [%rd1];")])
@pytest.mark.parametrize("options", [[], ["--check"]], ids=["plain", "checked"])
def test_what_a_kernel_does_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, error: str,
                                  kind: str, line: str, options: list[str]):
    code, out, err = ends(tmp_path, body + "TRY(cudaDeviceSynchronize()); TRY(cudaMalloc(&a, 8));", capfd,
                          *options)
    assert (code, out) == (1, f"cudaSuccess {error} {error} ")
    assert f"launch 0: {kind}: line" in err
    assert f": {line}\n" in err


def test_a_trap_ends_the_kernel(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code, out, err = ends(tmp_path, LAUNCH + "TRY(cudaDeviceSynchronize());", capfd,
                          ptx=SCALE.replace("    ret;", "    trap;"))
    assert (code, out) == (1, "cudaSuccess cudaErrorLaunchFailure ")
    assert "trap: the kernel ended itself" in err


# **** what cannot be emulated ****

def test_a_function_that_is_not_emulated_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    code, out, err = ends(tmp_path, "char handle[64]; TRY(cudaIpcGetMemHandle(handle, a));", capfd)
    assert (code, out) == (1, "cudaErrorNotSupported ")
    assert "cudaIpcGetMemHandle: this function is not emulated" in err


MACHINE_CODE = struct.pack("<IHHQ", fatbin.HEADER, 1, 16, fatbin.ENTRY.size + 8) + fatbin.ENTRY.pack(
    fatbin.CUBIN, 0x101, fatbin.ENTRY.size, 8, 0, 0, 0, 0, 90, 0, 0, 0, 0, 0) + b"\x7fELF\0\0\0\0"


@pytest.mark.parametrize(("how", "error", "words"), [
    ({"image": MACHINE_CODE}, "cudaErrorNoKernelImageForDevice",
     ["machine code for sm_90, and no PTX", "-gencode arch=compute_90a,code=[sm_90a,compute_90a]"]),
    ({"ptx": SCALE.replace("sm_90", "sm_100a")}, "cudaErrorNoKernelImageForDevice",
     ["the program has PTX for sm_100a", "PTX that runs on sm_90a", "-arch=sm_90a"]),
    ({"ptx": SCALE.replace("mul.wide.u32", "mul.sideways.u32")}, "cudaErrorNotSupported", ["line 13",
                                                                                           "mul"])])
def test_device_code_that_cannot_run(tmp_path: Path, capfd: pytest.CaptureFixture[str], how: dict[str,
                                                                                                  object],
                                     error: str, words: list[str]):
    code, out, err = ends(tmp_path, LAUNCH, capfd, **how)    # type: ignore[arg-type]
    assert (code, out) == (1, error + " ")
    assert [word for word in ["not emulated: cudaLaunchKernel", *words] if word not in err] == []


def test_a_runtime_without_symbols_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """NVIDIA's asks the driver for tables that are not documented."""
    code, out, err = ends(tmp_path, """
        void *dlopen(), *dlsym();
        void *library = dlopen("libcuda.so.1", 2);
        int (*tables)(void *, void *) = dlsym(library, "cuGetExportTable");
        printf("%d", tables(&a, "0123456789abcdef"));""", capfd)
    assert (code, out) == (1, "801")
    assert "do not strip the program, or link it with nvcc -cudart shared" in err


@pytest.mark.parametrize(("words", "said"), [
    (["ptx", "run"], "no program to run"), (["ptx", "run", "./nothing-here"], "no program './nothing-here'"),
    (["ptx", "run", "--gpu", "b200", "true"], "no figures of a GPU 'b200'")])
def test_programs_that_cannot_be_started(words: list[str], said: str, capfd: pytest.CaptureFixture[str]):
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_the_exit_status_is_the_programs(capfd: pytest.CaptureFixture[str]):
    assert main(["ptx", "run", "sh", "-c", "exit 5"]) == 5
    assert main(["ptx", "run", "--", "sh", "-c", "kill -9 $$"]) == 137
    assert "no kernel was launched" in capfd.readouterr().err
    assert run_program(["sh", "-c", "exit 0"]).launches == ()
    assert "LD_AUDIT" not in os.environ
