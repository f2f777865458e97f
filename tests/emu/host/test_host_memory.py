"""Memory of programs: page-locked, managed, pitched, of variables; programs that call the driver's API, have
threads, or start others."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled
from tinygrad_nv.host import run_program
from tinygrad_nv.host.gpus import gpu_named, properties
from tinygrad_nv.ptx.timing.gpu import figures, list_gpus

RUN = "void *a, *b; int count = 32; float x[64], y[64]; for (int i = 0; i < 64; i++) x[i] = i;"


def printed(folder: Path, body: str, capfd: pytest.CaptureFixture[str], **options: bool) -> str:
    """What a program prints that ends well."""
    result = run_program([str(compiled(folder, RUN + body))], **options)
    out = capfd.readouterr().out
    assert (result.status, result.refused) == (0, ()), (out, result)
    return out


def test_the_host_reads_and_writes_page_locked_and_managed_memory(tmp_path: Path,
                                                                  capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        float *in, *out;
        TRY(cudaMallocHost(&in, 128)); TRY(cudaMallocManaged(&out, 128, 1));
        for (int i = 0; i < 32; i++) in[i] = 2 * i;
        TRY(RUN(scaled, 1, 32, &in, &out, &count));
        TRY(cudaDeviceSynchronize());
        printf("%g ", out[31]);
        TRY(cudaFreeHost(in)); TRY(cudaFree(out));""", capfd, check=True) \
        == "cudaSuccess " * 4 + "155 " + "cudaSuccess " * 2


def test_the_host_does_not_reach_device_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, RUN + "cudaMalloc(&a, 128); printf(\"%g\", *(float *)a);")
    assert run_program([str(program)]).status == -11        # SIGSEGV


def test_copies_of_rows_and_boxes(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        size_t pitch; int row = 8;
        struct { void *pointer; size_t pitch, width, height; } box;
        struct { size_t width, height, depth; } extent = {16, 2, 2};
        struct { void *array; size_t at[3]; void *pointer; size_t pitch, width, height; void *to;
                 size_t to_at[3]; void *target; size_t to_pitch, to_width, to_height,
                 extent[3]; int kind; } copy = {
            0, {0, 0, 0}, x, 32, 32, 4};
        TRY(cudaMallocPitch(&a, &pitch, 32ul, 4ul));
        TRY(cudaMemset2D(a, pitch, 0, 32ul, 4ul));
        TRY(cudaMemcpy2D(a + 4, pitch, x, 32ul, 28ul, 4ul, HtoD));
        TRY(cudaMemcpy2D(y, 32ul, a, pitch, 32ul, 4ul, DtoH));
        printf("%lu %g %g %g ", pitch, y[0], y[1], y[31]);
        TRY(cudaMalloc3D(&box, extent));
        copy.target = box.pointer; copy.to_pitch = box.pitch; copy.to_width = 16; copy.to_height = 2;
        memcpy(copy.extent, &extent, sizeof extent); copy.kind = HtoD;
        TRY(cudaMemcpy3D(&copy));
        TRY(cudaMemcpy(y, (char *)box.pointer + 3 * box.pitch, 16, DtoH));
        printf("%g %g", y[0], y[3]);""", capfd) \
        == "cudaSuccess " * 4 + "512 0 0 30 " + "cudaSuccess " * 3 + "40 43"


def test_what_is_at_an_address(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        struct { int kind, device; void *of_device, *of_host; long rest[8]; } found;
        void *all[4] = {x};
        cudaMalloc(&all[1], 8); cudaMallocHost(&all[2], 8); cudaMallocManaged(&all[3], 8, 1);
        for (int i = 0; i < 4; i++) {
            TRY(cudaPointerGetAttributes(&found, all[i]));
            printf("%d %d %d ", found.kind, found.of_device == all[i], found.of_host == all[i]);
        }""", capfd) == "cudaSuccess 0 0 1 cudaSuccess 2 1 0 cudaSuccess 1 1 1 cudaSuccess 3 1 1 "


def test_memory_that_is_freed_is_no_longer_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert printed(tmp_path, """
        size_t before, after, total;
        cudaMemGetInfo(&before, &total);
        TRY(cudaMalloc(&a, 1ul << 30)); cudaMemGetInfo(&after, &total);
        TRY(cudaFree(a)); TRY(cudaFree(a));
        TRY(cudaMemcpy(x, a, 4, DtoH));
        TRY(cudaMalloc(&b, total)); TRY(cudaMalloc(&a, 16));
        printf("%lu %lu", (before - after) >> 20, total >> 30);""", capfd) == (
            "cudaSuccess cudaSuccess cudaErrorInvalidValue cudaErrorInvalidValue cudaSuccess "
            "cudaErrorMemoryAllocation 1024 80")


WRITTEN = ("", "cudaMemset(a, 0, 64);", "cudaMemset(a, 0, 128);", "cudaMemcpy(a, b, 128, DtoD);",
           "cudaMemcpy(a, x, 128, HtoD);")


def test_bytes_that_nothing_wrote_are_found(tmp_path: Path):
    cases = "".join(f"if (atoi(argv[1]) == {number}) {{ {each} }}" for number, each in enumerate(WRITTEN))
    program = compiled(tmp_path, f"""{RUN}
        cudaMalloc(&a, 128); cudaMalloc(&b, 128);
        {cases}
        RUN(scaled, 1, 32, &a, &b, &count);""")
    for check in (True, False):
        launches = [run_program([str(program), str(number)], check=check).launches[0] for number in range(5)]
        kinds = [{finding.kind for finding in launch.findings} for launch in launches]
        found: set[str] = {"uninitialized"} if check else set()
        assert kinds == [found, found, set(), found, set()]


@pytest.mark.parametrize(("after", "told"), [
    ("", "nan"), ("cudaStreamSynchronize(stream);", "93"), ("cudaDeviceSynchronize();", "93"),
    ("cudaEventRecord(event, stream); cudaEventSynchronize(event);", "93")])
def test_what_a_copy_brings_is_there_when_it_was_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                            after: str, told: str):
    program = compiled(tmp_path, RUN + """
        void *stream, *event; float *pinned;
        cudaStreamCreateWithFlags(&stream, 1); cudaEventCreate(&event);
        cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaMallocHost(&pinned, 128);
        cudaMemcpy(a, x, 128, HtoD);
        cudaLaunchKernel(&scaled, (dim3){1, 1, 1}, (dim3){32, 1, 1}, (void *[]){&a, &b, &count}, 0, stream);
        cudaMemcpyAsync(pinned, b, 128ul, DtoH, stream);""" + after + 'printf("%g", pinned[31]);')
    assert run_program([str(program)], check=True).order == ()
    assert capfd.readouterr().out.replace("-nan", "nan") == told


@pytest.mark.parametrize("waits", [True, False])
def test_page_locked_memory_is_not_written_while_a_copy_reads_it(tmp_path: Path, waits: bool):
    program = compiled(tmp_path, RUN + """
        void *stream; float *pinned;
        cudaStreamCreate(&stream); cudaMalloc(&a, 128); cudaMallocHost(&pinned, 128);
        cudaMemcpyAsync(a, pinned, 128ul, HtoD, stream);
        %s
        pinned[2] = 7; cudaDeviceSynchronize();""" % ("cudaStreamSynchronize(stream);" if waits else ""))
    order = run_program([str(program)], check=True).order
    assert bool(order) is not waits
    assert not order or "byte 10 of page-locked memory was written while a copy of 128 bytes" in order[0]


@pytest.mark.parametrize("begun", ["__cudaInitModule(handle);", "RUN(scaled, 0, 32, &a, &b, &count);"])
def test_managed_variables_are_the_hosts_too(tmp_path: Path, capfd: pytest.CaptureFixture[str], begun: str):
    ptx = SCALE.replace(".visible .const .align 4 .f32 scale",
                        ".visible .global .attribute(.managed) .align 4 .f32 scale").replace("ld.const",
                                                                                             "ld.global")
    program = compiled(tmp_path, RUN + """
        cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaMemcpy(a, x, 128, HtoD);
        __cudaRegisterManagedVar(handle, &scale, "scale", "scale", 0, 4ul, 0, 0);
        """ + begun + """
        printf("%g ", *scale); *scale = 3;
        RUN(scaled, 1, 32, &a, &b, &count);
        cudaMemcpy(y, b, 128, DtoH);
        printf("%g", y[31]);""", ptx, before="static float *scale;", variables=())
    assert run_program([str(program)], check=True).refused == ()
    assert capfd.readouterr().out == "2 124"


# where nvcc says that fields of cudaDeviceProp are, by CUDA's version
PLACES = {12: (1032, {"memory": 288, 13: 348, 75: 360, 16: 388, 38: 616, 81: 640, 97: 696, 106: 712, 111: 720,
                      120: 772}),
          13: (1008, {"memory": 288, 75: 360, 16: 384, 38: 596, 81: 624, 97: 672, 106: 688, 111: 696,
                      120: 748})}


@pytest.mark.parametrize("version", PLACES)
def test_properties_lie_where_cuda_has_them(version: int):
    gpu, (size, places) = gpu_named("h100"), PLACES[version]
    found, wanted = properties(gpu, version), {"memory": 80 << 30, **gpu.attributes()}
    assert len(found) == size
    assert found.startswith(b"NVIDIA H100 SXM (emulated)\0")
    for what, at in places.items():
        nbytes = 8 if what == "memory" else 4
        assert int.from_bytes(found[at:at + nbytes], "little") == wanted[what] > 0, what


@pytest.mark.parametrize("gpu", list_gpus())
def test_every_gpu_with_figures_runs_programs(tmp_path: Path, capfd: pytest.CaptureFixture[str], gpu: str):
    program = compiled(tmp_path, RUN + """
        int sms, major;
        cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaMemset(a, 0, 128);
        RUN(scaled, 1, 32, &a, &b, &count); cudaMemcpy(y, b, 128, DtoH);
        cudaDeviceGetAttribute(&sms, 16, 0); cudaDeviceGetAttribute(&major, 75, 0);
        printf("%g %d %d", y[31], sms, major);""", SCALE.replace("sm_90", "sm_80"))
    assert run_program([str(program)], gpu).status == 0
    assert capfd.readouterr().out == f"31 {figures(gpu).sms} {figures(gpu).arch[3]}"


# **** the driver's API ****

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


def called(folder: Path, body: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What the program prints after its start."""
    result = run_program([str(compiled(folder, START + body, before=TEXT))], check=True)
    out, begun = capfd.readouterr().out, "CUDA_SUCCESS " * 10
    assert (result.status, result.refused, result.order) == (0, (), ()), (out, result)
    assert out.startswith(begun)
    return out.removeprefix(begun)


def test_a_module_of_ptx_text_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """With an array of parameters, and with a block of them; a variable of the module is found."""
    assert called(tmp_path, """
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
    assert called(tmp_path, """
        struct { size_t x,
                y; unsigned kind; const void *host; unsigned long device; void *array; size_t pitch;
                 size_t to_x, to_y; unsigned to; void *to_host; unsigned long to_device; void *to_array;
                 size_t to_pitch, width, height; } rows = {
            4, 1, 2, 0, a, 0, 32, 0, 0, 1, y, 0, 0, 16, 8, 2};
        DO(cuMemcpy2D_v2(&rows));
        printf("%g %g %g", y[0], y[1], y[4]);""", capfd) == "CUDA_SUCCESS 9 10 17"


@pytest.mark.parametrize(("name", "error"), [("missing", "CUDA_ERROR_NOT_FOUND"), ("scaled", "CUDA_SUCCESS")])
def test_a_kernel_by_its_name(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, error: str):
    assert called(tmp_path, f'DO(cuModuleGetFunction(&function, module, "{name}"));', capfd) == f"{error} "


def test_functions_are_found_by_their_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert called(tmp_path, """
        int (*alloc)(unsigned long *, size_t), (*none)(void) = (void *)1, status;
        DO(cuGetProcAddress_v2("cuMemAlloc", &alloc, 12000, 0ul, &status)); printf("%d ", status);
        DO(alloc(&a, 16));
        DO(cuGetProcAddress_v2("cuNothing", &none, 12000, 0ul, &status)); printf("%d %d ", status, none == 0);
        printf("%s", cudaGetErrorName(cudaGetDriverEntryPoint("cuMemFree", &none, 0ul, 0ul)));""", capfd) \
        == "CUDA_SUCCESS 0 CUDA_SUCCESS CUDA_ERROR_NOT_FOUND 1 1 cudaSuccess"


def test_text_that_is_no_ptx_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert called(tmp_path, 'DO(cuModuleLoadData(&module, ".version 8.0\\n.target sm_90\\n.entry k( {"));',
                   capfd) \
        == "CUDA_ERROR_INVALID_PTX "


# **** threads and processes ****

INCLUDES = "#include <pthread.h>\n#include <unistd.h>\n#include <sys/wait.h>\n"
THREADS = INCLUDES + """
    static void *work(void *given) {
        float x[32], y[32]; int count = 32; void *a, *b, *stream;
        long number = (long)given;
        for (int i = 0; i < 32; i++) x[i] = number;
        cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaStreamCreateWithFlags(&stream, 1);
        for (int i = 0; i < 5; i++) {
            cudaMemcpyAsync(a, x, 128ul, HtoD, stream);
            void *arguments[] = {&a, &b, &count};
            cudaLaunchKernel(&scaled, (dim3){1, 1, 1}, (dim3){32, 1, 1}, arguments, 0, stream);
            cudaMemcpyAsync(y, b, 128ul, DtoH, stream);
            cudaStreamSynchronize(stream);
            if (y[3] != 2 * number + 3) return (void *)1;
        }
        cudaSetDevice(number);      // an error of one thread is not another's
        return (void *)(long)(cudaGetLastError() != (number ? 101 : 0));
    }
"""


def test_threads_call_beside_each_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, """
        pthread_t threads[4]; long wrong = 0;
        for (long i = 0; i < 4; i++) pthread_create(&threads[i], 0, work, (void *)i);
        for (int i = 0; i < 4; i++) { void *each; pthread_join(threads[i], &each); wrong += (long)each; }
        printf("%ld", wrong);""", before=THREADS)
    result = run_program([str(program)], check=True)
    assert capfd.readouterr().out == "0"
    assert len(result.launches) == 20
    assert result.order == ()


def test_a_child_process_has_a_gpu_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, """
        void *a; size_t before, after, total; int status;
        cudaMalloc(&a, 1ul << 20); cudaMemGetInfo(&before, &total);
        if (!fork()) { cudaMemGetInfo(&after, &total); _exit(after == total ? 9 : 1); }
        wait(&status);
        cudaMemGetInfo(&after, &total);
        printf("%d %d", status >> 8, before == after);""", before=INCLUDES)
    assert run_program([str(program)]).status == 0
    assert capfd.readouterr().out == "9 1"


def test_a_script_that_starts_a_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, "void *a; TRY(cudaMalloc(&a, 16)); return 3;")
    assert run_program(["sh", "-c", f"{program}; echo status $?"]).status == 0
    assert capfd.readouterr().out == "cudaSuccess status 3\n"
