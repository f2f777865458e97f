"""Numbers, kernels and references for the tests of tensor-core instructions.

Matrices of codes (unsigned ints, the bits of elements) are packed into registers with the index arrays of
fragments.py, handed to a kernel of one instruction, and the accumulators come back as a matrix. `truncated`
is the arithmetic of the hardware in Python integers, element by element.

"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.fragments import a_fragment, b_fragment, c_fragment, metadata_place
from tinygrad_nv.ptx.emulator.report import Report

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1,
        "f64": 64}
LEAST_EXPONENT = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FLOATS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


# **** numbers ****

def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Codes (uint32) of values in a type; floating-point values are rounded to it."""
    if kind == "tf32": return np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0xffffe000)
    if kind in TORCH:
        out = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(TORCH[kind])
        return out.view(torch.uint8 if BITS[kind] == 8 else torch.int16).numpy().astype(
            np.uint8 if BITS[kind] == 8 else np.uint16, copy=False).astype(np.uint32)
    return (values.astype(np.int64) & ((1 << BITS[kind]) - 1)).astype(np.uint32)


def decode(codes: np.ndarray, kind: str) -> np.ndarray:
    """Values (float64) of codes."""
    if kind == "tf32":
        return (codes.astype(np.uint32) & np.uint32(0xffffe000)).view(np.float32).astype(np.float64)
    if kind in TORCH:
        raw = codes.astype(np.uint8 if BITS[kind] == 8 else np.uint16)
        signed = torch.from_numpy(raw.view(np.uint8 if BITS[kind] == 8 else np.int16))
        return signed.view(TORCH[kind]).double().numpy()
    bits = BITS[kind]
    values = codes.astype(np.int64) & ((1 << bits) - 1)
    negative = (values >> (bits - 1) & 1) & (kind[0] == "s")
    return np.where(negative, values - (1 << bits), values).astype(np.float64)


def integers(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of random small integers that the type has exactly; all of its values for integer types."""
    ranges = {"s8": (-128, 128), "u8": (0, 256), "s4": (-8, 8), "u4": (0, 16), "b1": (0, 2)}
    low, high = ranges.get(kind, (-4, 5))
    return encode(rng.integers(low, high, shape), kind)


def randoms(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of normally distributed numbers (of any integers for integer types)."""
    return encode(rng.standard_normal(shape), kind) if kind in FLOATS else integers(rng, kind, shape)


def words(values: np.ndarray, kind: str) -> np.ndarray:
    """An accumulator matrix as 32-bit words of one element: f32 or s32 bits, or f16 codes."""
    if kind == "f16": return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(values, np.float32 if kind == "f32" else np.int32).view(np.uint32)


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of `words`, as float64 (s32: int64)."""
    if kind == "f16": return raw.astype(np.uint16).view(np.float16).astype(np.float64)
    return raw.view(np.float32).astype(np.float64) if kind == "f32" else raw.view(np.int32).astype(np.int64)


# **** references ****

def terms(codes: np.ndarray, kind: str) -> list[tuple[float, int]]:
    """Values and the exponents that alignment goes by: a product of zero has none."""
    return [(float(x), max(math.frexp(x)[1] - 1, LEAST_EXPONENT[kind]) if x else -400)
            for x in decode(codes, kind)]


def rounded_to_zero(value: float, keep: int) -> float:
    """A sum as f32 with `keep` bits of mantissa, toward zero; infinity from 2^128 up."""
    if value == 0 or abs(value) >= 2.0 ** 128: return math.copysign(math.inf, value) if value else 0.0
    exponent = max(math.frexp(value)[1] - 1, -126)
    return math.ldexp(math.trunc(math.ldexp(value, keep - exponent)), exponent - keep)


def truncated(a: np.ndarray, b: np.ndarray, c: float, kinds: tuple[str, str], bits: int, step: int,
              keep: int = 23, half: bool = False) -> float:
    """One element of A * B + C as tensor cores do it: a and b are codes of a row and a column."""
    left, right = terms(a, kinds[0]), terms(b, kinds[1])
    for k in range(0, len(left), step):
        if math.isinf(c): return c  # a step has overflowed
        pairs = zip(left[k:k + step], right[k:k + step], strict=True)
        products = [(x * y, e + f) for (x, e), (y, f) in pairs]
        products.append((c, max(math.frexp(c)[1] - 1, -126) if c else -126))
        top = max(e for _, e in products)
        total = sum(math.trunc(math.ldexp(x, bits - top)) for x, _ in products)
        value = math.ldexp(total, top - bits)
        c = float(np.float16(value)) if half else rounded_to_zero(value, keep)
    return c


# **** registers ****

def pack(codes: np.ndarray, place: tuple[np.ndarray, ...], bits: int) -> np.ndarray:
    """Registers [register, lane] (uint32) whose elements `place` says; single bits and f64 are their own."""
    elements = codes[place].astype(np.uint64)
    if bits == 64: return elements[..., 0]
    shifts = np.arange(elements.shape[-1], dtype=np.uint64) * np.uint64(bits)
    return (elements << shifts).sum(-1).astype(np.uint32)


def pack_accumulator(raw: np.ndarray, kind: str) -> np.ndarray:
    """An accumulator's registers from its `words`."""
    registers = raw[c_fragment(*raw.shape)]
    return registers[0::2] | registers[1::2] << np.uint32(16) if kind == "f16" else registers


def unpack_accumulator(registers: np.ndarray, m: int, n: int, kind: str) -> np.ndarray:
    """The inverse of `pack_accumulator`."""
    if kind == "f16":
        halves = np.empty((2 * len(registers), 32), np.uint32)
        halves[0::2], halves[1::2] = registers & np.uint32(0xffff), registers >> np.uint32(16)
        registers = halves
    out = np.empty((m, n), registers.dtype)
    out[c_fragment(m, n)] = registers
    return out


def pack_metadata(codes: np.ndarray, bits: int, k: int, selector: int) -> np.ndarray:
    """Metadata registers [1, lane] from four-bit codes [row, group]; other lanes hold rubbish."""
    out = np.full(32, 0xa5a5a5a5, np.uint32)
    used = np.zeros(32, bool)
    for (row, group), code in np.ndenumerate(codes):
        lane, bit = metadata_place(bits, k, row, group, selector)
        if not used[lane]: out[lane], used[lane] = 0, True
        out[lane] |= np.uint32(int(code) << bit)
    return out[None]


# **** sparsity ****

@dataclass(frozen=True)
class Sparse:
    """A sparse A: `dense` codes, `stored` ones, and metadata codes [row, group]."""
    dense: np.ndarray
    stored: np.ndarray
    codes: np.ndarray


def sparsify(rng: np.random.Generator, codes: np.ndarray, kind: str) -> Sparse:
    """Keeps 2 of 4 random elements of each group (tf32: 1 of 2; 4-bit integers: 2 of 4 pairs)."""
    m, k = codes.shape
    unit, width = {"tf32": (1, 2), "s4": (2, 4), "u4": (2, 4)}.get(kind, (1, 4))
    groups = k // (unit * width)
    blocks = codes.reshape(m, groups, width, unit)
    kept, named = np.zeros((m, groups, width), bool), np.zeros((m, groups), np.uint32)
    for row in range(m):
        for group in range(groups):
            chosen = sorted(rng.choice(width, width // 2, replace=False))
            kept[row, group, chosen] = True
            named[row, group] = (4, 14)[chosen[0]] if width == 2 else chosen[0] | chosen[1] << 2
    return Sparse((blocks * kept[..., None]).reshape(m, k), blocks[kept].reshape(m, k // 2), named)


# **** kernels ****

HEADER = (".version 9.0\n.target {arch}\n.address_size 64\n"
          ".visible .entry kernel(.param .u64 in, .param .u64 out)\n")


def listed(name: str, count: int) -> str:
    """`{%a0, %a1}`."""
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def warp_kernel(instruction: str, sources: dict[str, int], results: int, arch: str, kind: str = "b32") -> str:
    """A kernel of one warp: registers %NAMEi of `sources` (name → count) come from `in` [register][lane],
    those of %d go to `out`."""
    size = 8 if kind == "b64" else 4
    move = kind if kind == "b32" else "f64"
    lines = [HEADER.format(arch=arch), "{", ".reg .b64 %in, %out;", ".reg .b32 %t;", ".reg .b64 %o;",
             f".reg .{move} %d<{results + 1}>;",
             *(f".reg .{move} %{name}<{n + 1}>;" for name, n in sources.items()),
             "ld.param.u64 %in, [in];", "ld.param.u64 %out, [out];", "mov.u32 %t, %tid.x;",
             f"mul.wide.u32 %o, %t, {size};", "add.u64 %in, %in, %o;", "add.u64 %out, %out, %o;"]
    names = [f"%{name}{i}" for name, n in sources.items() for i in range(n)]
    lines += [f"ld.global.{move} {name}, [%in + {32 * size * i}];" for i, name in enumerate(names)]
    lines.append(instruction)
    lines += [f"st.global.{move} [%out + {32 * size * i}], %d{i};" for i in range(results)]
    return "\n".join([*lines, "ret;", "}"])


def run_warp(ptx: str, sources: list[np.ndarray], results: int, arch: str, exact: bool = False) -> np.ndarray:
    """Result registers [register, lane] of a `warp_kernel`; no finding is allowed."""
    emu = Emulator(arch=arch, exact=exact)
    data = np.concatenate(sources)
    out = emu.alloc(np.zeros((results, 32), data.dtype))
    report = emu.launch(ptx, 1, 32, [emu.alloc(data), out])
    assert not report.findings, report.findings
    return out.numpy()


@dataclass(frozen=True)
class Mma:
    """An mma.sync of a shape, types and modifiers."""
    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    modifiers: str = ""      # before the types: ".satfinite", ".xor.popc"
    sparse: str = ""         # "", "sp" or "sp::ordered_metadata"
    selector: int = 0
    arch: str = "sm_90a"
    exact: bool = False

    @property
    def name(self) -> str:
        sparse = f".{self.sparse}" if self.sparse else ""
        tail = self.modifiers if "popc" in self.modifiers else ""
        head = "" if tail else self.modifiers
        return (f"mma{sparse}.sync.aligned.m{self.m}n{self.n}k{self.k}.row.col{head}"
                f".{self.d}.{self.a}.{self.b}.{self.d}{tail}")

    def counts(self) -> tuple[int, int, int]:
        """Registers of D, A and B."""
        size = 64 if self.a == "f64" else 32
        stored = self.k // 2 if self.sparse else self.k
        return (self.m * self.n // 32 // (2 if self.d == "f16" else 1),
                self.m * stored * BITS[self.a] // 32 // size,
                self.k * self.n * BITS[self.b] // 32 // size)

    def ptx(self) -> str:
        nd, na, nb = self.counts()
        sources = {"a": na, "b": nb, "c": nd, **({"e": 1} if self.sparse else {})}
        tail = f", %e0, {self.selector}" if self.sparse else ""
        operands = ", ".join(listed(x, y) for x, y in (("d", nd), ("a", na), ("b", nb), ("c", nd)))
        kind = "b64" if self.a == "f64" else "b32"
        return warp_kernel(f"{self.name} {operands}{tail};", sources, nd, self.arch, kind)

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray,
            metadata: np.ndarray | None = None) -> np.ndarray:
        """D's words from codes of A (what is stored of it) and B, and C's words."""
        bits = BITS[self.a]
        sources = [pack(a, a_fragment(bits, self.m, a.shape[1]), bits),
                   pack(b, b_fragment(bits, self.k), bits),
                   pack_accumulator(c, self.d)]
        if metadata is not None: sources.append(pack_metadata(metadata, bits, self.k, self.selector))
        got = run_warp(self.ptx(), sources, self.counts()[0], self.arch, self.exact)
        return unpack_accumulator(got, self.m, self.n, self.d)


def kinds_found(report: Report) -> set[str]:
    """Kinds of findings."""
    return {finding.kind for finding in report.findings}
