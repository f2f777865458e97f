"""FlashAttention-3 as a contender of bench/gpu/run.py: how it is built, what its kernel is given, and what is
said where it cannot be."""
from __future__ import annotations

import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import compare as gpu_compare
from bench.gpu import fa3
from bench.gpu.attention import Forward
from bench.gpu.parts import NotMeasured
from tinygrad_nv.toolchain import find_compiler

# writes its arguments, in order, into `out`
ATTEND = """
int attend(void *out, void *q, void *k, void *v, void *lse, void *semaphore, int b, int h, int hk, int tokens,
           int causal, float scale, int sms, void *stream)
{
    typedef unsigned short u16;
    double all[] = {*(u16 *)q, *(u16 *)k, *(u16 *)v, b, h, hk, tokens, causal, scale, sms,
                    (unsigned long long)stream};
    for (int i = 0; i < 11; i++) ((double *)out)[i] = all[i];
    return lse && semaphore ? 0 : 1;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What the build looks for: of FlashAttention, and of CUTLASS in its place beside it."""
    hopper = tmp_path / "hopper"
    for name in ("flash.h", "flash_fwd_launch_template.h", "../csrc/cutlass/include/cutlass/cutlass.h"):
        path = (hopper / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return hopper


def nvcc(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An nvcc that notes how it was called."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/log\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    return folder / "log"


TO_OUT = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


def test_a_library_is_built_once(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    log = nvcc(tmp_path, monkeypatch, TO_OUT)
    out = tmp_path / "cache"
    for _ in range(2): assert fa3.build(sources, None, 128, out) == out / "fa3_128.so"
    line, = log.read_text().splitlines()
    for words in ("-DHEAD_DIM=128", "arch=compute_90a,code=[sm_90a,compute_90a]", f"-I{sources}",
                  "csrc/cutlass/include", str(fa3.WRAPPER), "-DFLASHATTENTION_DISABLE_VARLEN"):
        assert words in line
    assert fa3.build(out, None, 128) == out / "fa3_128.so", "a folder of libraries"
    os.utime(sources / "flash.h", (2**33, 2**33))
    fa3.build(sources, None, 128, out)
    assert len(log.read_text().splitlines()) == 2, "sources that are newer"


def test_what_is_missing_is_said(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(NotMeasured, match=r"has neither fa3_64\.so nor FlashAttention-3's sources"):
        fa3.build(tmp_path, None, 64)
    nvcc(tmp_path, monkeypatch, 'echo "x.h(3): error: no such type" >&2; exit 1')
    with pytest.raises(NotMeasured, match=r"does not build FlashAttention-3: x\.h\(3\): error: no such type"):
        fa3.build(sources, None, 64, tmp_path / "cache")
    with pytest.raises(NotMeasured, match=r"no cutlass/cutlass\.h in"):
        fa3.build(sources, tmp_path / "elsewhere", 64, tmp_path / "cache")
    monkeypatch.setattr(fa3.shutil, "which", lambda *given, **named: None)
    with pytest.raises(NotMeasured, match="needs nvcc"): fa3.build(sources, None, 64, tmp_path / "cache")
    with pytest.raises(NotMeasured, match="flash_attn_interface is not installed"):
        fa3.contender(Forward(1, 1, 64, 64, True), [], Namespace(fa3=None))


def test_the_command(tmp_path: Path):
    done = subprocess.run([sys.executable, fa3.__file__, str(tmp_path)], capture_output=True, text=True,
                          check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has neither fa3_64.so nor" in done.stderr


def test_what_the_kernel_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = find_compiler()
    (tmp_path / "attend.c").write_text(ATTEND)
    subprocess.run([*compiler.command, "-shared", "-fPIC", "-O1", str(tmp_path / "attend.c"), "-o",
                    str(tmp_path / "fa3_64.so")], check=True, env=compiler.environment())
    empty, zeros = torch.empty, torch.zeros
    for name, value in {"get_device_capability": lambda: (9, 0),
                        "get_device_properties": lambda i: SimpleNamespace(multi_processor_count=132),
                        "current_stream": lambda: SimpleNamespace(cuda_stream=0x77)}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", lambda *given, device=None, **named: empty(*given, **named))
    monkeypatch.setattr(torch, "zeros", lambda *given, device=None, **named: zeros(*given, **named))
    workload = Forward(2, 4, 16, 64, True, 2)
    given = [{name: torch.full((2, 4, 16, 64), i + j, dtype=torch.bfloat16) for i, name in
              enumerate(("q", "k", "v", "out"))} for j in range(2)]
    run = fa3.contender(workload, given, Namespace(fa3=tmp_path, cutlass=None))
    words = [int(given[1][name].view(-1).view(torch.int16)[0]) for name in "qkv"]
    run(1)
    found = given[1]["out"].view(-1).view(torch.float64)[:11].tolist()
    assert found == [*words, 2, 4, 2, 16, 1, pytest.approx(1 / math.sqrt(64)), 132, 0x77]
    assert (given[0]["out"] == 3).all()


@pytest.mark.parametrize("pair", [True, False], ids=["with lse", "alone"])
def test_the_package_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, pair: bool):
    made: Any = ModuleType("flash_attn_interface")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2).double() for each in (q, k, v)), is_causal=causal, enable_gqa=True)
        return (out.transpose(1, 2).bfloat16(), None) if pair else out.transpose(1, 2).bfloat16()

    made.flash_attn_func = attend
    monkeypatch.setitem(sys.modules, "flash_attn_interface", made)
    monkeypatch.setattr(fa3, "find_spec", lambda name: object())
    workload = Forward(2, 4, 24, 64, True, 2)
    given = workload.make_inputs("cpu")
    run = fa3.contender(workload, given, Namespace(fa3=None))
    assert gpu_compare.wrong(workload, given, run) == ""
