"""mma.m8n8k4 of f16, four products in a warp, and the roundings of mma of f64."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import run, sound, words
from tinygrad_nv.ptx.emulator import Emulator


def lanes_of(quad: int) -> list[int]:
    """The eight lanes of a product."""
    return [4 * quad + t for t in range(4)] + [16 + 4 * quad + t for t in range(4)]


def wide_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of a float32 element: bit by bit, as the manual's figure has it."""
    row = (lane % 2) + (2 if i in (2, 3, 6, 7) else 0) + (4 if lane >= 16 else 0)
    return row, (4 if i >= 4 else 0) + (2 if lane % 4 >= 2 else 0) + i % 2


def half_place(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 + (4 if lane >= 16 else 0), i


@pytest.mark.parametrize("major_a", ["row", "col"])
@pytest.mark.parametrize("major_b", ["row", "col"])
@pytest.mark.parametrize(("d", "c"), [("f32", "f32"), ("f32", "f16"), ("f16", "f16")])
def test_four_products(major_a: str, major_b: str, d: str, c: str):
    random = np.random.default_rng(1)
    a, b = random.integers(-4, 5, (4, 8, 4)), random.integers(-4, 5, (4, 4, 8))
    start = random.integers(-9, 10, (4, 8, 8))
    held = {name: np.zeros((32, count), np.float32 if name == "c" and c == "f32" else np.float16)
            for name, count in (("a", 4), ("b", 4), ("c", 8))}
    for quad in range(4):
        for lane in lanes_of(quad):
            low, high = lane % 4, 4 * (lane >= 16)
            for i in range(4):
                held["a"][lane, i] = a[quad][(low + high, i) if major_a == "row" else (i + high, low)]
                held["b"][lane, i] = b[quad][(low, i + high) if major_b == "row" else (i, low + high)]
            for i in range(8):
                held["c"][lane, i] = start[quad][(wide_place if c == "f32" else half_place)(lane, i)]
    emu = Emulator()
    count = 8 if d == "f32" else 4
    out = emu.alloc(4 * 32 * count)
    inputs = [emu.alloc(held[name]) for name in "abc"]
    parts = {"a": 2, "b": 2, "c": 8 if c == "f32" else 4}
    loads, at = [], 0
    for place, (_, n) in zip(("%a0", "%a1", "%a2"), parts.items(), strict=True):
        loads.append(f"mad.wide.u32 %d1, %t, {4 * n}, {place};")
        loads += [f"ld.global.b32 %r{at + i}, [%d1+{4 * i}];" for i in range(n)]
        at += n
    names = [f"%r{i}" for i in range(at)]
    results = [f"%r{20 + i}" for i in range(count)]
    def listed(items: list[str]) -> str: return "{" + ", ".join(items) + "}"
    body = "\n".join([*loads,
                      f"mma.sync.aligned.m8n8k4.{major_a}.{major_b}.{d}.f16.f16.{c} {listed(results)}, "
                      f"{listed(names[:2])}, {listed(names[2:4])}, {listed(names[4:])};",
                      f"mad.wide.u32 %d2, %t, {4 * count}, %a3;",
                      *(f"st.global.b32 [%d2+{4 * i}], {name};" for i, name in enumerate(results))])
    sound(run(body, *inputs, out, emu=emu))
    got = words(out, np.float32 if d == "f32" else np.float16).reshape(32, 8)
    want = start + a @ b
    for quad in range(4):
        for lane in lanes_of(quad):
            for i in range(8):
                assert got[lane, i] == want[quad][(wide_place if d == "f32" else half_place)(lane, i)]


@pytest.mark.parametrize(("rounding", "want"), [
    ("rn", 1.0), ("rz", 1.0), ("rm", 1.0), ("rp", 1.0 + 4 * 2.0**-52)])
def test_double_products_round_as_told(rounding: str, want: float):
    """1 + four times 2^-120: each addition rounds up by itself."""
    emu = Emulator()
    out = emu.alloc(8 * 64)
    tiny = "0d3C30000000000000"  # 2^-60
    ones, sums = "{%x1, %x1, %x1, %x1}", "{%x2, %x3, %x4, %x5}"
    body = f"""mov.b64 %d1, {tiny}; mov.b64 %d2, 0d3FF0000000000000; .reg .f64 %x<8>;
mov.b64 %x0, %d1; mov.b64 %x1, %d2;
mma.sync.aligned.m16n8k4.row.col.{rounding}.f64.f64.f64.f64 {sums}, {{%x0, %x0}}, {{%x0}}, {ones};
mad.wide.u32 %d3, %t, 16, %a0; st.global.f64 [%d3], %x2; st.global.f64 [%d3+8], %x5;"""
    sound(run(body, out, emu=emu))
    assert set(words(out, np.float64)) == {want}
