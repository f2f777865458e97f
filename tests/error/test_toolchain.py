"""What a user reads where the CPU device has no compiler, one that does not work, or lacks an instruction
set."""
from __future__ import annotations

import os
import stat

import pytest
from tinygrad.helpers import Target

from tinygrad_nv import Tensor, toolchain
from tinygrad_nv.cpu import isa
from tinygrad_nv.errors import ConfigError, ToolchainError
from tinygrad_nv.runtime.cpu.clang import ClangRenderer


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without any compiler."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(toolchain, "zig_binary", lambda: None)
    return tmp_path


def compiled(source="int x;"):
    with pytest.raises(ToolchainError) as caught:
        ClangRenderer(Target("CPU", "CLANG", arch="x86_64,native")).compiler.compile(source)
    return str(caught.value).splitlines()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


WAYS_OUT = [
    "  expected: a clang in PATH, or the ziglang wheel",
    "  to fix:   pip install 'tinygrad-nv[cpu]', which brings that wheel, or install clang with the system's "
    "package manager"]


def test_no_compiler_names_both_ways_out(bare):
    assert compiled() == ["no C compiler for the CPU device", *WAYS_OUT]


@pytest.mark.parametrize("name", ["gcc", "cc"])
def test_gcc_alone_is_named_with_what_it_lacks(bare, name):
    script(bare / name, 'echo "gcc (Some) 13.2"')
    assert compiled() == [
        f"no C compiler for the CPU device: {bare / name} does not serve, since it is no clang: kernels need "
        "clang's vectors (ext_vector_type, __builtin_elementwise_fma, .lo and .hi)", *WAYS_OUT]


def test_CC_that_is_not_there(bare, monkeypatch):
    monkeypatch.setenv("CC", "clang-99")
    assert compiled() == [
        "CC=clang-99: no such executable",
        "  expected: a clang, by path or by a name in PATH",
        "  to fix:   correct CC, or unset it to let tinygrad_nv look for clang and the ziglang wheel"]


def test_a_compiler_that_refuses_says_why_and_who_it_is(bare, monkeypatch):
    who, why = "gcc (Some) 13.2", "error: unknown attribute ext_vector_type"
    text = f'[ "$1" = --version ] && echo "{who}" && exit 0; echo "{why}" >&2; exit 1'
    monkeypatch.setenv("CC", script(bare / "gcc", text))
    assert compiled() == [
        "gcc (Some) 13.2 (from CC) did not compile a kernel:",
        "error: unknown attribute ext_vector_type",
        "  expected: clang or a compiler that takes its flags and extensions (gcc lacks ext_vector_type)",
        "  to fix:   unset CC, or point it at a clang"]


def test_an_error_of_zigs_names_no_temporary_file():
    zig = toolchain.zig_binary()
    if zig is None: pytest.skip("the ziglang wheel is not installed")
    compiler = toolchain.CCompiler((str(zig), "cc"), "ziglang", "")
    with pytest.raises(ToolchainError, match=r"\n<stdin>:1:1: error: unknown type name 'nonsense'"):
        toolchain.compile_object(compiler, ["-c", "-x", "c", "-", "-o", "-"], "nonsense x;")


def test_a_compiler_that_a_signal_ends_is_run_again(bare, monkeypatch):
    ended = f"[ $1 = --version ] || {{ echo x >> {bare}/runs; kill -9 $$; }}"
    monkeypatch.setenv("CC", script(bare / "cc", ended))
    words = compiled()
    assert words[0].endswith("/cc was ended by signal 9 in the midst of a kernel")
    assert "memory for the compiler" in words[1]
    assert (bare / "runs").read_text() == "x\nx\n"


def test_a_compiler_is_not_ended_by_the_ctrl_c_of_its_terminal(bare, monkeypatch):
    """It is in a process group of its own."""
    monkeypatch.setenv("CC", script(bare / "cc", f"read a b c d group rest < /proc/$$/stat; "
                       f"[ $1 = --version ] || echo $group > {bare}/group"))
    compiled()
    assert int((bare / "group").read_text()) != os.getpgid(0)


def test_a_compiler_that_writes_no_object(bare, monkeypatch):
    monkeypatch.setenv("CC", script(bare / "cc", "echo hello"))
    assert compiled()[0] == "hello (from CC) did not compile a kernel:"


def test_a_compiler_that_cannot_be_started(bare, monkeypatch):
    monkeypatch.setenv("CC", script(bare / "cc", ""))
    renderer = ClangRenderer(Target("CPU", "CLANG", arch="x86_64,native"))
    assert renderer.compiler.found.origin == "CC"
    (bare / "cc").unlink()
    with pytest.raises(ToolchainError, match="cc could not be started: "): renderer.compiler.compile("int x;")


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX."""
    monkeypatch.setattr(isa, "flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    isa.best.cache_clear()
    yield
    isa.best.cache_clear()


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("asked", ["avx2", "avx512", "amx"])
def test_a_level_the_processor_lacks(monkeypatch: pytest.MonkeyPatch, asked: str):
    x, w = (Tensor.ones(rows, 64, device="CPU").contiguous().realize() for rows in (1, 32))
    monkeypatch.setenv("NV_CPU_ISA", asked)
    with pytest.raises(ConfigError, match=f"NV_CPU_ISA={asked}: the processor lacks ") as caught:
        (x @ w.T).realize()
    assert str(caught.value).splitlines()[1:] == ["  expected: one of portable",
                                                  "  to fix:   unset NV_CPU_ISA for the best of them"]


@pytest.mark.usefixtures("old")
def test_the_command_line_says_so(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_ISA", "amx")
    command("explain", "--gemm", "4x64x64", "--arch", "cpu").refused(
        "NV_CPU_ISA=amx: the processor lacks avx512f", "expected: one of portable",
        "to fix:   unset NV_CPU_ISA for the best of them")


def test_a_level_there_is_not(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_ISA", "sse2")
    command("explain", "--gemm", "4x64x64", "--arch", "cpu").refused(
        "NV_CPU_ISA=sse2", "one of auto, portable, avx2, avx512, amx",
        "unset NV_CPU_ISA for its default, auto")
