"""tinygrad's renderer for the CPU with a compiler that is looked for: explicit CC, clang in PATH, the
`ziglang` wheel.

Protocol: `hooks.install_cpu` puts this `ClangRenderer` where `tinygrad.runtime.ops_cpu` sees tinygrad's
own. It keeps that name because the device derives the renderer's ("CLANG" in `DEV=CPU:CLANG`) from it. It
renders nothing differently: only who compiles changes. The arguments are those of tinygrad's
`ClangCompiler.compile`, captured by running it.

The compiler is looked for when the device first compiles, which is while it opens. The found `CCompiler`
travels with the pickled renderer, so spawned compile workers use the parent's compiler whatever their
environment says, and its identity is in the key of tinygrad's disk cache together with the arguments, so
another compiler never gets its objects.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec

from tinygrad.helpers import Target
from tinygrad.renderer import cstyle
from tinygrad.runtime.support.compiler_cpu import ClangCompiler

from tinygrad_nv import config
from tinygrad_nv.toolchain import CCompiler, compile_object, find_compiler

OPS_CPU = "tinygrad.runtime.ops_cpu"


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


class _CPUFinder(importlib.abc.MetaPathFinder):
    """Finds tinygrad's CPU device as it is found without, and does something with the module once loaded.

    Importing the device beforehand would double the time that importing tinygrad takes.
    """

    def __init__(self, then: Callable[[types.ModuleType], None]) -> None: self.then = then

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != OPS_CPU: return None
        stop_waiting()
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            load(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wait_for_cpu(then: Callable[[types.ModuleType], None]) -> None:
    """Calls `then` with tinygrad's CPU module: now if it is imported, else when it is."""
    if OPS_CPU in sys.modules: then(sys.modules[OPS_CPU])
    else: sys.meta_path.insert(0, _CPUFinder(then))


def stop_waiting() -> types.ModuleType | None:
    """Takes `wait_for_cpu` back if the module is not imported yet, and returns it if it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _CPUFinder)]
    return sys.modules.get(OPS_CPU)


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
