"""Kernels of one warpgroup around wgmma, and shared-memory images laid out as descriptors say.

A kernel copies an image from global to shared memory with ordinary stores, fences it for the async proxy,
and runs one wgmma (or what `body` says) on it; accumulators come from and go to global memory as
[register][thread].

"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.support.ptx.tensor_case import (
    BITS,
    listed,
    pack,
    pack_accumulator,
    pack_metadata,
    unpack_accumulator,
)
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.fragments import Major, a_fragment, descriptor, matrix_offset, swizzle
from tinygrad_nv.ptx.emulator.report import Report

THREADS = 128


@dataclass(frozen=True)
class Tile:
    """An operand in shared memory at `start` (bytes from the image's own start, which is 1024-byte aligned).
    Its swizzle begins at row `base` of a pattern."""
    start: int
    leading: int
    stride: int
    span: int
    major: Major
    base: int = 0

    @property
    def descriptor(self) -> int:
        made = descriptor(0x400 + self.start, self.leading, self.stride, self.span)
        return made | self.base << 49

    def place(self, image: np.ndarray, codes: np.ndarray, bits: int) -> None:
        """Writes codes [mn, k] of `bits` (8 and up; single bits come packed in bytes) to an image (uint8)."""
        size = bits // 8
        mn, k = np.ogrid[:codes.shape[0], :codes.shape[1]]
        at = self.start + matrix_offset(mn, k, self.major, self.span, size, self.leading, self.stride)
        for byte in range(size):
            where = swizzle(0x400 + at + byte, self.span) - 0x400
            image[where] = codes >> np.uint32(8 * byte) & np.uint32(255)


def tile(start: int, major: Major, span: int, size: int, mn: int, k: int) -> Tile:
    """A tile of mn x k elements of `size` bytes, rows packed."""
    per = 16 // size
    if major == "k":
        if span: return Tile(start, mn * span, 8 * span, span, major)
        return Tile(start, 128 * (mn // 8), 128, 0, major)
    if span: return Tile(start, k * span, 8 * span, span, major)
    return Tile(start, 128 * (mn // per), 128, 0, major)


@dataclass(frozen=True)
class Wgmma:
    """A wgmma.mma_async m64nN of types; `a_major` None: A in registers."""
    n: int
    k: int
    d: str
    a: str
    b: str
    a_major: Major | None = "k"
    b_major: Major = "k"
    a_span: int = 128
    b_span: int = 128
    negate_a: bool = False
    negate_b: bool = False
    satfinite: bool = False
    sparse: bool = False
    selector: int = 0
    scale: str = "1"

    @property
    def name(self) -> str:
        tail = ".and.popc" * (self.a == "b1") + ".satfinite" * self.satfinite
        return (f"wgmma.mma_async{'.sp' * self.sparse}.sync.aligned.m64n{self.n}k{self.k}"
                f".{self.d}.{self.a}.{self.b}{tail}")

    @property
    def stored(self) -> int:
        """Elements along k that A keeps."""
        return self.k // 2 if self.sparse else self.k

    def results(self) -> int:
        """Registers of D."""
        return self.n // (4 if self.d == "f16" else 2)

    def instruction(self, a: str, b: str, d: str = "d") -> str:
        """The instruction with its operands: `a`, `b` descriptors (or A's vector), %{d}0 … accumulators."""
        words = [listed(d, self.results()), a, b]
        if self.sparse: words += ["%e0", str(self.selector)]
        words.append(self.scale)
        if self.d != "s32":
            words += ["-1" if self.negate_a else "1", "-1" if self.negate_b else "1"]
            if BITS[self.a] == 16:
                if self.a_major: words.append(str(int(self.a_major == "mn")))
                words.append(str(int(self.b_major == "mn")))
        return f"{self.name} {', '.join(words)};"

    def tiles(self) -> tuple[Tile | None, Tile]:
        """Where the operands are."""
        def size(kind: str) -> int: return max(BITS[kind] // 8, 1)
        scale = 8 if self.a == "b1" else 1
        left = None
        if self.a_major:
            left = tile(0, self.a_major, self.a_span, size(self.a), 64, self.stored // scale)
        return left, tile(32768, self.b_major, self.b_span, size(self.b), self.n, self.k // scale)


BEGIN = """.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(.param .u64 image, .param .u64 in, .param .u64 out, .param .u64 da, .param .u64 db,
                       .param .u32 size)
.reqntid 128
{{
.reg .pred %p, %q;
.reg .b32 %t, %i, %s, %n, %x, %y;
.reg .b64 %image, %in, %out, %o, %da, %db;
.reg .b32 %d<{results}>, %a<5>, %e<2>;
ld.param.u64 %image, [image];
ld.param.u64 %in, [in];
ld.param.u64 %out, [out];
ld.param.u64 %da, [da];
ld.param.u64 %db, [db];
ld.param.u32 %n, [size];
mov.u32 %t, %tid.x;
mul.wide.u32 %o, %t, 4;
add.u64 %in, %in, %o;
add.u64 %out, %out, %o;
add.u64 %image, %image, %o;
mov.u32 %s, smem;
shl.b32 %i, %t, 2;
add.u32 %s, %s, %i;
copy:
ld.global.b32 %x, [%image];
st.shared.b32 [%s], %x;
add.u32 %s, %s, 512;
add.u64 %image, %image, 512;
add.u32 %i, %i, 512;
setp.lt.u32 %p, %i, %n;
@%p bra copy;
"""
VISIBLE = "fence.proxy.async.shared::cta;\nbar.sync 0;\n"
ISSUE = "wgmma.fence.sync.aligned;\n{instruction}\nwgmma.commit_group.sync.aligned;\n"
WAIT = "wgmma.wait_group.sync.aligned 0;\n"


def load(name: str, count: int, first: int = 0) -> str:
    """Loads of %NAME0 … from `in`, from register `first` on."""
    return "".join(f"ld.global.b32 %{name}{i}, [%in + {512 * (first + i)}];\n" for i in range(count))


def store(count: int, name: str = "d") -> str:
    """Stores of %d0 … to `out`."""
    return "".join(f"st.global.b32 [%out + {512 * i}], %{name}{i};\n" for i in range(count))


def kernel(case: Wgmma, body: str | None = None) -> str:
    """The kernel; `body` replaces what comes between the loads and the stores."""
    count = case.results()
    left = "%da" if case.a_major else listed("a", 4)
    if body is None: body = VISIBLE + ISSUE.format(instruction=case.instruction(left, "%db")) + WAIT
    loads = load("d", count) + load("a", 4, count) + load("e", 1, count + 4)
    return BEGIN.format(results=count + 1) + loads + body + store(count) + "ret;\n}\n"


@dataclass(frozen=True)
class Operands:
    """Codes of A [64, stored k] and B [k, n], C's words, metadata codes [64, group] of a sparse A."""
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    metadata: np.ndarray | None = None


def bytes_of(codes: np.ndarray) -> np.ndarray:
    """Single bits packed along the last axis, as uint32 of a byte each."""
    return np.packbits(codes.astype(np.uint8), axis=-1, bitorder="little").astype(np.uint32)


def image_of(case: Wgmma, x: Operands) -> np.ndarray:
    """Shared memory with both operands in it."""
    image = np.zeros(32768 + 65536, np.uint8)
    left, right = case.tiles()
    a, b = (x.a, x.b.T) if case.a != "b1" else (bytes_of(x.a), bytes_of(x.b.T))
    if left is not None: left.place(image, a, max(BITS[case.a], 8))
    right.place(image, b, max(BITS[case.b], 8))
    return image


def registers_of(case: Wgmma, x: Operands) -> np.ndarray:
    """Accumulators, A and metadata, [register, thread]."""
    bits = BITS[case.a]
    a = np.zeros((64, case.stored), np.uint32) if case.a_major else x.a
    parts = []
    for p in range(4):
        rows = slice(16 * p, 16 * p + 16)
        part = [pack_accumulator(x.c[rows], case.d), pack(a[rows], a_fragment(bits, 16, case.stored), bits)
                if case.a != "b1" else np.zeros((4, 32), np.uint32)]
        metadata = np.zeros((1, 32), np.uint32)
        if x.metadata is not None: metadata = pack_metadata(x.metadata[rows], bits, case.k, case.selector)
        parts.append(np.concatenate([*part, metadata]))
    return np.concatenate(parts, axis=1)


def launch(case: Wgmma, x: Operands, body: str | None = None, seed: int = 0, exact: bool = False,
           check: bool = True, image: np.ndarray | None = None, tiles: tuple[Tile | None, Tile] | None = None,
           smem: int | None = None) -> tuple[np.ndarray, Report]:
    """D's words [64, n], and the report."""
    emu = Emulator(seed=seed, exact=exact, check=check)
    image = image_of(case, x) if image is None else image
    left, right = tiles or case.tiles()
    out = emu.alloc(np.zeros((case.results(), THREADS), np.uint32))
    report = emu.launch(kernel(case, body), 1, THREADS,
                        [emu.alloc(image), emu.alloc(registers_of(case, x)), out,
                         left.descriptor if left else 0, right.descriptor, image.nbytes],
                        dynamic_smem=image.nbytes if smem is None else smem)
    parts = out.numpy().reshape(case.results(), 4, 32)
    return np.concatenate([unpack_accumulator(parts[:, p], 16, case.n, case.d) for p in range(4)]), report


def with_scale(case: Wgmma, scale: str) -> Wgmma:
    """The same with another scale-d."""
    return replace(case, scale=scale)
