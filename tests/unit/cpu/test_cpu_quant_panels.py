"""Matmuls of many rows of floats with matrices in tiles."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad.device import Device
from tinygrad.dtype import DType
from tinygrad.runtime.support.elf import elf_loader

from tests.support.cpu.cpu_quant_case import (
    BF16,
    F16,
    F32,
    LEVELS,
    TYPES,
    built,
    elements,
    matmul,
    run,
    stored,
    tiles,
)
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX512_BF16, ISA
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant import types
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

EPS = 2.0 ** -24
RNG = np.random.default_rng
PLAIN = ISA("avx512", bf16=True, vnni=True, emulated=True)      # pairs of bfloat16 in plain C
EMULATED = ISA("amx", bf16=True, vnni=True, emulated=True)


def exact(name: str, level: isa.ISA, dtype: DType, m: int = 130, symbolic: bool = False, block_m: int = 48,
          rows: int = 3) -> None:
    """Integers come out exactly, whatever elements are rounded to."""
    type, n = TYPES[name].of_rows(), 21
    k = 512 if type.outer is not None or level == PLAIN else 5 * max(type.scale.columns, 128)
    spec = matmul(replace(type, layout="tiles"), m, n, k, dtype, F32, 3, symbolic)
    kernel, given = built(spec, level, block_m=block_m, rows=rows, parts=3), stored(type, n, k, whole=True)
    assert kernel.kernel.name.startswith("quant_panels")
    x = RNG(m).integers(-4, 5, (m - symbolic, k)).astype(np.float32)
    np.testing.assert_array_equal(run(kernel, spec, x, tiles(type, n, k, given), [2, 0, 1]),
                                  x @ elements(type, n, k, given).T)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", [*LEVELS, PLAIN], ids=str)
def test_levels(level: isa.ISA):
    exact("Q4_K", level, BF16)
    exact("e4m3 blocks", level, F32)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["Q6_K", "Q5_1", "awq", "gptq 2 bits", "NVFP4", "int8 channel"])
def test_types(name: str):
    exact(name, LEVELS[-1], BF16)


def test_tiles_of_amx():
    """Each tile instruction in plain C; the machine code of TDPBF16PS tmm0, tmm4, tmm6."""
    exact("Q4_K", EMULATED, BF16, block_m=64, rows=32)
    exact("awq", EMULATED, BF16, m=40, symbolic=True, block_m=32, rows=32)
    spec = matmul(replace(types.Q4_K, layout="tiles"), 64, 32, 512, BF16)
    binary = Device["CPU"].renderer.compiler.compile(built(spec, AMX).kernel.source)
    assert bytes.fromhex("c4e24a5cc4") in elf_loader(binary)[0].tobytes()


def test_rows_known_at_launch(): exact("Q8_0", LEVELS[-1], F16, symbolic=True)


@pytest.mark.parametrize("name", ["e5m2 channel", "nvfp4 divided", "nf4 nested", "Q4_1"])
def test_numbers(name: str):
    """Sums of K products in the order of k, of elements that are rounded three times."""
    type, (m, n, k) = TYPES[name].of_rows(), (20, 21, 512)
    spec, given = matmul(replace(type, layout="tiles"), m, n, k), stored(type, n, k, 1)
    x, w = RNG(m).standard_normal((m, k)).astype(np.float32), elements(type, n, k, given).astype(np.float64)
    error = np.abs(run(built(spec), spec, x, tiles(type, n, k, given)) - x.astype(np.float64) @ w.T)
    assert (error <= 4 * EPS * np.sqrt(k) * (np.abs(x) @ np.abs(w.T))).all()


def test_gate_and_up():
    """Two parts of a matrix, whose sums meet in the epilogue; factors of all columns come before it."""
    type = types.NVFP4.of_rows()
    spec = matmul(replace(type, layout="tiles"), 20, 32, 64)
    gemm = replace(spec.gemm, parts=2, part=32 * 64, epilogue=Sum() * Sum(part=1))
    spec, given = QuantGemmSpec(gemm, spec.type), stored(type, 64, 64, whole=True)
    x = RNG(0).integers(-4, 5, (20, 64)).astype(np.float32)
    made = x @ elements(type, 64, 64, given).T
    np.testing.assert_array_equal(run(built(spec), spec, x, tiles(type, 64, 64, given)),
                                  made[:, :32] * made[:, 32:])


def test_prefill_of_floats():
    for name, m, level, template in (("awq", 17, AVX2, "quant_panels"), ("awq", 16, AVX2, "quant_dots"),
                                     ("awq", 128, AVX512_BF16, "quant_dots"),
                                     ("awq", 129, AVX512_BF16, "quant_panels"),
                                     ("e4m3 blocks", 17, AVX512_BF16, "quant_panels")):
        spec = matmul(replace(TYPES[name].of_rows(), layout="tiles"), m, 4096, 4096, BF16)
        found = TABLE.choose(spec, CPU(level, 8))
        assert found is not None
        assert found.template == template
