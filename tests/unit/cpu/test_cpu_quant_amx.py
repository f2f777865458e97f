"""Matmuls of activations in bytes with matrices in tiles by AMX tiles: each tile instruction in plain C,
and the machine code of the real ones."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad.device import Device
from tinygrad.runtime.support.elf import elf_loader

from tests.support.cpu.cpu_quant_case import BF16, F32, TYPES, Arrays, built, matmul, run, stored, tiles
from tinygrad_nv.cpu.isa import AMX, AVX512_BF16, ISA, PORTABLE
from tinygrad_nv.cpu.quant_gemm import amx
from tinygrad_nv.cpu.quant_gemm.schedules import QuantAmx
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.quant import types
from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

EMULATED = ISA("amx", bf16=True, vnni=True, emulated=True)
# shifts and zero points of 8 bits are subtracted from sums, those of fewer from codes
UINT8 = QType(types.UINT8, types.per_group_scale(32), shift=128, zeros=True)
NAMES = ("Q4_0", "Q4_K", "Q6_K", "Q8_0", "awq", "gptq 2 bits", "MXFP4")
CASES = {name: TYPES[name] for name in NAMES} | {"uint8": UINT8}


def given(type: QType, m: int, n: int, k: int) -> tuple[np.ndarray, Arrays]:
    x = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    return x, tiles(type, n, k, stored(type, n, k, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_vectors(name: str):
    """Rows and outputs that are no whole tiles; several blocks of rows."""
    type, m, n = CASES[name], 37, 21
    k = 512 if type.outer is not None else 2 * max(type.scale.columns, 48)
    spec = matmul(replace(type, layout="tiles"), m, n, k, BF16, F32, 5, int8=True)
    x, arrays = given(type, m, n, k)
    kernel = built(spec, EMULATED, block_m=16, parts=3)
    assert kernel.kernel.name.startswith("quant_amx")
    np.testing.assert_array_equal(run(kernel, spec, x, arrays, [2, 0, 1]),
                                  run(built(spec, PORTABLE), spec, x, arrays))


def test_rows_known_at_launch():
    spec = matmul(replace(types.Q4_0, layout="tiles"), 50, 40, 96, symbolic=True, int8=True)
    kernels = [built(spec, level) for level in (EMULATED, PORTABLE)]
    for m in (1, 16, 33):
        x, arrays = given(types.Q4_0, m, 40, 96)
        got, want = (run(kernel, spec, x, arrays) for kernel in kernels)
        np.testing.assert_array_equal(got, want)


def test_gate_and_up():
    """Two parts of a matrix, whose sums meet in the epilogue."""
    type = replace(types.Q8_0, layout="tiles")
    spec = matmul(type, 20, 32, 64, int8=True)
    gemm = replace(spec.gemm, parts=2, part=32 * 64, epilogue=Sum() * Sum(part=1))
    spec = QuantGemmSpec(gemm, type, True)
    x, arrays = given(types.Q8_0, 20, 64, 64)
    np.testing.assert_array_equal(run(built(spec, EMULATED), spec, x, arrays),
                                  run(built(spec, PORTABLE), spec, x, arrays))


# TDPBSSD and TDPBSUD tmm0, tmm4, tmm6
@pytest.mark.parametrize(("type", "code"), [(types.Q4_0, "c4e24b5ec4"), (types.Q8_0, "c4e24b5ec4"),
                                            (UINT8, "c4e24a5ec4")], ids=str)
def test_machine_code(type: QType, code: str):
    spec = matmul(replace(type, layout="tiles"), 32, 32, 256, BF16, int8=True)
    schedule = amx.default(spec, CPU(AMX, 2))
    assert amx.problems(spec, schedule) == []
    binary = Device["CPU"].renderer.compiler.compile(amx.build(spec, schedule).source)
    text = elf_loader(binary)[0].tobytes()     # an undefined symbol is an error
    assert text.count(bytes.fromhex(code)) == 1
    assert bytes.fromhex("c4e27849c0") in text      # tilerelease


def test_prefill_of_a_processor_with_tiles():
    for m, int8, level, template in ((17, True, AMX, "quant_amx"), (16, True, AMX, "quant_dots"),
                                     (64, False, AMX, "quant_panels"), (64, True, AVX512_BF16, "quant_dots")):
        spec = matmul(replace(types.Q4_K, layout="tiles"), m, 4096, 4096, BF16, int8=int8)
        found = TABLE.choose(spec, CPU(level, 8, 48 << 10, 2 << 20))
        assert found is not None
        assert found.template == template
        if isinstance(found, QuantAmx): assert found.parts >= 8


@pytest.mark.parametrize(("type", "why"), [
    (replace(types.Q4_0, layout="tiles", shift=120, zeros=True), "codes less up to 136, at most 128"),
    (types.Q4_0, "a matrix that is not in tiles")])
def test_what_it_does_not_take(type: QType, why: str):
    spec = matmul(type, 64, 32, 64, BF16, int8=True)
    assert why in amx.problems(spec, amx.default(spec, CPU(AMX, 2)))
