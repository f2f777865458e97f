"""The C part of `ptx run` (csrc/host.c), and stub libraries in place of NVIDIA's: compiled once, kept by
content.

Protocol: `build_library()` gives a folder with host.so, which the dynamic linker loads into the program as an
auditor, and with libcuda.so.1 and libcudart.so.N, which have every function of names.txt. What stubs contain
never runs: host.so redirects them all.
"""
from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tinygrad_nv import cache, private
from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.toolchain import extra_flags, find_compiler

SOURCE = Path(__file__).parent / "csrc" / "host.c"
LIST = Path(__file__).parent / "names.txt"
AUDITOR = "host.so"
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fno-sanitize=all", "-g0")
RUNTIMES = ("libcudart.so.12", "libcudart.so.13")      # names, and versions of symbols
DRIVER = "libcuda.so.1"
LIBRARIES = (AUDITOR, DRIVER, *RUNTIMES)


@functools.cache
def names() -> tuple[str, ...]:
    """The functions of CUDA's runtime and driver API, as C sorts them. `name:ptsz` in the list stands for
    two: the second takes the stream 0 for that of its thread."""
    found = []
    for word in LIST.read_text().split():
        name, _, variant = word.partition(":")
        found += [name, f"{name}_{variant}"] if variant else [name]
    return tuple(sorted(found))


def build_library() -> Path:
    """The folder. Raises `ToolchainError` on another system, without a compiler, or when that fails."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ToolchainError(f"ptx run on {sys.platform} {platform.machine()}", "Linux on x86-64",
                             "run it in a container of that platform")
    compiler = find_compiler(any_c=True)
    text = "\0".join((SOURCE.read_text(), *names(), *FLAGS, *extra_flags(), *RUNTIMES, compiler.identity))
    place = cache.folder("host") / hashlib.sha256(text.encode()).hexdigest()[:32]
    if _is_whole(place): return place
    part = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        _build(compiler.command, compiler.environment(), part)
        for name in LIBRARIES: private.write_sealed(part / name, (part / name).read_bytes(), _root(place))
        if not _is_whole(place):        # by now: another process may have built it
            shutil.rmtree(place, ignore_errors=True)
            os.replace(part, place)
    finally: shutil.rmtree(part, ignore_errors=True)
    return place


def _is_whole(place: Path) -> bool:
    """Whether a folder has the libraries as they were built."""
    return all(private.read_sealed(place / name, _root(place)) is not None for name in LIBRARIES)


def _root(place: Path) -> Path: return place.parent.parent


def _build(command: Sequence[str], environment: dict[str, str] | None, into: Path) -> None:
    def compile_part(out: str, *arguments: str) -> None:
        done = subprocess.run([*command, *FLAGS, *extra_flags(), *arguments, "-o", str(into / out)],
                              capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise ToolchainError(f"{command[0]} did not compile {out} of ptx run:\n{done.stderr[-2000:]}",
                                 "clang, or a compiler that takes its flags",
                                 "unset CC, or point it at a clang")

    (into / "names.h").write_text("".join(f"NAME({name})\n" for name in names()))
    compile_part(AUDITOR, f"-I{into}", f"-DNAME_COUNT={len(names())}", str(SOURCE))
    source, versions = into / "stub.c", into / "versions"
    for library in (DRIVER, *RUNTIMES):
        functions = [name for name in names() if _of_driver(name) == (library == DRIVER)]
        source.write_text("".join(map(_stub, functions)))
        versions.write_text(f"{library} {{ global: *; }};\n")
        compile_part(library, str(source), f"-Wl,-soname,{library}",
                 *([] if library == DRIVER else [f"-Wl,--version-script={versions}"]))


def _of_driver(name: str) -> bool: return name.startswith("cu") and name[2].isupper()


def _stub(name: str) -> str:
    """16 bytes, which host.so overwrites."""
    lines = f".globl {name}", f".type {name}, @function", ".balign 16", f"{name}: ud2", ".skip 14, 0x90", \
        f".size {name}, 16"
    return f'__asm__("{"; ".join(lines)}");\n'
