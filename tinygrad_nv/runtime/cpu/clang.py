"""tinygrad's renderer for the CPU with the compiler that `toolchain` finds: explicit CC, clang in PATH, the
`ziglang` wheel.

Protocol: device.py puts this `ClangRenderer` where `tinygrad.runtime.ops_cpu` sees tinygrad's
own. It keeps that name because the device derives the renderer's ("CLANG" in `DEV=CPU:CLANG`) from it. It
renders one thing differently: sums, differences, products and shifts of 8 and 16 bits wrap around also in the
middle of an expression, where C computes them as int. The arguments are those of tinygrad's
`ClangCompiler.compile`, captured by running it. Sources with bfloat16 get the function that clang calls to
round where the processor cannot (any x86-64 without AVX512-BF16): tinygrad links none.

The compiler is looked for when the device first compiles, which is while it opens. The found `CCompiler`
travels with the pickled renderer, so spawned compile workers use the parent's compiler whatever their
environment says, and its identity is in the key of tinygrad's disk cache together with the arguments, so
another compiler never gets its objects.
"""
from __future__ import annotations

import functools
import hashlib
import struct
import types
from collections.abc import Callable

from tinygrad.dtype import dtypes
from tinygrad.helpers import Target
from tinygrad.renderer import cstyle
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

from tinygrad_nv import config
from tinygrad_nv.toolchain import CCompiler, compile_object, find_compiler

# of compiler-rt, to the nearest, ties to even; after the kernel, which comes first in its object
ROUND_BFLOAT16 = """
__attribute__((used, visibility("hidden"))) __bf16 __truncsfbf2(float number) {
  union { float f; unsigned u; } from = { number };
  union { unsigned short u; __bf16 b; } to;
  to.u = number != number ? (from.u >> 16) | 0x40 : (from.u + 0x7fff + (from.u >> 16 & 1)) >> 16;
  return to.b;
}
"""
PC32, PLT32 = 2, 4          # relocations of x86-64: a place, and a function that may be another library's
RELA, SYMBOLS = 4, 2        # types of sections
SECTION, RELOCATION, SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<QQq"), struct.Struct("<IBBHQQ")


def with_own_calls(blob: bytes) -> bytes:
    """An object of x86-64 whose calls of its own functions are those of a place: tinygrad's loader takes all
    others for addresses of libraries."""
    made, (start,), (count,) = bytearray(blob), struct.unpack_from("<Q", blob, 40), \
        struct.unpack_from("<H", blob, 60)
    sections = [SECTION.unpack_from(blob, start + SECTION.size * i) for i in range(count)]
    symbols = next((each[4] for each in sections if each[1] == SYMBOLS), 0)
    for _, kind, _, _, first, size, *_ in sections:
        if kind != RELA: continue
        for at in range(first, first + size, RELOCATION.size):
            where, what, addend = RELOCATION.unpack_from(blob, at)
            defined = SYMBOL.unpack_from(blob, symbols + SYMBOL.size * (what >> 32))[3]
            if what & 0xffffffff == PLT32 and defined:
                RELOCATION.pack_into(made, at, where, what >> 32 << 32 | PC32, addend)
    return bytes(made)


def clang_arguments(clang: ClangCompiler) -> list[str]:
    """Returns the arguments that tinygrad's `ClangCompiler` gives its executable, heard by running its
    `compile`."""
    heard: list[list[str]] = []

    def check_output(command: list[str], input: bytes) -> bytes:
        heard.append(command)
        return b""

    compile = ClangCompiler.compile
    scope = {**compile.__globals__, "subprocess": types.SimpleNamespace(check_output=check_output)}
    types.FunctionType(compile.__code__, scope)(clang, "")
    return heard[0][1:]


class ToolchainCompiler(ClangCompiler):
    """tinygrad's clang compiler run through `toolchain`: found by our search, its failures explained."""

    def __init__(self, arch: list[str], found: CCompiler) -> None:
        super().__init__(arch)
        self.found, self.arguments = found, clang_arguments(self)
        self.rounds = arch[0] == "x86_64"
        words = [*found.arguments(self.arguments), ROUND_BFLOAT16]
        digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
        table: str | None = self.cachekey  # None where CCACHE=0
        keep = table is not None and config.get("NV_PROGRAM_CACHE")
        self.cachekey: str | None = f"{table}_{found.identity}_{digest}" if keep else None

    def compile(self, src: str) -> bytes:
        if not self.rounds or "__bf16" not in src: return compile_object(self.found, self.arguments, src)
        return with_own_calls(compile_object(self.found, self.arguments, src + ROUND_BFLOAT16))


def _render_wrapping(renderer: cstyle.CStyleLanguage, node: UOp) -> str:
    """Renders an operation of small integers with a cast to its own dtype."""
    return f"({renderer.render_cast(node, cstyle.base_rewrite.rewrite(node, ctx=renderer))})"


class ClangRenderer(cstyle.ClangRenderer):
    """tinygrad's `ClangRenderer` whose compiler is found on first use and kept when pickled."""
    string_rewrite = PatternMatcher([
        (UPat((Ops.ADD, Ops.SUB, Ops.MUL, Ops.SHL), (dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16),
              name="node"), lambda ctx, node: _render_wrapping(ctx, node))]) + cstyle.base_rewrite

    def __init__(self, target: Target, found: CCompiler | None = None) -> None:
        # past ClangRenderer's own __init__, which would make the compiler at once
        super(cstyle.ClangRenderer, self).__init__(target)
        self.found = found

    def __reduce__(self) -> tuple[Callable[..., ClangRenderer], tuple[Target, CCompiler]]:
        return type(self), (self.target, self.compiler.found)

    @functools.cached_property
    def compiler(self) -> ToolchainCompiler:
        self.found = self.found or find_compiler()
        return ToolchainCompiler(self.target.arch.split(","), self.found)
