"""ptxas behind `assemble`: resources, refusals with the line, what it changed silently, and the cache."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinygrad_nv.errors import PTXError, ToolchainError
from tinygrad_nv.ptx import assemble as module
from tinygrad_nv.ptx.assemble import ARCHITECTURES, assemble, find_program, sass

needs_ptxas = pytest.mark.skipif(find_program("ptxas") is None, reason="ptxas is not installed")
HEAD = ".version 8.7\n.target {}\n.address_size 64\n"
KERNEL = """.visible .entry scale(.param .u64 p, .param .f32 s)
.reqntid 128
{
  .reg .b32 %r<3>; .reg .b64 %rd<4>; .reg .f32 %f<3>;
  .shared .align 16 .b8 tile[512];
  ld.param.u64 %rd1, [p];
  ld.param.f32 %f1, [s];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.f32 %f2, [%rd3];
  mul.f32 %f2, %f2, %f1;
  st.shared.f32 [tile], %f2;
  st.global.f32 [%rd3], %f2;
  ret;
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@needs_ptxas
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_resources_of_a_kernel(arch: str):
    made = assemble(HEAD.format(arch) + KERNEL, arch)
    assert made.cubin.startswith(b"\x7fELF")
    kernel = made.kernels["scale"]
    assert 4 <= kernel.registers <= 32
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0)
    assert kernel.shared_bytes == 512
    assert made.notes == ()


@needs_ptxas
def test_spills_are_seen():
    """64 values alive at once under a limit of 24 registers."""
    loads = "\n".join(f"ld.global.f32 %f{i}, [%rd1+{4 * i}];" for i in range(64))
    stores = "\n".join(f"st.global.f32 [%rd1+{4 * i}], %f{63 - i};" for i in range(64))
    head = ".reg .b64 %rd<2>; .reg .f32 %f<64>; ld.param.u64 %rd1, [p];"
    body = f"{head}\n{loads}\nbar.sync 0;\n{stores}\nret;"
    text = f"{HEAD.format('sm_80')}.visible .entry k(.param .u64 p)\n.maxnreg 24\n{{\n{body}\n}}\n"
    kernel = assemble(text, "sm_80").kernels["k"]
    assert kernel.spill_store_bytes > 0
    assert kernel.spill_load_bytes > 0


@needs_ptxas
def test_a_refusal_names_the_line():
    text = HEAD.format("sm_80") + KERNEL.replace("mul.f32 %f2", "mull.f32 %f2")
    with pytest.raises(PTXError, match="ptxas refuses the kernel for sm_80") as caught:
        assemble(text, "sm_80")
    assert caught.value.line == text.splitlines().index("  mull.f32 %f2, %f2, %f1;") + 1
    assert "mull.f32 %f2, %f2, %f1;" in str(caught.value)


@needs_ptxas
def test_setmaxnreg_that_ptxas_ignores_is_an_error_and_its_cure_is_not():
    body = "{ setmaxnreg.dec.sync.aligned.u32 24; ret; }"
    ignored = f"{HEAD.format('sm_90a')}.visible .entry k()\n.maxntid 256\n{body}\n"
    with pytest.raises(PTXError, match="C7508"): assemble(ignored)
    with pytest.raises(PTXError, match="C7508"): assemble(ignored)  # from the cache as well
    assemble(ignored.replace(".maxntid 256", ".maxntid 256\n.minnctapersm 1"))


@needs_ptxas
def test_a_second_time_comes_from_the_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    first = assemble(HEAD.format("sm_80") + KERNEL, "sm_80")
    files = list((own_cache / "tinygrad_nv" / "cubin").iterdir())
    assert len(files) == 1
    monkeypatch.setattr(module.subprocess, "run", None)
    assert assemble(HEAD.format("sm_80") + KERNEL, "sm_80") == first


def test_an_unknown_architecture_is_refused():
    with pytest.raises(PTXError, match="unknown architecture 'sm_70'"): assemble("", "sm_70")


def test_without_ptxas_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_program", lambda name: None)
    with pytest.raises(ToolchainError, match="nvidia-cuda-nvcc") as caught:
        assemble(HEAD.format("sm_80") + KERNEL)
    assert "pip install 'tinygrad-nv[emulator]'" in str(caught.value)


def test_programs_are_found_in_path_then_under_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    places = [tmp_path / "path", tmp_path / "home" / "bin"]
    for place in places:
        place.mkdir(parents=True)
        (place / "ptxas").write_text("#!/bin/sh\n")
        (place / "ptxas").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(places[0]), "/nowhere"]))
    assert find_program("ptxas") == places[0] / "ptxas"
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_program("ptxas") == places[1] / "ptxas"


@needs_ptxas
@pytest.mark.skipif(not (find_program("nvdisasm") or find_program("cuobjdump")), reason="no disassembler")
def test_sass_counts_instructions():
    counted = sass(assemble(HEAD.format("sm_80") + KERNEL, "sm_80"))
    assert counted is not None
    assert (counted["FMUL"], counted["LDG"], counted["STG"], counted["STS"]) == (1, 1, 1, 1)
