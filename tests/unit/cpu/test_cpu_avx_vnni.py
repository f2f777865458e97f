"""AVX-VNNI: dot products of bytes in 256 bits. No processor with them is needed: their machine code, and the
same kernels with AVX-512's encoding of them."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.device import Device
from tinygrad.dtype import dtypes

from tests.support.cpu import cpu_gemv_case
from tests.support.cpu.cpu_quant_case import BF16, TYPES, built, default, matmul, run, stored, tiles
from tests.support.tile.gemm_case import arguments, product, reference
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.isa import AVX2_VNNI
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.toolchain import compile_object

TARGET = CPU(AVX2_VNNI, 2)
BYTES = product(33, 50, 90, dtypes.int8)
QUANTISED = matmul(replace(TYPES["Q6_K"], layout="tiles"), 3, 21, 512, BF16, int8=True)


def quantised() -> CPUKernel: return TABLE.build(QUANTISED, default(QUANTISED, AVX2_VNNI)[1], TARGET)


def of_bytes() -> CPUKernel: return gemm.build(BYTES, gemm.default(BYTES, TARGET))


@pytest.mark.parametrize("made", [quantised, of_bytes])
def test_machine_code(made):
    """For a processor that has no more than the level says: VPDPBUSD of 256 bits by VEX, none by EVEX."""
    compiler = Device["CPU"].renderer.compiler
    plain = ["-march=x86-64" if word.startswith("-march") else word for word in compiler.arguments]
    assert plain != compiler.arguments
    code = compile_object(compiler.found, plain, made().source)
    at = range(len(code) - 4)
    vex = [i for i in at if code[i] == 0xc4 and code[i + 1] & 31 == 2 and code[i + 2] & 0x87 == 5
           and code[i + 3] == 0x50]
    assert len(vex) >= 8
    assert not [i for i in at if code[i] == 0x62 and code[i + 1] & 7 == 2 and code[i + 2] & 0x83 == 1
                and code[i + 4] == 0x50]


def loaded(kernel: CPUKernel) -> LoadedKernel:
    """With the encoding that this processor has."""
    if "avx_vnni" in isa.flags(): return load(kernel)
    if not {"avx512_vnni", "avx512vl"} <= isa.flags(): pytest.skip("no VPDPBUSD of 256 bits here")
    source = kernel.source.replace("%{vex%} ", "").replace("avxvnni", "avx512vl,avx512vnni")
    assert source != kernel.source
    return load(replace(kernel, source=source))


def test_quantised_matrices():
    """The same bits as AVX2 without them."""
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    given = tiles(TYPES["Q6_K"], 21, 512, stored(TYPES["Q6_K"], 21, 512, 1))
    want = run(built(QUANTISED, isa.AVX2), QUANTISED, x, given)
    np.testing.assert_array_equal(run(loaded(quantised()), QUANTISED, x, given), want)


def test_bytes():
    given = arguments(BYTES)
    assert torch.equal(cpu_gemv_case.run(loaded(of_bytes()), BYTES, given), reference(BYTES, given))
