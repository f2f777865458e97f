"""The function that rounds bfloat16 where the processor cannot: linked, and right."""
from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np
import pytest
import torch
from tinygrad.runtime.support.elf import jit_loader

from tinygrad_nv.runtime.cpu.clang import ToolchainCompiler, with_own_calls
from tinygrad_nv.toolchain import compile_object, find_compiler

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="objects of x86-64")

SOURCE = """
void rounded(__bf16 *restrict to, const float *restrict from, int count) {
  for (int i = 0; i < count; i++) to[i] = (__bf16)from[i];
}
"""


@pytest.fixture
def compiler() -> ToolchainCompiler:
    """For processors without AVX512-BF16."""
    return ToolchainCompiler(["x86_64", "x86-64-v3"], find_compiler())


def test_tinygrad_links_none(compiler: ToolchainCompiler):
    blob = compile_object(compiler.found, compiler.arguments, SOURCE)
    with pytest.raises(RuntimeError, match="__truncsfbf2"): jit_loader(blob)


def test_numbers_are_rounded_as_torch_rounds_them(compiler: ToolchainCompiler):
    code = jit_loader(compiler.compile(SOURCE))
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(
        ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    bits = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint64).astype(np.uint32)
    bits[:8] = [0, 1 << 31, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f808000, 0x3f818000, 0x7f7fffff]
    given, made = bits.view(np.float32), np.zeros(4096, np.uint16)
    call(made.ctypes.data, given.ctypes.data, 4096)
    wanted = torch.from_numpy(given.copy()).bfloat16()
    assert torch.equal(torch.from_numpy(made.view(np.int16)).view(torch.bfloat16).nan_to_num(7.0),
                       wanted.nan_to_num(7.0))


def test_objects_without_own_calls_stay_as_they_are(compiler: ToolchainCompiler):
    blob = compile_object(compiler.found, compiler.arguments, "void kernel(float *a) { a[0] = 1.0f; }")
    assert with_own_calls(blob) == blob
