"""Programs that call CUDA, on the emulated GPU: what they compute, what is said of their launches, and what
is in their fat binaries."""
from __future__ import annotations

import ctypes
import ctypes.util
import json
from pathlib import Path

import pytest

from tests.support.host.host_program import SCALE, compiled, fat_binary
from tinygrad_nv.cli import main
from tinygrad_nv.errors import PTXError
from tinygrad_nv.host import fatbin, modules
from tinygrad_nv.host.fatbin import LZ4, PTX, ZSTD, Entry, entries
from tinygrad_nv.host.modules import choose_ptx
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


def zstd(data: bytes) -> bytes:
    """As nvcc compresses it."""
    library = ctypes.CDLL(ctypes.util.find_library("zstd"))
    out = ctypes.create_string_buffer(len(data) + 1024)
    for name in ("ZSTD_compress", "ZSTD_compressBound"): getattr(library, name).restype = ctypes.c_size_t
    size = library.ZSTD_compress(out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(len(data)), 3)
    return out.raw[:size]


def lz4(data: bytes) -> bytes:
    """Sequences of bytes as they are, and a copy where the last eight come again."""
    out, plain, at = b"", b"", 0
    while at < len(data):
        found = data.rfind(data[at:at + 8], max(0, at - 65535), at) if at + 20 < len(data) else -1
        if found < 0:
            plain += data[at:at + 1]
            at += 1
            continue
        count = 8
        while at + count < len(data) - 12 and data[found + count] == data[at + count]: count += 1
        out += _sequence(plain, count) + (at - found).to_bytes(2, "little") + _more(count - 4)
        plain, at = b"", at + count
    return out + _sequence(plain, 4)


def _sequence(plain: bytes, count: int) -> bytes:
    return bytes([min(len(plain), 15) << 4 | min(count - 4, 15)]) + _more(len(plain)) + plain


def _more(length: int) -> bytes:
    if length < 15: return b""
    return b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])


@pytest.mark.parametrize(("flags", "packed"), [(0, None), (LZ4, lz4), (ZSTD, zstd)])
def test_an_entry_is_read(flags: int, packed):
    text = SCALE + "// " + "a" * 70000 + SCALE
    found, other = entries(fat_binary(text, SCALE, flags=flags, packed=packed))
    assert (found, other) == (Entry(PTX, 90, text), Entry(PTX, 90, SCALE))


def test_of_several_texts_the_newest_that_the_gpu_runs_is_chosen():
    texts = {target: SCALE.replace("sm_90", target) for target in ("sm_80", "sm_90", "sm_90a", "sm_100a")}
    every = fat_binary(*texts.values())
    assert choose_ptx(every, "sm_90a") == texts["sm_90a"]
    assert choose_ptx(every, "sm_89") == texts["sm_80"]
    assert choose_ptx(SCALE.encode() + b"\0", "sm_90a") == SCALE


@pytest.mark.parametrize(("version", "ptxas", "lowered"), [
    ("9.5", (13, 0), "9.0"), ("8.0", (13, 0), "8.0"), ("9.1", (12, 8), "8.7"), ("9.5", None, "9.5")])
def test_a_version_that_ptxas_does_not_know_is_lowered(version: str, ptxas: tuple[int, int] | None,
                                                       lowered: str,
                                                       monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modules, "release", lambda: ptxas)
    made = SCALE.replace(".version 8.0", f".version {version}")
    assert modules.lower_version(made) == SCALE.replace(".version 8.0", f".version {lowered}")


@pytest.mark.parametrize("packed", [b"\x10a\xff\xff", b"\xf0" + b"\xff" * 9])
def test_what_is_not_lz4_is_refused(packed: bytes):
    with pytest.raises(PTXError, match="not LZ4"): fatbin.lz4(packed, 100)
