"""Programs that call the driver's API: modules, launches, copies; and functions found by their names."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled
from tinygrad_nv.host import run_program

QUOTED = "\n".join(f'"{line}\\n"' for line in SCALE.splitlines())
TEXT = f"static const char text[] = {QUOTED};"
START = """
    void *module, *function, *context; unsigned long a, b; int device, count = 32;
    float x[32], y[64]; for (int i = 0; i < 32; i++) x[i] = i;
    #define DO(call) do { const char *name_; cuGetErrorName(call, &name_); printf("%s ", name_); } while (0)
    DO(cuInit(0)); DO(cuDeviceGet(&device, 0)); DO(cuDevicePrimaryCtxRetain(&context, device));
    DO(cuCtxSetCurrent(context));
    DO(cuModuleLoadData(&module, text)); DO(cuModuleGetFunction(&function, module, "scaled"));
    DO(cuMemAlloc_v2(&a, 128ul)); DO(cuMemAlloc_v2(&b, 256ul));
    DO(cuMemcpyHtoD_v2(a, x, 128ul)); DO(cuMemsetD32_v2(b, 0x3f800000, 64ul));
"""


def printed(folder: Path, body: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What the program prints after its start."""
    result = run_program([str(compiled(folder, START + body, before=TEXT))], check=True)
    out, begun = capfd.readouterr().out, "CUDA_SUCCESS " * 10
    assert (result.status, result.refused, result.order) == (0, (), ()), (out, result)
    assert out.startswith(begun)
    return out.removeprefix(begun)


def test_a_module_of_ptx_text_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """With an array of parameters, and with a block of them; a variable of the module is found."""
    assert printed(tmp_path, """
        unsigned long counter, nbytes; int ran, smem;
        struct { unsigned long a, b; int count; } block = {a, b, 16};
        unsigned long size = 20;
        void *packed[] = {(void *)1, &block, (void *)2, &size, 0};
        DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0ul, (void *[]){&a, &b, &count}, 0ul));
        DO(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0ul, 0ul, packed));
        DO(cuCtxSynchronize()); DO(cuMemcpyDtoH_v2(y, b, 256ul));
        DO(cuModuleGetGlobal_v2(&counter, &nbytes, module, "counter"));
        DO(cuMemcpyDtoH_v2(&ran, counter, 4ul));
        DO(cuFuncGetAttribute(&smem, 8, function));
        printf("%g %g %d %lu %d", y[31], y[32], ran, nbytes, smem);""", capfd) \
        == "CUDA_SUCCESS " * 7 + "93 1 48 4 49152"


def test_copies_of_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        struct { size_t x,
                y; unsigned kind; const void *host; unsigned long device; void *array; size_t pitch;
                 size_t to_x, to_y; unsigned to; void *to_host; unsigned long to_device; void *to_array;
                 size_t to_pitch, width, height; } rows = {
            4, 1, 2, 0, a, 0, 32, 0, 0, 1, y, 0, 0, 16, 8, 2};
        DO(cuMemcpy2D_v2(&rows));
        printf("%g %g %g", y[0], y[1], y[4]);""", capfd) == "CUDA_SUCCESS 9 10 17"


@pytest.mark.parametrize(("name", "error"), [("missing", "CUDA_ERROR_NOT_FOUND"), ("scaled", "CUDA_SUCCESS")])
def test_a_kernel_by_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, error: str):
    assert printed(tmp_path, f'DO(cuModuleGetFunction(&function, module, "{name}"));', capfd) == f"{error} "


def test_functions_are_found_by_their_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        int (*alloc)(unsigned long *, size_t), (*none)(void) = (void *)1, status;
        DO(cuGetProcAddress_v2("cuMemAlloc", &alloc, 12000, 0ul, &status)); printf("%d ", status);
        DO(alloc(&a, 16));
        DO(cuGetProcAddress_v2("cuNothing", &none, 12000, 0ul, &status)); printf("%d %d ", status, none == 0);
        printf("%s", cudaGetErrorName(cudaGetDriverEntryPoint("cuMemFree", &none, 0ul, 0ul)));""", capfd) \
        == "CUDA_SUCCESS 0 CUDA_SUCCESS CUDA_ERROR_NOT_FOUND 1 1 cudaSuccess"


def test_text_that_is_no_ptx_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, 'DO(cuModuleLoadData(&module, ".version 8.0\\n.target sm_90\\n.entry k( {"));',
                   capfd) \
        == "CUDA_ERROR_INVALID_PTX "
