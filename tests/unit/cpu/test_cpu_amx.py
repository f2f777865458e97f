"""Products by AMX tiles: the kernel as it runs where there are none (each tile instruction in plain C), what
a tile instruction computes, and the machine code of the real one."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.tensor import Tensor

from tests.support.tile.gemm_case import GUARD, arguments, near, product, reference, view
from tinygrad_nv import explain
from tinygrad_nv.cpu import measure, target
from tinygrad_nv.cpu.gemm import amx
from tinygrad_nv.cpu.gemm.schedules import Amx
from tinygrad_nv.cpu.gemm.templates import choose
from tinygrad_nv.cpu.isa import AMX, AVX512_BF16, ISA
from tinygrad_nv.cpu.kernel import header, kernel
from tinygrad_nv.cpu.measure import Rates
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.spec import GemmSpec

EMULATED = ISA("amx", bf16=True, vnni=True, emulated=True)
HERE = CPU(EMULATED, 2, 48 << 10, 2 << 20)
BF16, S8, U8 = dtypes.bfloat16, dtypes.int8, dtypes.uint8


def memory(given: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """Storages in the order of a kernel's pointers."""
    return [given[name].view(torch.uint8).numpy() for name in ["out", *(x for x in given if x != "out")]]


def result(spec: GemmSpec, schedule: Amx, given: dict[str, torch.Tensor], m: int | None = None,
           **how: Any) -> torch.Tensor:
    """[*batch, m, n] in float64; nothing beside it may be written."""
    assert amx.problems(spec, schedule) == []
    given = {**given, "out": given["out"].clone()}
    rows = spec.m if m is None else m
    load(amx.build(spec, schedule))(*memory(given), *([rows] if spec.symbolic else []), **how)
    extents, strides = (*spec.batch, rows, spec.n), (*spec.out.batch, spec.out.m, spec.out.n)
    got = view(given["out"], extents, strides, spec.out.offset).double()
    view(given["out"], extents, strides, spec.out.offset).fill_(GUARD)
    guard = torch.tensor(GUARD).to(given["out"].dtype).double()
    assert (given["out"].double() == guard).all(), "elements beside the result were written"
    return got


def exact(spec: GemmSpec, schedule: Amx | None = None, m: int | None = None) -> None:
    """Integers come out as they are."""
    given = arguments(spec)
    rows = slice(0, spec.m if m is None else m)
    got = result(spec, schedule or amx.default(spec, HERE), given, m)
    assert torch.equal(got, reference(spec, given)[..., rows, :])


# **** products ****

CASES = {
    "whole tiles": product(64, 64, 128), "ragged": product(50, 41, 97, gap=3),
    "several blocks of k": product(33, 40, 1200),
    "batch": product(33, 20, 64, batch=(2, 3), out=dtypes.float32),
    "x @ w": product(40, 50, 70, majors="KM"), "x.T @ w": product(40, 50, 70, majors="MM", gap=1),
    "x.T @ w.T": product(300, 17, 35, majors="MK"),
    "rows of the result side by side": product(50, 33, 64, out_major="M"),
    "s8": product(40, 33, 150, S8), "u8": product(33, 40, 64, U8, majors="KM"),
    "s8 u8": replace(product(33, 40, 100, S8), b=replace(product(33, 40, 100, U8).b)),
    "u8 s8": replace(product(33, 40, 100, U8), b=replace(product(33, 40, 100, S8).b)),
    "an offset": product(32, 32, 64, offset=5)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_integers_come_out_as_they_are(spec: GemmSpec): exact(spec)


@drawn(st.integers(17, 90), st.integers(1, 90), st.integers(1, 300), st.sampled_from(("KK", "KM", "MK")),
       st.sampled_from((BF16, S8)), st.integers(0, 2))
@settings(deadline=None, max_examples=5)
def test_any_extents(m: int, n: int, k: int, majors: str, dtype, gap: int):
    exact(product(m, n, k, dtype, majors=majors, gap=gap))


@pytest.mark.slow
@drawn(st.integers(17, 200), st.integers(1, 200), st.integers(1, 3000),
       st.sampled_from(("KK", "KM", "MK", "MM")), st.sampled_from((BF16, S8, U8)), st.integers(0, 2),
       st.sampled_from(((), (2,), (2, 1, 3))))
@settings(deadline=None, max_examples=60)
def test_any_extents_and_batches(m: int, n: int, k: int, majors: str, dtype, gap: int,
                                 batch: tuple[int, ...]):
    exact(product(m, n, k, dtype, majors=majors, gap=gap, batch=batch))


def test_rows_known_at_launch():
    """Rows that are not there are neither read (they are NaN) nor written."""
    spec = product(80, 40, 64, symbolic=True)
    given = arguments(spec)
    view(given["a"], (spec.m, spec.k), (spec.a.mn, 1), 0)[33:] = torch.nan
    for m in (1, 17, 32, 33):
        got = result(spec, amx.default(spec, HERE), given, m)
        assert torch.equal(got, reference(spec, given)[:m])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("epilogue", ["gate", "bias+gelu+residual", "scale"])
def test_an_epilogue(epilogue: str):
    spec = dense(50, 48, 96, "bf16", epilogue=epilogue)
    given = arguments(spec, integers=False)
    near(spec, given, result(spec, amx.default(spec, HERE), given), c=2, extra=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("k", [64, 777, 3000])
def test_random_numbers(k: int):
    """An error of at most twice that of float32 sums in order, before the result is rounded."""
    spec = product(40, 40, k, out=dtypes.float32)
    given = arguments(spec, integers=False)
    right, plain = reference(spec, given), torch.zeros(40, 40)
    a, b = (given[name].float().view(40, k) for name in "ab")
    for i in range(k): plain += a[:, i, None] * b[:, i]
    error = (result(spec, amx.default(spec, HERE), given) - right).abs().max()
    assert error <= 2 * (plain - right).abs().max()


def test_nan_stays_in_its_row_and_column():
    spec = product(40, 40, 97)
    given = arguments(spec)
    given["a"][3 * 97 + 5] = torch.nan
    given["b"][7 * 97 + 9] = torch.nan
    got = result(spec, amx.default(spec, HERE), given).isnan()
    assert torch.equal(got, reference(spec, given).isnan())
    assert got.sum() == 79


# **** what a tile instruction computes ****

def tile_kernel(kind: str) -> Any:
    body = f"""
  TILES;
  tiles_begin();
  tile_load(0, c, 64); tile_load(4, a, 64); tile_load(6, b, 64);
  tile_dot({kind}, 0, 4, 6);
  tile_store(0, out, 64);
  tiles_end();"""
    operands = [("u32", "c"), ("u32", "a"), ("u32", "b")]
    return load(kernel("tile", EMULATED, body, [("u32", "out")], operands, before=header("amx.h")))


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal numbers as zeros."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.float32(0), x).astype(np.float32)


def test_pairs_are_summed_apart_and_subnormal_numbers_are_zeros():
    """TDPBF16PS by the manual: even and odd numbers of a row each by fused multiply-adds from 0, then both
    sums to the tile's; every step rounds to nearest and flushes."""
    random = np.random.default_rng(1)
    def halves(scale: int) -> np.ndarray:
        wide = random.standard_normal((16, 32)) * 2.0**random.integers(-2 * scale, scale, (16, 32))
        return wide.astype(np.float32).view(np.uint32) & np.uint32(0xffff0000)
    for scale in (4, 55):
        a, b = halves(scale), halves(scale)
        a[0, :4] = 0x00010000, 0x00400000, 0x80010000, 0x3f800000     # subnormal, and one
        b[1, 2] = 0x007f0000
        c = (random.standard_normal((16, 16)) * 1e-3).astype(np.float32)
        a[5], c[5] = 0, np.float32(1e-40)                             # a sum that stays subnormal
        # b's tile: units of two along k, a row for each
        columns = (b.reshape(16, 2, 16) >> 16).astype(np.uint16).transpose(0, 2, 1).reshape(16, 32)
        rows = (a >> 16).astype(np.uint16)
        got = np.zeros((16, 16), np.float32)
        tile_kernel("bf16ps")(got, c, np.ascontiguousarray(rows), np.ascontiguousarray(columns))
        x, y = (flush(one.view(np.float32)).astype(np.longdouble) for one in (a, b))
        sums = np.zeros((2, 16, 16), np.float32)
        for k in range(16):
            for half in range(2):
                exactly = x[:, 2 * k + half, None] * y.reshape(16, 2, 16)[k, half] + sums[half]
                sums[half] = flush(exactly.astype(np.float32))
        want = flush(flush(c) + flush(sums[0] + sums[1]))
        assert np.array_equal(got, want)


@pytest.mark.parametrize(("kind", "of_a", "of_b"), [
    ("bssd", np.int8, np.int8), ("bsud", np.int8, np.uint8), ("busd", np.uint8, np.int8),
    ("buud", np.uint8, np.uint8)])
def test_bytes_are_summed_in_fours_and_wrap(kind: str, of_a: type, of_b: type):
    random = np.random.default_rng(2)
    a, b = (random.integers(0, 256, (16, 64)).astype(np.uint8).view(one) for one in (of_a, of_b))
    c = random.integers(-2**31, 2**31, (16, 16)).astype(np.int32)
    c[0] = 2**31 - 1
    got = np.zeros((16, 16), np.int32)
    tile_kernel(kind)(got, c, a, b)
    right = b.reshape(16, 16, 4).transpose(0, 2, 1).reshape(64, 16).astype(np.int64)
    want = (c.astype(np.int64) + a.astype(np.int64) @ right).astype(np.int32)
    assert np.array_equal(got, want)


# **** the real instructions ****

# TDPBF16PS and TDPB..D tmm0, tmm4, tmm6: VEX.128 with the prefix in two bits, opcode, registers
CODES = [(BF16, BF16, "c4e24a5cc4"), (S8, S8, "c4e24b5ec4"), (S8, U8, "c4e24a5ec4"), (U8, S8, "c4e2495ec4"),
         (U8, U8, "c4e2485ec4")]


@pytest.mark.parametrize(("a", "b", "code"), CODES)
def test_machine_code(a, b, code: str):
    spec = product(64, 64, 128, a)
    spec = replace(spec, b=replace(spec.b, dtype=b))
    made = amx.build(spec, amx.default(spec, replace(HERE, isa=AMX)))
    binary = Device["CPU"].renderer.compiler.compile(made.source)
    text = elf_loader(binary)[0].tobytes()     # an undefined symbol is an error
    assert text.count(bytes.fromhex(code)) == 1
    for instruction in ("c4e27849c0", ):      # tilerelease
        assert bytes.fromhex(instruction) in text
    others = {bytes.fromhex(other) for _, _, other in CODES if other != code}
    assert not any(other in text for other in others)


# **** when ****

@pytest.mark.parametrize(("spec", "here", "why"), [
    (product(64, 64, 64), replace(HERE, isa=AVX512_BF16), "no tiles on avx512-bf16-vnni"),
    (product(16, 64, 64), HERE, "16 rows, at least 17"),
    (product(64, 64, 64, dtypes.float16), HERE, "tiles of f16"),
    (product(64, 64, 64, dtypes.float32), HERE, "tiles of f32")])
def test_what_it_does_not_take(spec: GemmSpec, here: CPU, why: str):
    assert amx.problems(spec, amx.default(spec, here)) == [why]


def test_templates_are_asked_in_order():
    cases = ((AMX, 16, "gemv"), (AMX, 17, "amx"), (EMULATED, 64, "amx"), (AVX512_BF16, 65, "gemm"))
    for isa, m, template in cases:
        found = choose(product(m, 64, 64), replace(HERE, isa=isa))
        assert found is not None
        assert found.template == template


@pytest.mark.parametrize(("m", "n", "k"), [(17, 1, 1), (64, 64, 64), (512, 4096, 4096), (4096, 14336, 4096),
                                           (100, 1000, 100000), (2048, 2048, 2048)])
@pytest.mark.parametrize("kind", ["bf16", "s8", "gate"])
def test_the_default_is_legal_and_shares_out_the_work(m: int, n: int, k: int, kind: str):
    spec = dense(m, n, k, "bf16" if kind == "gate" else kind, epilogue=kind if kind == "gate" else "")
    for threads in (1, 2, 7):
        found = amx.default(spec, replace(HERE, threads=threads))
        assert amx.problems(spec, found) == []
        if spec.flops > 1 << 30: assert found.parts >= threads


@pytest.mark.parametrize(("change", "why"), [
    ({"block_m": 33}, "block_m 33, a multiple of 32 is needed"),
    ({"block_n": 0}, "block_n 0, a multiple of 32"), ({"block_k": 48}, "block_k 48, a multiple of 32"),
    ({"block_m": 4096, "block_n": 4096}, "bytes on a stack")])
def test_schedules_that_cannot_be(change: dict[str, int], why: str):
    spec = product(64, 64, 64)
    words, = amx.problems(spec, replace(amx.default(spec, HERE), **change))
    assert why in words


def test_a_layer_through_the_pattern(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target, "detect", lambda: EMULATED)
    monkeypatch.setattr(measure, "rates", lambda target: Rates(1e10, 1e11, 1e12, 1e12))
    x, w = (Tensor.randint(40, 96, low=-2, high=3).cast(BF16).contiguous().realize() for _ in range(2))
    out = (x @ w.T).relu()
    assert explain(out).kernels[0].template == "amx"
    want = np.maximum(x.float().numpy() @ w.float().numpy().T, 0)
    assert np.array_equal(out.float().numpy(), want)
