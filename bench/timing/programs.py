"""Programs of CUDA C++ that nvcc builds here, and their launches' predicted times.

Protocol: `program(name, text, include, flags)` builds one for sm_90a, kept by its text and flags; `launches`
runs it on the emulated GPU (tinygrad_nv/host) and gives a timing for each launch of the last group of them
between two synchronisations, as all launches of one call.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.timing.gate_cases import GPU_NAME
from bench.timing.judges import CACHE, errors, nvcc
from tinygrad_nv.errors import NVError
from tinygrad_nv.host import run_program
from tinygrad_nv.ptx.timing.model import Timing

FLAGS = ("-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr", "--expt-extended-lambda",
         "-DNDEBUG", "-DCUTLASS_DEBUG_TRACE_LEVEL=0", "-gencode", "arch=compute_90a,code=compute_90a",
         "-cudart", "shared", "-cudadevrt", "none")
# a libcuda to link with: the emulated one takes its place
DRIVER = "int cuTensorMapEncodeTiled(void) { return 999; }\n"


def program(name: str, text: str, include: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """The program of a source's text; `include`: folders of headers. Raises `NVError` with the compiler's
    words."""
    key = hashlib.sha256("\0".join([text, *map(str, include), *flags]).encode()).hexdigest()[:12]
    made = CACHE / f"{name}_{key}"
    if made.exists(): return made
    CACHE.mkdir(parents=True, exist_ok=True)
    compiler, source = nvcc(), made.with_suffix(".cu")
    libraries = compiler.resolve().parents[1] / "lib"
    for file, words in ((CACHE / "driver.c", DRIVER), (source, text)): file.write_text(words)
    runtime = CACHE / "libcudart.so"
    if not runtime.exists(): runtime.symlink_to(next(libraries.glob("libcudart.so.*")))
    run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(CACHE / "libcuda.so"),
         str(CACHE / "driver.c")])
    run([str(compiler), *FLAGS, *flags, *(f"-I{each}" for each in include), f"-L{CACHE}", "-o", str(made),
         str(source), "-lcuda"])
    return made


def run(command: Sequence[str]) -> None:
    """A compiler's command. Raises `NVError` with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "TMPDIR": str(CACHE)})
    if done.returncode:
        raise NVError(f"{command[0]} failed:\n{errors(done.stderr)}", "nvcc and a ptxas of its release",
                      "give CUTLASS's and CCCL's headers, too")


def launches(made: Path, *arguments: object) -> list[Timing]:
    """Returns the launches of a run of the program. Raises `NVError` where it fails or launches nothing."""
    ran = run_program([str(made), *map(str, arguments)], gpu=GPU_NAME, time=True)
    found = [each.timing for each in ran.launches if each.timing is not None]
    if ran.status or not found:
        raise NVError(f"{made.name} {' '.join(map(str, arguments))} ended with {ran.status}, and launched "
                      f"{len(found)} kernels", "a program that launches kernels",
                      "run it by tinygrad-nv ptx run")
    return found
