"""PTX instructions applied element by element: arrays in, arrays out, one thread for each element.

Protocol: `apply(body, sources, results)` makes a kernel around `body`, in which %s0, %s1, … are registers
with
this thread's elements of the sources, and %d0, %d1, … are stored. Registers have the width of the NumPy types
(bool: predicates). `%t<8>`, `%w<8>` and `%q<8>` are 32-bit, 64-bit and predicate registers for the body's
use.
"""
from __future__ import annotations

import numpy as np

from tinygrad_nv.ptx.emulator import Emulator

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
LETTERS = {0: "pred", 1: "b16", 2: "b16", 4: "b32", 8: "b64"}
THREADS = 128


def width(kind: np.dtype) -> int:
    """Bytes of an element in a register; 0 for a predicate."""
    return 0 if kind == np.bool_ else kind.itemsize


def declare(name: str, kind: np.dtype) -> str:
    """A register for an element."""
    return f".reg .{LETTERS[width(kind)]} %{name};"


def load(number: int, kind: np.dtype) -> list[str]:
    """%s<number> = this thread's element."""
    lines = [f"ld.param.b64 %base, [s{number}];", f"mad.wide.u32 %base, %index, {kind.itemsize}, %base;"]
    if width(kind): return [*lines, f"ld.global.b{8 * kind.itemsize} %s{number}, [%base];"]
    return [*lines, "ld.global.u8 %byte, [%base];", f"setp.ne.u32 %s{number}, %byte, 0;"]


def store(number: int, kind: np.dtype) -> list[str]:
    """This thread's element = %d<number>."""
    lines = [f"ld.param.b64 %base, [d{number}];", f"mad.wide.u32 %base, %index, {kind.itemsize}, %base;"]
    if width(kind): return [*lines, f"st.global.b{8 * kind.itemsize} [%base], %d{number};"]
    return [*lines, f"selp.u32 %byte, 1, 0, %d{number};", "st.global.u8 [%base], %byte;"]


def kernel(body: str, sources: list[np.dtype], results: list[np.dtype]) -> str:
    """The PTX of `apply`."""
    names = [f"s{i}" for i in range(len(sources))] + [f"d{i}" for i in range(len(results))]
    parameters = ", ".join(f".param .b64 {name}" for name in (*names, "n"))
    lines = [f".visible .entry lanewise({parameters})", "{", ".reg .b32 %index, %byte, %count, %t<8>;",
             ".reg .b64 %base, %w<8>;", ".reg .pred %beyond, %q<8>;"]
    lines += [declare(name, kind) for name, kind in zip(names, (*sources, *results), strict=True)]
    lines += ["mov.u32 %index, %ctaid.x;", f"mul.lo.u32 %index, %index, {THREADS};", "mov.u32 %byte, %tid.x;",
              "add.u32 %index, %index, %byte;", "ld.param.b32 %count, [n];",
              "setp.ge.u32 %beyond, %index, %count;",
              "@%beyond bra DONE;"]
    for number, kind in enumerate(sources): lines += load(number, kind)
    lines.append(body)
    for number, kind in enumerate(results): lines += store(number, kind)
    return HEADER + "\n".join([*lines, "DONE:", "ret;", "}"]) + "\n"


def apply(body: str, sources: list[np.ndarray], results: list[type],
          arch: str = "sm_90a") -> list[np.ndarray]:
    """What the body makes of each element. The emulator must have nothing to find fault with."""
    kinds = [np.dtype(kind) for kind in results]
    count = len(sources[0])
    emu = Emulator(arch=arch, check=True, seed=0)
    args = [emu.alloc(np.ascontiguousarray(source)) for source in sources]
    out = [emu.alloc(np.zeros(count, kind)) for kind in kinds]
    text = kernel(body, [source.dtype for source in sources], kinds)
    report = emu.launch(text, grid=(-(-count // THREADS), 1, 1), block=(THREADS, 1, 1),
                        args=[*args, *out, count])
    assert not report.findings, report.findings
    return [buffer.numpy() for buffer in out]


def apply1(body: str, *sources: np.ndarray, result: type, arch: str = "sm_90a") -> np.ndarray:
    """`apply` with one result."""
    return apply(body, list(sources), [result], arch)[0]


# **** inputs ****

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def integers(bits: int, count: int, seed: int) -> np.ndarray:
    """Random integers of all sizes, and the edges, as unsigned ones."""
    random = np.random.default_rng(seed)
    values = [int(random.integers(0, 1 << 63, dtype=np.uint64)) * 2 + int(random.integers(2))
              for _ in range(count)]
    edges = [0, 1, 2, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1,
             (1 << (bits - 1)) + 1]
    sized = [value >> int(random.integers(64 - bits, 64)) for value in values]
    flipped = [value if random.integers(2) else ~value for value in sized]
    every = [value & ((1 << bits) - 1) for value in (*edges, *flipped)]
    return np.array([every[int(i)] for i in random.integers(0, len(every), count)], UNSIGNED[bits // 8])


def signed(value: int, bits: int) -> int:
    """An unsigned integer read as two's complement."""
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def typed(x: int, kind: str) -> int:
    """An unsigned integer read as a type such as "s16" says."""
    return signed(x, int(kind[1:])) if kind[0] == "s" else x


F32_EDGES = np.array([0, 0x80000000, 1, 0x80000001, 0x007fffff, 0x807fffff, 0x00800000, 0x80800000,
                      0x3f800000,
                      0xbf800000, 0x3f800001, 0x3f7fffff, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                      0x7fc00000,
                      0x7f800001, 0xffc00001, 0x40490fdb, 0x4b000000, 0x4b7fffff, 0x4f000000, 0x5f000000],
                     np.uint32)


def floats(count: int, seed: int) -> np.ndarray:
    """f32 of every exponent, close ones, and the edges, as bits."""
    random = np.random.default_rng(seed)
    anything = random.integers(0, 1 << 32, count, dtype=np.uint32)
    near = (random.standard_normal(count) * 4).astype(np.float32).view(np.uint32)
    return np.where(random.integers(3, size=count) == 0, random.choice(F32_EDGES, count),
                    np.where(random.integers(2, size=count) == 0, anything, near)).astype(np.uint32)


def doubles(count: int, seed: int) -> np.ndarray:
    """f64 of every exponent, close ones, and the edges, as bits."""
    random = np.random.default_rng(seed)
    anything = random.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2)
    near = (random.standard_normal(count) * 4).view(np.uint64)
    edges = np.array([0.0, -0.0, 5e-324, -5e-324, 2.2250738585072014e-308, 1.0, -1.0, np.inf, -np.inf, np.nan,
                      1.7976931348623157e308, 1 + 2**-52, 2.0**53, 2.0**63], np.float64).view(np.uint64)
    return np.where(random.integers(3, size=count) == 0, random.choice(edges, count),
                    np.where(random.integers(2, size=count) == 0, anything, near)).astype(np.uint64)
