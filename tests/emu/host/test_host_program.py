"""Programs that call CUDA, on the emulated GPU: what they compute, and what is said of their launches."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled
from tinygrad_nv.cli import main
from tinygrad_nv.host.server import run_program

# what `ptx run` has to redirect in a program that NVIDIA's runtime is linked into
STATIC = ("cudaMalloc cudaMemcpy cudaLaunchKernel cudaGetErrorName cudaMemcpyFromSymbol cudaMemcpyToSymbol "
          "cudaDeviceSynchronize __cudaRegisterFatBinary __cudaRegisterFunction __cudaRegisterVar")
SCALED = """
    float x[300], y[300], three = 3; int count = 300, ran;
    void *a, *b;
    for (int i = 0; i < 300; i++) x[i] = i;
    TRY(cudaMalloc(&a, sizeof x)); TRY(cudaMalloc(&b, sizeof y));
    TRY(cudaMemcpy(a, x, sizeof x, HtoD));
    TRY(RUN(scaled, 3, 128, &a, &b, &count));
    TRY(cudaMemcpyToSymbol(&scale, &three, 4, 0, HtoD));
    TRY(RUN(scaled, 1, 128, &a, &b, &count));
    TRY(cudaMemcpy(y, b, sizeof y, DtoH));
    TRY(cudaMemcpyFromSymbol(&ran, &counter, 4, 0, DtoH));
    TRY(cudaDeviceSynchronize());
    printf("%g %g %d", y[100], y[299], ran);
    return 7;
"""


@pytest.fixture(scope="module", params=["", STATIC], ids=["library", "linked-in"])
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program above, with the runtime in a library, and with one of its own."""
    return compiled(tmp_path_factory.mktemp("scaled"), SCALED, variables=("scale", "counter"),
                    own_runtime=request.param)


def test_a_program_runs(scaled: Path, capfd: pytest.CaptureFixture[str]):
    result = run_program([str(scaled)], check=True)
    assert capfd.readouterr().out == "cudaSuccess " * 9 + "400 897 428"
    assert (result.status, result.refused, result.notes) == (7, (), ())
    first, second = result.launches
    assert (first.kernel, first.grid, first.block) == ("scaled", (3, 1, 1), (128, 1, 1))
    assert first.findings == second.findings == ()
    assert first.stats.warp_instructions > second.stats.warp_instructions > 0


def test_the_command_prints_tables_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    # b has 64 of the 128 bytes that are written, and a was never written
    program = compiled(tmp_path, """
        void *a, *b; int count = 32;
        cudaMalloc(&a, 128); cudaMalloc(&b, 64);
        TRY(RUN(scaled, 1, 32, &a, &b, &count)); TRY(cudaDeviceSynchronize()); TRY(cudaGetLastError());
        TRY(cudaMalloc(&a, 4));""")
    assert main(["ptx", "run", "--check", "--ptx", str(tmp_path / "ptx"), str(program)]) == 1
    out, err = capfd.readouterr()
    assert "scaled" in err
    assert "uninitialized" in err
    assert "st.global.f32 [%rd2], %f1;" in err
    assert out == "cudaSuccess cudaErrorIllegalAddress cudaErrorIllegalAddress cudaErrorIllegalAddress "
    assert (tmp_path / "ptx" / "launch_0.ptx").read_text() == SCALE
    assert main(["ptx", "run", "--check", "--json", str(program)]) == 1
    told = json.loads(capfd.readouterr().out)
    assert told["status"] == 0
    launch, = told["launches"]
    assert {finding["kind"] for finding in launch["findings"]} == {"uninitialized", "out-of-bounds"}
    assert launch["counters"]["warp_instructions"] == 19


def test_findings_tell_the_line_of_the_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    lines = SCALE.splitlines()
    at = next(i for i, line in enumerate(lines) if "ld.global" in line)
    ptx = "\n".join([lines[0], *lines[1:3], '.file 1 "scale.cu"', *lines[3:at], ".loc 1 12 5", lines[at],
                     ".loc 1 13 5, function_name info, inlined_at 1 40 3", *lines[at + 1:]])
    program = compiled(tmp_path, "void *a, *b; int count = 64; cudaMalloc(&a, 128); cudaMalloc(&b, 128);"
                       "cudaMemset(a, 0, 128); RUN(scaled, 2, 32, &a, &b, &count);", ptx)
    assert main(["ptx", "run", str(program)]) == 1
    assert "at scale.cu:12\n" in (err := capfd.readouterr().err)
    assert "at scale.cu:13\n" in err
    main(["ptx", "run", "--json", str(program)])
    assert list(json.loads(capfd.readouterr().out)["launches"][0]["sources"].values()) == ["scale.cu:12",
                                                                                           "scale.cu:13"]


PRINTING = SCALE.replace(".visible .global",
                         """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.global .align 1 .b8 said[10] = {108, 97, 110, 101, 32, 37, 117, 59, 32};
.visible .global""", 1).replace("    mov.u64 %rd4", """    .local .align 8 .b8 args[8]; .reg .b64 %at<3>;
    { .param .b64 p0, p1; .param .b32 done;
    mov.u64 %at1, said; cvta.global.u64 %at1, %at1; st.param.b64 [p0], %at1;
    mov.u64 %at2, args; st.local.u32 [%at2], %r2; cvta.local.u64 %at2, %at2; st.param.b64 [p1], %at2;
    call.uni (done), vprintf, (p0, p1); }
    mov.u64 %rd4""", 1)


def test_what_kernels_print_comes_between_the_lines_of_the_program(tmp_path: Path,
                                                                   capfd: pytest.CaptureFixture[str]):
    program = compiled(tmp_path, """
        void *a, *b; int count = 2; cudaMalloc(&a, 128); cudaMalloc(&b, 128); cudaMemset(a, 0, 128);
        printf("before, "); RUN(scaled, 1, 32, &a, &b, &count); printf("after");""", PRINTING)
    launch, = run_program([str(program)], check=True).launches
    assert capfd.readouterr().out == "before, lane 0; lane 1; after"
    assert (launch.printed, launch.findings) == ("lane 0; lane 1; ", ())
