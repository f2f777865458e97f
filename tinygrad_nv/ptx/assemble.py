"""PTX to cubin with ptxas, with the resources that ptxas reports and the disassembly.

Protocol: `assemble(text, arch)` runs ptxas and returns an `Assembly`: the cubin and, for each kernel, its
registers, spills, stack and shared memory. What ptxas merely notes but means that a kernel is not what its
author wrote is an error here: C7508 (setmaxnreg ignored) and C75xx (wgmma serialised or waits injected).
ptxas 13.5 adds a missing wgmma.fence without a word (13.0: C7519); the emulator's checks find that.
Results are cached by content: text, architecture, flags and the assembler's version. `sass(assembly)`
counts instructions with cuobjdump or nvdisasm.

Programs are looked for in PATH, under CUDA_HOME or CUDA_PATH, and in NVIDIA's wheels.
"""
from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv import cache, private
from tinygrad_nv.errors import PTXError, ToolchainError

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
SERIALISED = re.compile(r"\(C75\d\d\)")
PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
SHARED = re.compile(r"(\d+) bytes smem")
ROUTINE = re.compile(r"Compil|Function properties|Used \d+|\d+ bytes (gmem|cmem)")  # what -v always says
SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(?:\.|\s|;)")


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel: registers a thread, bytes of spills and stack a thread, static shared
    bytes."""
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int


@dataclass(frozen=True)
class Assembly:
    """A cubin for `arch`. `notes` are ptxas's remarks other than the resources."""
    arch: str
    cubin: bytes
    kernels: Mapping[str, Resources]
    notes: tuple[str, ...]


def find_program(name: str) -> Path | None:
    """One of NVIDIA's command-line programs, or None."""
    if (found := shutil.which(name)) is not None: return Path(found)
    roots = [Path(os.environ[home]) for home in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(home)]
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for place in spec.submodule_search_locations or (): roots += sorted(Path(place).iterdir())
    return next((path for root in roots if (path := root / "bin" / name).is_file()), None)


@functools.cache
def version(program: Path) -> str:
    """Returns what a program says of its release."""
    out = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout
    return next((line for line in out.splitlines() if "release" in line), out).strip()


def release() -> tuple[int, int] | None:
    """The CUDA release that ptxas is of, None where there is no ptxas."""
    if (program := find_program("ptxas")) is None: return None
    found = re.search(r"release (\d+)\.(\d+)", version(program))
    return (int(found[1]), int(found[2])) if found else None


def require_ptxas() -> Path:
    """ptxas, or a `ToolchainError` that says where it was looked for."""
    if (found := find_program("ptxas")) is None:
        raise ToolchainError("ptxas is not there",
                             "ptxas in PATH, under CUDA_HOME, or in the nvidia-cuda-nvcc wheel",
                             "pip install 'tinygrad-nv[emulator]'")
    return found


def assemble(text: str, arch: str = "sm_90a", flags: tuple[str, ...] = (), strict: bool = True) -> Assembly:
    """Compiles PTX for one of `ARCHITECTURES`. Raises `PTXError` with ptxas's words and the line they mean;
    without `strict`, that ptxas changed a kernel is a note."""
    if arch not in ARCHITECTURES:
        raise PTXError(f"unknown architecture {arch!r}", 0, f"one of {', '.join(ARCHITECTURES)}",
                       "change the target")
    ptxas = require_ptxas()
    key = hashlib.sha256("\0".join((text, arch, *flags, version(ptxas), "1")).encode()).hexdigest()
    cached = cache.folder("cubin") / f"{key}.json"
    if (kept := private.read_sealed(cached)) is not None:
        return _check_assembly(text, *_load_entry(kept), strict)
    with tempfile.TemporaryDirectory() as directory:
        source, cubin = Path(directory) / "kernel.ptx", Path(directory) / "kernel.cubin"
        source.write_text(text)
        command = [str(ptxas), f"-arch={arch}", "-v", *flags, str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        words = (done.stdout + done.stderr).replace(str(source), "kernel.ptx")
        if done.returncode: raise _refusal(text, arch, words)
        binary = cubin.read_bytes()
    _store(cached, (arch, binary, words))
    return _check_assembly(text, arch, binary, words, strict)


def _load_entry(kept: bytes) -> tuple[str, bytes, str]:
    entry = json.loads(kept)
    return entry["arch"], base64.b85decode(entry["cubin"]), entry["words"]


def _store(path: Path, entry: tuple[str, bytes, str]) -> None:
    arch, cubin, words = entry
    made = {"arch": arch, "cubin": base64.b85encode(cubin).decode(), "words": words}
    private.write_sealed(path, json.dumps(made).encode())


def _refusal(text: str, arch: str, words: str) -> PTXError:
    """ptxas's first error, with the line of the text it means."""
    errors = [line for line in words.splitlines() if "error" in line or "fatal" in line] or [words.strip()]
    number = int(found.group(1)) if (found := re.search(r"line (\d+)", errors[0])) else 0
    lines = text.splitlines()
    where = f"\n    {number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""
    said = "; ".join(errors[:3])
    return PTXError(f"ptxas refuses the kernel for {arch}: {said}{where}", number,
                    "PTX that ptxas assembles", "correct the line, or choose another architecture")


def _check_assembly(text: str, arch: str, cubin: bytes, words: str, strict: bool) -> Assembly:
    """The assembly, unless ptxas changed what the kernel does."""
    lines = [line.partition(":")[2].strip() for line in words.splitlines() if line.startswith("ptxas info")]
    lines += [line for line in words.splitlines() if line.startswith("ptxas warning")]
    changed = [line for line in words.splitlines() if SERIALISED.search(line)]
    if changed and strict:
        raise PTXError(f"ptxas changed the kernel: {changed[0].partition(':')[2].strip()}", 0,
                       "wgmma and setmaxnreg as written",
                       "fence, wait and bound registers so that ptxas need not")
    return Assembly(arch, cubin, _resources(words), tuple(line for line in lines if not ROUTINE.match(line)))


def _resources(words: str) -> dict[str, Resources]:
    """Each kernel's block of ptxas -v."""
    out = {}
    for block in re.split(r"Compiling entry function ", words)[1:]:
        name = block.split("'")[1]
        stack, stores, loads = map(int, found.groups()) if (found := PROPERTIES.search(block)) else (0, 0, 0)
        used, shared = USED.search(block), SHARED.search(block)
        assert used is not None, "ptxas -v names the registers of every kernel"
        out[name] = Resources(int(used.group(1)), stores, loads, stack, int(shared.group(1)) if shared else 0,
                              int(used.group(2) or 0))
    return out


def sass(assembly: Assembly) -> Counter[str] | None:
    """How often each SASS instruction occurs (`HGMMA`, `HMMA`, `LDSM`, …); None without a disassembler."""
    program = find_program("nvdisasm") or find_program("cuobjdump")
    if program is None: return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(assembly.cubin)
        file.flush()
        command = [str(program), *(["-sass"] if program.name == "cuobjdump" else []), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolchainError(f"{program.name} failed: {done.stderr.strip()}", "a disassembler for this cubin",
                             "install one as new as ptxas")
    return Counter(SASS_LINE.findall(done.stdout))
