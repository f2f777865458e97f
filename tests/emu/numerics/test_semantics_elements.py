"""The model of operations element by element against the emulator's CUDA cores, bit for bit. The quick run
has all edges (pairs and triples of them too) and 2^14 drawn operands; the slow one 2^20. Whole matmuls of
the templates are bit for bit what the model says of their instructions in their order."""
from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.numerics.semantics_case import drawn, edges
from tests.support.ptx.lanewise import apply1
from tests.support.tile.gemm_case import arguments, product, run, view
from tests.support.tile.scaled_gemm_case import given as scaled_given
from tests.support.tile.scaled_gemm_case import scaled
from tinygrad_nv.numerics.semantics import FORMATS, Unit, apply, convert, dot, promote_dot, tensor_core
from tinygrad_nv.numerics.semantics.formats import Codes, Format
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

QUICK, MILLION = 2 ** 14, 2 ** 20
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1, "max": 2, "min": 2}
MODES = ("rn", "rz", "rm", "rp")
CASES = [
    *[(name, "f32", mode, ftz) for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")
      for mode in MODES for ftz in ("", ".ftz")],
    *[(name, kind, "rn", "") for name in ("add", "sub", "mul", "fma") for kind in ("f16", "bf16")],
    *[(name, "f16", "rn", ".ftz") for name in ("add", "sub", "mul", "fma")],
    *[(name, kind, "", "") for name in ("max", "min", "max.NaN", "min.NaN")
      for kind in ("f32", "f16", "bf16")],
]


def name_of(case: object) -> str: return "-".join(case) if isinstance(case, tuple) else str(case)


def operands(of: Format, number: int, count: int, seed: int) -> list[Codes]:
    """Every combination of edges, then drawn codes; some sums of two cancel, and nearly."""
    rng = np.random.default_rng(seed)
    some = edges(of) if number < 3 else edges(of)[::3]
    combined = np.array(list(itertools.product(some, repeat=number)), of.kind).T
    more = [drawn(of, (count,), rng) for _ in range(number)]
    if number > 1:
        more[-1][::7] = more[0][::7] ^ of.kind(of.sign)
        more[-1][1::7] = (more[0][1::7] ^ of.kind(of.sign)) + of.kind(1)
    return [np.concatenate([a, b]) for a, b in zip(combined, more, strict=True)]


def check(case: tuple[str, str, str, str], count: int) -> None:
    """An instruction and the model of it."""
    opcode, kind, mode, ftz = case
    name, of = opcode.partition(".")[0], FORMATS[kind]
    given = operands(of, ARITY[name], count, 1)
    listed = ", ".join(["%d0", *(f"%s{i}" for i in range(len(given)))])
    suffix = f".{mode}" * bool(mode)
    got = apply1(f"{opcode}{suffix}{ftz}.{kind} {listed};", *given, result=of.kind)
    want = apply(name, of, given, mode or "rn", ftz=bool(ftz), nan="NaN" in opcode)
    wrong = np.nonzero(got != want)[0]
    assert not len(wrong), (case, [hex(each[wrong[0]]) for each in (*given, got, want)], len(wrong))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_operations(case: tuple[str, str, str, str]) -> None: check(case, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_million_operands(case: tuple[str, str, str, str]) -> None: check(case, MILLION)


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_saturation(name: str) -> None:
    given = operands(FORMATS["f32"], ARITY[name], QUICK, 2)
    listed = ", ".join(["%d0", *(f"%s{i}" for i in range(len(given)))])
    got = apply1(f"{name}.rn.sat.f32 {listed};", *given, result=np.uint32)
    assert np.array_equal(got, apply(name, FORMATS["f32"], given, saturate=True))


# **** conversions ****

def floats(count: int) -> Codes:
    """float32 at and around every number of the 16-bit formats, edges, drawn ones."""
    rng = np.random.default_rng(3)
    halves = np.arange(1 << 16, dtype=np.uint16)
    exact = [convert(halves, FORMATS[kind], FORMATS["f32"]) for kind in ("f16", "bf16")]
    ties = [codes + np.uint32((1 << shift) + by) for codes in exact for shift in (12, 15)
            for by in (-1, 0, 1)]
    return np.concatenate([*exact, *ties, edges(FORMATS["f32"]), drawn(FORMATS["f32"], (count,), rng)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("to", "mode"), [("f16", "rn"), ("f16", "rz"), ("bf16", "rn"), ("bf16", "rz"),
                                          ("tf32", "rna"), ("tf32", "rn"), ("tf32", "rz")])
def test_narrowing_of_float32(to: str, mode: str) -> None:
    given = floats(QUICK)
    got = apply1(f"cvt.{mode}.{to}.f32 %d0, %s0;", given, result=FORMATS[to].kind)
    want = convert(given, FORMATS["f32"], FORMATS[to], mode)
    # the lower 13 bits of tf32 are not read, NaN's neither
    unread = FORMATS[to].kind(~((1 << FORMATS[to].unread) - 1) & (1 << FORMATS[to].bits) - 1)
    assert np.array_equal(got & unread, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
def test_narrowing_to_fp8(to: str) -> None:
    """From float32 and, all codes, from float16; too large ones become the largest."""
    given = floats(QUICK)
    got = apply1(f"cvt.rn.satfinite.{to}x2.f32 %d0, %s0, %s1;", given, given[::-1].copy(), result=np.uint16)
    want = convert(given, FORMATS["f32"], FORMATS[to]).astype(np.uint16)
    assert np.array_equal(got, want << 8 | want[::-1])
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = apply1(f"cvt.rn.satfinite.{to}x2.f16x2 %d0, %s0;", halves.astype(np.uint32), result=np.uint16)
    assert np.array_equal(got & 0xff, convert(halves, FORMATS["f16"], FORMATS[to]))


@pytest.mark.parametrize("of", ["f16", "bf16", "e4m3", "e5m2"])
def test_widening_of_every_code(of: str) -> None:
    codes = np.arange(1 << FORMATS[of].bits, dtype=FORMATS[of].kind)
    if of in ("f16", "bf16"):
        got, to = apply1(f"cvt.f32.{of} %d0, %s0;", codes, result=np.uint32), "f32"
    else:
        got = apply1(f"cvt.rn.f16x2.{of}x2 %d0, %s0;", codes.astype(np.uint16), result=np.uint32) & 0xffff
        to = "f16"
    assert np.array_equal(got, convert(codes, FORMATS[of], FORMATS[to]))


BF16, F16, F32, E4M3, E5M2 = (dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3,
                              dtypes.fp8e5m2)
MMA, WGMMA = Mma().block(64, 64).k(32).warps(2, 2).stages(3), Wgmma().block(128, 64)


def codes_of(storage: torch.Tensor, dtype: DType, extents: tuple[int, int], stride: int) -> Codes:
    """A matrix's codes."""
    kind = torch.int16 if dtype.itemsize == 2 else torch.uint8
    lies = view(storage.view(kind), extents, (stride, 1), 0)
    return lies.contiguous().numpy().view(FORMATS[short(dtype)].kind)


def matrices(spec: GemmSpec, given: dict[str, torch.Tensor]) -> tuple[Codes, Codes]:
    """Codes of A (M, K) and B (K, N)."""
    a = codes_of(given["a"], spec.a.dtype, (spec.m, spec.k), spec.a.mn)
    return a, codes_of(given["b"], spec.b.dtype, (spec.n, spec.k), spec.b.mn).T


def bits(values: torch.Tensor) -> Codes: return values.float().numpy().view(np.uint32)


@pytest.mark.parametrize(("schedule", "dtype", "arch", "instruction"), [
    (MMA, BF16, "sm_80", "mma"), (MMA, F16, "sm_90a", "mma"), (WGMMA, BF16, "sm_90a", "wgmma"),
    (WGMMA, F16, "sm_90a", "wgmma")])
def test_a_matmul_has_the_bits_of_its_instructions(schedule: GemmSchedule, dtype: DType, arch: str,
                                                   instruction: str):
    spec = product(70, 72, 208, dtype, F32)
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, schedule, GPU(arch)), spec, given, arch)
    unit: Unit = tensor_core(arch, instruction, short(dtype))
    want = dot(unit, *matrices(spec, given), np.zeros((70, 72), np.uint32))
    assert np.array_equal(bits(got), want)


@pytest.mark.parametrize(("a", "b"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_matmul_of_fp8_is_promoted_every_128(a: DType, b: DType):
    spec = product(70, 72, 512, a, F32)
    spec = replace(spec, b=replace(spec.b, dtype=b))
    given = arguments(spec, integers=False)
    got = run(TABLE.build(spec, WGMMA.k(128), GPU("sm_90a")), spec, given, "sm_90a")
    unit = tensor_core("sm_90a", "wgmma", short(a), b=short(b))
    assert np.array_equal(bits(got), promote_dot(unit, *matrices(spec, given)))


def test_a_matmul_with_scales_of_groups_is_promoted_with_them():
    """DeepGEMM's: each group's sum times its scales, by one FMA."""
    spec = scaled(70, 128, 384)
    given = scaled_given(spec, integers=False)
    got = run(TABLE.build(spec, ScaledWgmma(), GPU("sm_90a")), spec, given, "sm_90a")
    rows = view(given["a_scale"], (70, 3), (spec.a_scale.mn, spec.a_scale.k), 0).numpy()
    columns = view(given["b_scale"], (1, 3), (spec.b_scale.mn, spec.b_scale.k), 0).numpy()
    scales = (rows * columns).astype(np.float32).T[:, :, None].astype(np.float64)
    want = promote_dot(tensor_core("sm_90a", "wgmma", "e4m3"), *matrices(spec, given), scales)
    assert np.array_equal(bits(got), want)
