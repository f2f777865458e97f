"""Operands and kernels with which the model of arithmetic is held to the emulator.

Protocol: `edges(format)` are the codes at which arithmetic changes its rules, of both signs; all codes of
formats of 8 bits. `drawn(format, shape)` mixes them with codes of every exponent and with numbers near 1.
`mma(case, a, b, c)` runs an instruction on a batch of operands, a warp each, in one launch.
"""
from __future__ import annotations

import numpy as np

from tests.support.ptx.tensor_case import BITS, HEADER, Mma, listed
from tinygrad_nv.numerics.semantics.formats import Codes, Format, encode
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.fragments import a_fragment, b_fragment, c_fragment


def edges(of: Format) -> Codes:
    """0, the subnormal numbers' ends, the normal ones', neighbours of 1, 2 and 3, infinity, NaNs; ±."""
    if of.bits == 8: return np.arange(256, dtype=np.uint8)
    one = (1 << (of.exponent - 1)) - 1 << of.mantissa
    least, top = 1 << of.mantissa, of.largest_code
    codes = [0, 1, 2, least // 2, least - 1, least, least + 1, one // 2, one - least, one - 1, one, one + 1,
             one + least // 2, one + least - 1, one + least, top - least, top - 1, top, top + 1, top + 2,
             top + 1 + least // 2, of.nan]
    signed = [code | sign for code in codes for sign in (0, of.sign)]
    return (np.array(sorted(set(signed)), np.uint32) << of.unread).astype(of.kind)


def drawn(of: Format, shape: tuple[int, ...], rng: np.random.Generator, near: float = 0.5) -> Codes:
    """A share of `near` numbers around 1, the rest half edges and half any codes."""
    which, count = rng.random(shape), edges(of)
    some = count[rng.integers(0, len(count), shape)]
    anything = rng.integers(0, 1 << of.bits, shape, dtype=np.uint64).astype(of.kind)
    normal = encode(rng.standard_normal(shape), of, "rz")
    return np.where(which < near, normal, np.where(which < (1 + near) / 2, some, anything)).astype(of.kind)


def pack(codes: Codes, place: tuple[np.ndarray, ...], bits: int) -> np.ndarray:
    """Registers [batch, register, lane] of matrices [batch, row, column]."""
    elements = codes[:, *place].astype(np.uint64)
    shifts = np.arange(elements.shape[-1], dtype=np.uint64) * np.uint64(bits)
    return (elements << shifts).sum(-1).astype(np.uint32)


def pack_sums(codes: Codes, kind: str) -> np.ndarray:
    """An accumulator's registers of matrices of codes."""
    registers = codes[:, *c_fragment(*codes.shape[1:])].astype(np.uint32)
    return registers[:, 0::2] | registers[:, 1::2] << np.uint32(16) if kind == "f16" else registers


def unpack_sums(registers: np.ndarray, m: int, n: int, kind: str) -> np.ndarray:
    """The inverse of `pack_sums`, words."""
    if kind == "f16":
        halves = np.empty((len(registers), 2 * registers.shape[1], 32), np.uint32)
        halves[:, 0::2], halves[:, 1::2] = registers & np.uint32(0xffff), registers >> np.uint32(16)
        registers = halves
    out = np.empty((len(registers), m, n), np.uint32)
    out[:, *c_fragment(m, n)] = registers
    return out


def mma(case: Mma, a: Codes, b: Codes, c: Codes) -> np.ndarray:
    """D's words [batch, m, n] of codes A [batch, m, k], B [batch, k, n] and C [batch, m, n]."""
    bits, (results, left, right) = BITS[case.a], case.counts()
    sources = [pack(a, a_fragment(bits, case.m, case.k), bits), pack(b, b_fragment(bits, case.k), bits),
               pack_sums(c, case.d)]
    data = np.ascontiguousarray(np.concatenate(sources, axis=1))
    emu = Emulator(arch=case.arch, check=False)
    out = emu.alloc(np.zeros((len(a), results, 32), np.uint32))
    vectors = (("a", left), ("b", right), ("c", results))
    names = [f"%{name}{i}" for name, count in vectors for i in range(count)]
    operands = ", ".join(listed(name, count) for name, count in (("d", results), *vectors))
    lines = [HEADER.format(arch=case.arch), "{", ".reg .b64 %in, %out, %o;", ".reg .b32 %t, %w;",
             *(f".reg .b32 %{name}<{count + 1}>;" for name, count in (("d", results), *vectors)),
             "ld.param.u64 %in, [in];", "ld.param.u64 %out, [out];", "mov.u32 %t, %tid.x;",
             "mov.u32 %w, %ctaid.x;", "mul.wide.u32 %o, %t, 4;", "add.u64 %in, %in, %o;",
             "add.u64 %out, %out, %o;", f"mul.wide.u32 %o, %w, {128 * len(names)};", "add.u64 %in, %in, %o;",
             f"mul.wide.u32 %o, %w, {128 * results};", "add.u64 %out, %out, %o;"]
    lines += [f"ld.global.b32 {name}, [%in + {128 * i}];" for i, name in enumerate(names)]
    lines.append(f"{case.name} {operands};")
    lines += [f"st.global.b32 [%out + {128 * i}], %d{i};" for i in range(results)]
    lines += ["ret;", "}"]
    report = emu.launch("\n".join(lines), len(a), 32, [emu.alloc(data), out])
    assert not report.findings, report.findings
    return unpack_sums(out.numpy(), case.m, case.n, case.d)
