"""`tinygrad-nv doctor`: checks what this machine has, what will be used, and what is missing.

Protocol: each check of `examine()` is one function; none raises. A `CheckResult` says what was found and, if
something is missing, how to get it. Nothing is changed: no package is installed, no GPU is configured.
"""
from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tinygrad_nv import config
from tinygrad_nv.cli.doctor_finding import CheckResult
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.assemble import find_program
from tinygrad_nv.toolchain import find_compiler

CUDA_EXTRA = ("pip install cuda-python nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-nvcc nvidia-ml-py "
              "nvtx")


def examine() -> list[CheckResult]:
    """All checks, from packages down to device, compilers and driver."""
    from tinygrad_nv.cli import doctor_cpu
    checks: dict[str, Callable[[], CheckResult]] = {
        "python": _python, "tinygrad": _tinygrad, "tinygrad_nv hooks": _hooks, "device": _device,
        "C compiler": _compiler, "CPU kernels": doctor_cpu.instructions, "CPU threads": doctor_cpu.cores,
        "CPU rates": doctor_cpu.speed, "repacked weights": _check_repacked, "ptxas": _ptxas, "NVRTC": _nvrtc,
        "NVIDIA driver": _driver, "cuda-python": _cuda_python, "DEV=CUDA": _cuda_device}
    return [_safely(subject, check) for subject, check in checks.items()]


def _safely(subject: str, check: Callable[[], CheckResult]) -> CheckResult:
    try: return check()
    except Exception as error:  # a check must not end the report
        return CheckResult(subject, "broken", f"{type(error).__name__}: {error}",
                           needed=subject == "tinygrad")


def usable(findings: list[CheckResult]) -> bool:
    """Whether anything can run."""
    return all(f.state == "ok" for f in findings if f.needed)


def runnable(fix: str) -> str:
    """Advice whose `pip install` is for the Python that runs this: another one may be `pip`'s in PATH, and
    environments made by uv have no pip."""
    own = f'"{sys.executable}"' if " " in sys.executable else sys.executable
    has_pip = importlib.util.find_spec("pip") is not None
    if has_pip: return fix.replace("pip install", f"{own} -m pip install")
    return fix.replace("pip install", f"UV_PYTHON={own} uv pip install")


def table(findings: list[CheckResult]) -> str:
    """The report as aligned text."""
    grid = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings:
        advice = f"\n→ {runnable(finding.fix)}" if finding.fix else ""
        grid.add_row(finding.state, finding.subject, finding.what + advice)
    # no wrapping when piped; markup off, or rich would read [cuda] as a style
    width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 1000
    console = Console(width=width, no_color=True, markup=False, highlight=False)
    with console.capture() as captured: console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _python() -> CheckResult:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return CheckResult("python", "ok", f"{platform.python_version()} on {machine}", needed=True)


def _tinygrad() -> CheckResult:
    version = importlib.metadata.version("tinygrad")
    return CheckResult("tinygrad", "ok", version, needed=True)


def _hooks() -> CheckResult:
    from tinygrad_nv import hooks
    if not hooks.enabled():
        return CheckResult("tinygrad_nv hooks", "missing", "switched off", "unset NV (NV=0 switches off)")
    how = "tinygrad's plugin points" if hooks.official() else "installed over the released wheel"
    return CheckResult("tinygrad_nv hooks", "ok", how)


def _device() -> CheckResult:
    from tinygrad import Device
    try: device = Device[Device.DEFAULT]
    except NVError as error: return CheckResult("device", "broken", error.found, error.fix, needed=True)
    except Exception as error:  # drivers raise arbitrary exceptions
        return CheckResult("device", "broken", f"{type(error).__name__}: {error}",
                       "set DEV to another device", needed=True)
    return CheckResult("device", "ok",
                       f"{device.device}, code by {type(device.renderer).__name__}; will be used "
                   "(DEV=… or --device choose another)", needed=True)


def _compiler() -> CheckResult:
    try: compiler = find_compiler()
    except NVError as error: return CheckResult("C compiler", "missing", error.found, error.fix)
    command = " ".join(compiler.command)
    return CheckResult("C compiler", "ok", f"{compiler.version()} from {compiler.origin}: {command}")


def _check_repacked() -> CheckResult:
    from tinygrad_nv.models.quantised.repack_folder import GB, count_bytes, root
    subject, bound = "repacked weights", config.get("NV_REPACK_CACHE")
    if not bound: return CheckResult(subject, "ok", "not kept: NV_REPACK_CACHE=0")
    folders = [path for path in root().glob("*") if path.is_dir()]
    return CheckResult(subject, "ok", f"{count_bytes(root()) / GB:.1f} of {bound} GB (NV_REPACK_CACHE), "
                                      f"models: {len(folders)}, in {root()}")


def _ptxas() -> CheckResult:
    if (path := find_program("ptxas")) is None:
        return CheckResult("ptxas", "missing", "not in PATH, CUDA_HOME or a wheel",
                       "pip install nvidia-cuda-nvcc")
    out = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return CheckResult("ptxas", "ok", f"{out.splitlines()[-1] if out else 'unknown version'}: {path}")


def _loads(names: tuple[str, ...]) -> str | None:
    """The first of these shared libraries that can be loaded."""
    for name in names:
        try: ctypes.CDLL(name)
        except OSError: continue
        return name
    return None


def _nvrtc() -> CheckResult:
    wheel: list[str] = []
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for location in spec.submodule_search_locations or ():
            wheel += [str(path) for path in Path(location).glob("*/lib/libnvrtc.so.*")
                      if "builtins" not in path.name]
    names = (*wheel, "libnvrtc.so.13", "libnvrtc.so.12", ctypes.util.find_library("nvrtc") or "libnvrtc.so")
    if (name := _loads(names)) is None:
        return CheckResult("NVRTC", "missing", "libnvrtc cannot be loaded", "pip install nvidia-cuda-nvrtc")
    return CheckResult("NVRTC", "ok", name)


def _driver() -> CheckResult:
    if (name := _loads(("libcuda.so.1", "nvcuda.dll"))) is None:
        return CheckResult("NVIDIA driver", "missing", "libcuda cannot be loaded: no NVIDIA GPU here", "")
    driver, version, count = ctypes.CDLL(name), ctypes.c_int(), ctypes.c_int()
    if (code := driver.cuInit(0)) != 0:
        return CheckResult("NVIDIA driver", "broken", f"{name} loads, cuInit fails with {code}",
                       "check the GPU with nvidia-smi")
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    release = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return CheckResult("NVIDIA driver", "ok", f"CUDA {release}, {count.value} GPU(s)")


def _cuda_python() -> CheckResult:
    try: version = importlib.metadata.version("cuda-python")
    except importlib.metadata.PackageNotFoundError:
        return CheckResult("cuda-python", "missing", "not installed", CUDA_EXTRA)
    return CheckResult("cuda-python", "ok", version)


def _cuda_device() -> CheckResult:
    """The device that DEV=CUDA would open."""
    from tinygrad_nv import config
    from tinygrad_nv.runtime.cuda import device as cuda_device
    if not config.get("NV"): return CheckResult("DEV=CUDA", "ok", "tinygrad's own device: NV=0")
    try: instead = cuda_device.why_not("CUDA")
    except NVError as error: return CheckResult("DEV=CUDA", "missing", error.found)
    if instead: return CheckResult("DEV=CUDA", "missing", f"tinygrad's own device: {instead}", CUDA_EXTRA)
    return CheckResult("DEV=CUDA", "ok", f"tinygrad_nv's device; other kernels are {_cuda_code()}")


def _cuda_code() -> str:
    """The format of tinygrad's own kernels on DEV=CUDA."""
    from tinygrad_nv.runtime.cuda import api as cuda_api
    from tinygrad_nv.runtime.cuda import nvrtc
    names = {"ptx": "PTX", "cubin": "machine code"}
    cu = cuda_api.bindings()
    arch = cuda_api.architecture(cuda_api.capability(cu, cu.cuDeviceGet(0)[1])).rstrip("a")
    try: return (f"CUDA C, compiled to {names[nvrtc.image(arch)]} by NVRTC "
                 f"{cuda_api.format_version(nvrtc.version())}")
    except NVError as error: return f"PTX: {error.found}"
