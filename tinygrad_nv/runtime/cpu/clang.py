"""tinygrad's renderer for the CPU with the compiler that `toolchain` finds: explicit CC, clang in PATH, the
`ziglang` wheel.

Protocol: device.py puts this `ClangRenderer` where `tinygrad.runtime.ops_cpu` sees tinygrad's
own. It keeps that name because the device derives the renderer's ("CLANG" in `DEV=CPU:CLANG`) from it. It
renders nothing differently: only the compiler changes. The arguments are those of tinygrad's
`ClangCompiler.compile`, captured by running it.

The compiler is looked for when the device first compiles, which is while it opens. The found `CCompiler`
travels with the pickled renderer, so spawned compile workers use the parent's compiler whatever their
environment says, and its identity is in the key of tinygrad's disk cache together with the arguments, so
another compiler never gets its objects.
"""
from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable

from tinygrad.helpers import Target
from tinygrad.renderer import cstyle
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from tinygrad_nv import config
from tinygrad_nv.toolchain import CCompiler, compile_object, find_compiler


def clang_arguments(clang: ClangCompiler) -> list[str]:
    """What tinygrad's `ClangCompiler` gives its executable, heard by running its `compile`."""
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
        digest = hashlib.sha256("\0".join(found.arguments(self.arguments)).encode()).hexdigest()[:8]
        table: str | None = self.cachekey  # None where CCACHE=0
        keep = table is not None and config.get("NV_PROGRAM_CACHE")
        self.cachekey: str | None = f"{table}_{found.identity}_{digest}" if keep else None

    def compile(self, src: str) -> bytes:
        return compile_object(self.found, self.arguments, src)


class ClangRenderer(cstyle.ClangRenderer):
    """tinygrad's `ClangRenderer` whose compiler is found on first use and kept when pickled."""

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
