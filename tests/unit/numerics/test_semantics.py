"""The model of arithmetic against torch and exact fractions, and the CPU's kernels against it."""
from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import dtypes

from tests.support.cpu.cpu_gemv_case import BEST, run
from tests.support.cpu.cpu_vector_case import LEVELS, NUMPY, call
from tests.support.numerics.semantics_case import drawn, edges
from tests.support.ptx import exact as fractions
from tests.support.tile.gemm_case import arguments, product
from tests.unit.cpu.test_cpu_amx import tile_kernel
from tests.unit.cpu.test_cpu_gemm import PLAIN, scheduled
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.numerics.semantics import FORMATS, apply, convert, decode, dot, encode, promote_dot
from tinygrad_nv.numerics.semantics.formats import Codes
from tinygrad_nv.numerics.semantics.units import Chain, Pairs, Tile
from tinygrad_nv.runtime.cpu.program import load

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
F32, BF16 = FORMATS["f32"], FORMATS["bf16"]
EXACT = {"f32": fractions.F32, "f16": fractions.F16, "bf16": fractions.BF16}


def in_torch(codes: Codes, name: str) -> torch.Tensor:
    """Codes as a tensor of their dtype."""
    return torch.from_numpy(codes.view({1: np.uint8, 2: np.int16}[codes.itemsize])).view(TORCH[name])


# **** formats ****

@pytest.mark.parametrize("name", TORCH)
def test_every_code_is_torchs_number(name: str):
    of = FORMATS[name]
    codes = np.arange(1 << of.bits, dtype=of.kind)
    want = in_torch(codes, name).double().numpy()
    np.testing.assert_array_equal(decode(codes, of), want)
    assert of.largest == torch.finfo(TORCH[name]).max
    real = ~np.isnan(want)
    assert np.array_equal(encode(want, of)[real], codes[real])


@pytest.mark.parametrize("name", TORCH)
def test_narrowing_is_torchs(name: str):
    """To nearest even; beyond the largest infinity, and the largest of e4m3."""
    of = FORMATS[name]
    given = np.concatenate([edges(F32), drawn(F32, (100000,), np.random.default_rng(1))])
    with np.errstate(invalid="ignore"): wide = torch.from_numpy(given.view(np.float32))
    want = wide.to(TORCH[name]).view(torch.uint8 if of.bits == 8 else torch.int16).numpy().view(of.kind)
    got, real = convert(given, F32, of, saturate=name == "e4m3"), ~np.isnan(decode(want, of))
    assert np.array_equal(got[real], want[real])
    assert np.isnan(decode(got[~real], of)).all()


@pytest.mark.parametrize("mode", ["rn", "rna", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", EXACT)
def test_roundings_are_those_of_fractions(name: str, mode: str):
    """Of float64 numbers of any exponent the format has, and beyond."""
    of, rng = FORMATS[name], np.random.default_rng(2)
    powers = rng.integers(of.least - of.mantissa - 2, 3 - of.least, 300)
    values = rng.integers(-2 ** 52, 2 ** 52, 300) * 2.0 ** (powers - 52)
    got = encode(values, of, mode)
    for value, code in zip(values, got, strict=True):
        number = (int(value < 0), abs(Fraction(float(value))))
        assert int(code) == fractions.encode(number, EXACT[name], mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "div", "sqrt"])
@pytest.mark.parametrize("kind", EXACT)
def test_operations_are_those_of_fractions(kind: str, name: str, mode: str):
    of, rng = FORMATS[kind], np.random.default_rng(3)
    count = {"fma": 3, "sqrt": 1}.get(name, 2)
    given = [drawn(of, (200,), rng) for _ in range(count)]
    got = apply(name, of, given, mode)
    for i, code in enumerate(got):
        want = fractions.apply_exactly(name, [int(each[i]) for each in given], EXACT[kind], mode)
        assert int(code) == want, [hex(each[i]) for each in given]


def test_stochastic_rounding_goes_up_as_often_as_a_number_lies_near():
    """Of 2^16 random words each once: exactly so often; and the mean is the number."""
    noise = np.arange(2 ** 16)
    for share in (0.0, 0.25, 0.7, 1 - 2.0 ** -16):
        codes = encode(np.full(2 ** 16, 1 + share * 2.0 ** -7), BF16, "rs", noise=noise)
        assert (codes == 0x3f81).sum() == int(share * 2 ** 16)
        assert set(codes) <= {0x3f80, 0x3f81}


# **** CPUs ****

@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("kind", ["bf16", "f16", "e4m3", "e5m2"])
def test_vectors_narrow_and_widen(level: ISA, kind: str):
    """cpu/vector.h: stores to nearest even, FP8 saturating; loads of every code. NaN is some NaN."""
    of = FORMATS[kind]
    given = np.concatenate([edges(F32), drawn(F32, (4096,), np.random.default_rng(4))])
    given = given[:len(given) // 16 * 16]
    got = call(level, f"store_{kind}", len(given), np.zeros(len(given), NUMPY[kind]), given.view(np.float32))
    want, real = convert(given, F32, of), ~np.isnan(decode(given, F32))
    assert np.array_equal(got.view(of.kind)[real], want[real])
    assert np.isnan(decode(got.view(of.kind)[~real], of)).all()
    codes = np.arange(1 << of.bits, dtype=of.kind)
    wide = call(level, f"load_{kind}", len(codes), np.zeros(len(codes), np.float32), codes)
    np.testing.assert_array_equal(decode(wide.view(np.uint32), F32), decode(codes, of))


@pytest.mark.parametrize("level", [each for each in LEVELS if each.level in ("avx2", "avx512")], ids=str)
def test_vectors_fuse(level: ISA):
    """One rounding, subnormal numbers kept."""
    rng = np.random.default_rng(5)
    given = [drawn(F32, (4096,), rng) for _ in range(3)]
    got = call(level, "fma_", 4096, np.zeros(4096, np.float32), *(each.view(np.float32) for each in given))
    want = apply("fma", F32, given)
    real = ~np.isnan(decode(want, F32))
    assert np.array_equal(got.view(np.uint32)[real], want[real])
    assert np.isnan(got[~real]).all()


def test_tiles():
    """TDPBF16PS as it stands in C for processors that have none."""
    rng = np.random.default_rng(6)
    for near in (0.0, 0.5, 0.95, 1.0):
        a, b = drawn(BF16, (16, 32), rng, near), drawn(BF16, (32, 16), rng, near)
        c = drawn(F32, (16, 16), rng, near)
        got = np.zeros((16, 16), np.float32)
        columns = np.ascontiguousarray(b.reshape(16, 2, 16).transpose(0, 2, 1).reshape(16, 32))
        with np.errstate(invalid="ignore"):
            tile_kernel("bf16ps")(got, c.view(np.float32), np.ascontiguousarray(a), columns)
        want = dot(Tile(), a, b, c)
        real = ~np.isnan(decode(want, F32))
        assert np.array_equal(got.view(np.uint32)[real], want[real])
        assert np.isnan(got[~real]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "level", "unit"), [
    (dtypes.float32, BEST, Chain()), (dtypes.bfloat16, PLAIN, Pairs(flush=False))], ids=["f32", "bf16"])
def test_a_kernel_of_the_cpu_sums_blocks_of_k(dtype: Any, level: ISA, unit: Chain | Pairs):
    """A blocked matmul: a chain of FMAs from zero for each block of K, and those added up."""
    spec = product(33, 40, 300, dtype, out=dtypes.float32)
    given, schedule = arguments(spec, integers=False), scheduled(spec, level)
    assert schedule.block_k < 300
    got = run(load(gemm.build(spec, schedule)), spec, given)
    codes = [given[name].view(33 if name == "a" else 40, 300).view(torch.uint8).numpy().view(unit.a.kind)
             for name in "ab"]
    want = promote_dot(unit, codes[0], codes[1].T, every=schedule.block_k)
    assert np.array_equal(got.float().numpy().view(np.uint32), want)
