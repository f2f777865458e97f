"""The C compiler of the CPU device: which one, how it is called, and how its objects are keyed in caches.

Protocol: tinygrad calls one executable (environment variable CC, else `clang`) as `CC -c -x c ... - -o -`:
C on stdin, an ELF object on stdout. The search order is an explicit CC, then a clang in PATH, also one with
its version in its name, then the clang inside the `ziglang` wheel, then a `cc` that is clang. gcc does not
serve: kernels, tinygrad's and ours, are written with vectors that it lacks (`LACKS`). In the wheel, `zig
clang` compiles kernels: it is clang with clang's arguments, and takes 85 ms for a small one where `zig cc`
takes 125; `zig cc` links the emulator, which needs a libc. The console script `tinygrad-nv-cc` is `zig clang`
as an executable, for use as CC by anything else that wants the same compiler.

`CCompiler.identity` names binary, size, modification time and, of an explicit CC, its version: it is part of
the compile-cache key together with the whole command line, so objects of one compiler are never served to
another.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tinygrad_nv import cache, config, private
from tinygrad_nv.errors import ToolchainError

Origin = Literal["CC", "PATH", "ziglang"]
LACKS = "does not serve, since it is no clang: kernels need clang's vectors (ext_vector_type, " \
        "__builtin_elementwise_fma, .lo and .hi)"


@dataclass(frozen=True)
class CCompiler:
    """A C compiler that was found: its command, where it came from, and what identifies it in a cache key."""
    command: tuple[str, ...]
    origin: Origin
    identity: str

    def arguments(self, arguments: list[str]) -> list[str]:
        """The full command line for tinygrad's `arguments` (everything after the name of the executable)."""
        return [*((self.command[0], "clang") if self.origin == "ziglang" else self.command), *arguments]

    def environment(self) -> dict[str, str] | None:
        """Environment for the compiler process; None means unchanged."""
        return zig_environment() if self.origin == "ziglang" else None

    def version(self) -> str:
        """First line of `--version`, for reports."""
        out = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False,
                             env=self.environment())
        return (out.stdout or out.stderr).partition("\n")[0].strip()


def zig_environment() -> dict[str, str]:
    """Zig insists on a writable cache directory, also where HOME is read-only."""
    environment = dict(os.environ)
    if "ZIG_GLOBAL_CACHE_DIR" not in environment:
        environment["ZIG_GLOBAL_CACHE_DIR"] = str(cache.zig())
    return environment


def zig_binary() -> Path | None:
    """The compiler inside the `ziglang` wheel, or None when the wheel is not installed."""
    if (spec := importlib.util.find_spec("ziglang")) is None or spec.origin is None: return None
    binary = Path(spec.origin).parent / ("zig.exe" if sys.platform == "win32" else "zig")
    return binary if binary.is_file() else None


@functools.cache
def _version(command: tuple[str, ...], _changed: int) -> str:
    try: return subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError: return ""  # compiling with it will say why


def _identity(command: tuple[str, ...], origin: Origin) -> str:
    binary = Path(command[0]).resolve()
    stat = binary.stat()
    # what CC names may be a script around the real compiler, which only its version then tells
    version = _version(command, stat.st_mtime_ns) if origin == "CC" else ""
    text = "\0".join((origin, str(binary), str(stat.st_size), str(stat.st_mtime_ns), *command[1:], version))
    return f"{origin}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def find_compiler(any_c: bool = False) -> CCompiler:
    """The compiler to use now: explicit CC, then clang in PATH, then the `ziglang` wheel, then a `cc` that is
    clang; for plain C, with `any_c`, then gcc or any cc, as a machine that has nvcc has them.

    Raises `ToolchainError` when CC names nothing that can be run, or when there is no compiler at all.
    """
    command: tuple[str, ...]
    if cc := os.environ.get("CC", "").strip():
        # tinygrad itself runs CC as one file name, so a path with spaces comes first and a command line
        # second
        try: command = (cc,) if shutil.which(cc) else tuple(shlex.split(cc))
        except ValueError: command = (cc,)  # an open quote
        if (found := shutil.which(command[0])) is None:
            raise ToolchainError(f"CC={cc}: no such executable", "a clang, by path or by a name in PATH",
                                 "correct CC, or unset it to let tinygrad_nv look for clang and the ziglang "
                                 "wheel")
        return _make_compiler((found, *command[1:]), "CC")
    if (clang := _clang()) is not None: return _make_compiler((clang,), "PATH")
    if (zig := zig_binary()) is not None: return _make_compiler((str(zig), "cc"), "ziglang")
    others = [path for name in ("gcc", "cc") if (path := shutil.which(name)) is not None]
    for other in others:
        if any_c or "clang" in _version((other,), os.stat(other).st_mtime_ns):
            return _make_compiler((other,), "PATH")
    raise ToolchainError("no C compiler for the CPU device" + (f": {others[0]} {LACKS}" if others else ""),
                         "a clang in PATH, or the ziglang wheel",
                         "pip install 'tinygrad-nv[cpu]', which brings that wheel, or install clang with the "
                         "system's package manager")


def _clang() -> str | None:
    """The clang in PATH; without one of that name, the newest of those with a version in theirs."""
    if (found := shutil.which("clang")) is not None: return found
    folders = [Path(folder) for folder in os.get_exec_path() if folder]
    named = {int(path.name[6:]): str(path) for folder in reversed(folders) for path in folder.glob("clang-*")
             if path.name[6:].isdigit() and os.access(path, os.X_OK)}
    return named[max(named)] if named else None


def _make_compiler(command: tuple[str, ...], origin: Origin) -> CCompiler:
    return CCompiler(command, origin, _identity(command, origin))


def compile_object(compiler: CCompiler, arguments: list[str], source: str) -> bytes:
    """Runs the compiler on C `source` and returns the object it writes. One that a signal ends, such as that
    of a system without memory, is run again. Raises `ToolchainError` with its words."""
    command = compiler.arguments(arguments)
    for _ in range(2):
        try:
            # Ctrl-C is for this process: a compiler that it ends would be a kernel that does not build
            done = subprocess.run(command, input=source.encode(), capture_output=True, check=False,
                                  env=compiler.environment(),
                                  process_group=0 if os.name == "posix" else None)
        except OSError as error:
            raise ToolchainError(f"{command[0]} could not be started: {error}",
                                 "an executable compiler") from error
        if done.returncode >= 0: break
    if done.returncode < 0:
        raise ToolchainError(f"{command[0]} was ended by signal {-done.returncode} in the midst of a kernel",
                             "memory for the compiler", "free some, and start again")
    if done.returncode != 0 or not done.stdout.startswith(b"\x7fELF"):
        words = done.stderr.decode(errors="replace").strip()
        name = compiler.version() or command[0]
        raise ToolchainError(
            f"{name} (from {compiler.origin}) did not compile a kernel:\n{words[-2000:]}",
            "clang or a compiler that takes its flags and extensions (gcc lacks ext_vector_type)",
            "unset CC, or point it at a clang")
    return done.stdout


def extra_flags() -> tuple[str, ...]:
    """Flags that NV_C_FLAGS adds behind those of the C parts, such as a sanitizer's."""
    return tuple(shlex.split(str(config.get("NV_C_FLAGS"))))


def build_shared_library(folder: Path, main: str, flags: Sequence[str], name: str, what: str,
                   libraries: Sequence[str] = ()) -> Path:
    """The C of `folder`, of which `main` includes the rest, as a shared library: compiled when sources,
    flags, compiler or, with -march=native, the processor are new, and kept by content under `name` in the
    cache. Raises `ToolchainError`, which calls it `what`."""
    compiler = find_compiler(any_c=True)
    flags = (*flags, *extra_flags())
    sources = [part for path in sorted(folder.iterdir()) for part in (path.name.encode(), path.read_bytes())]
    native = _processor() if "-march=native" in flags else ""
    facts = [*sources, compiler.identity.encode(), native.encode(), " ".join((*flags, *libraries)).encode()]
    path = cache.folder(name) / f"{hashlib.sha256(bytes(1).join(facts)).hexdigest()[:32]}.so"
    # the loader leaves the seal behind the library alone. (It is loaded by its path: only this user may write
    # the folder, and of two libraries by the number of a descriptor, glibc takes the second for the first.)
    if private.read_sealed(path) is not None: return path
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as beside:
        part = Path(beside) / path.name
        # zig has a cache of its own, which a source changed during a compilation spoils: the key is part of
        # the command
        command = [*compiler.command, *flags, f"-DLIBRARY_KEY={path.stem}", str(folder / main), "-o",
                   str(part), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False,
                              env=compiler.environment())
        if done.returncode:
            raise ToolchainError(f"{command[0]} did not compile {what}:\n{done.stderr[-2000:]}",
                                 "clang, or a compiler that takes its flags",
                                 "unset CC, or point it at a clang")
        private.write_sealed(path, part.read_bytes())
    return path


def _processor() -> str:
    """Returns what -march=native depends on."""
    try: text = Path("/proc/cpuinfo").read_text()
    except OSError: return platform.machine() + platform.processor()
    return platform.machine() + next((line for line in text.splitlines() if line.startswith("flags")), "")


def main() -> int:
    """`tinygrad-nv-cc`: clang from the ziglang wheel under clang's own command line."""
    if (zig := zig_binary()) is None:
        print("tinygrad-nv-cc: the ziglang wheel is not installed (pip install 'tinygrad-nv[cpu]')",
              file=sys.stderr)
        return 1
    command = [str(zig), "clang", *sys.argv[1:]]
    if sys.platform != "win32": os.execve(command[0], command, zig_environment())
    return subprocess.run(command, env=zig_environment(), check=False).returncode
