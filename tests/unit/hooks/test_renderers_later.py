"""Renderers of tinygrad's CPU device that few programs use are loaded when they are asked for."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, tinygrad_nv
from tinygrad import Device, Tensor
renderer = type(Device["CPU"].renderer)
seldom = [name for name in ("tinygrad.renderer.nir", "tinygrad.renderer.isa.x86") if name in sys.modules]
print((Tensor([1, 2, 3]) * 2).tolist(), renderer.__module__, renderer.__name__, seldom)
"""


@pytest.mark.parametrize(("device", "wanted"), [
    ("CPU", "[2, 4, 6] tinygrad_nv.runtime.cpu.clang ClangRenderer []"),
    pytest.param("CPU:X86", "[2, 4, 6] tinygrad.renderer.isa.x86 X86Renderer ['tinygrad.renderer.isa.x86']",
                 marks=pytest.mark.skipif(os.uname().machine != "x86_64", reason="it renders for x86-64"))])
def test_a_renderer_is_loaded_where_it_is_asked_for(device: str, wanted: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "DEV": device}, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == wanted
