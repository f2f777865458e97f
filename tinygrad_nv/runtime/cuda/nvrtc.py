"""tinygrad's CUDA C renderer, compiled by NVRTC as cuda-python finds it (in a wheel or in a toolkit).

Protocol: a `Renderer` of tinygrad, "CUDA" in `DEV=CUDA:CUDA`. What NVRTC makes must be something the driver
takes (`image_for`): PTX where the driver is of NVRTC's release or a later one; machine code where it is of
the same major release, which runs it but compiles no newer PTX; nothing where it is of an earlier one. Then
the renderer raises, and the device takes its next one, PTX.

The text is compiled for the GPU or, where NVRTC knows only earlier ones, for the latest of those as PTX.
NVRTC's release is in the key of tinygrad's disk cache, with the options. A float32 matmul keeps its precision
unless ALLOW_TF32 is set. Kernels that are given as PTX pass through unchanged. Integers of 8 and 16 bits
wrap, where C would compute them as int, and shift, divide or widen 127 + 1 as 128.

On sm_90 a kernel lets the one after it begin as soon as all its own CTAs have begun, and waits for the one
before. In PTX runtime/program.py finds that it waits; of machine code that is not known, and such a kernel is
launched when all before it is done.

Spawned compile workers (BEAM) make what their parent makes: a pickled renderer carries the kind of image.
"""
from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal

from tinygrad.codegen.opt import tc
from tinygrad.device import CompileError, Compiler
from tinygrad.dtype import dtypes
from tinygrad.helpers import ALLOW_TF32, Target
from tinygrad.renderer import cstyle
from tinygrad.uop.ops import PatternMatcher, UOp, UPat

from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.ptx.assemble import find_program
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.ptx_renderer import OVERFLOWING

Image = Literal["ptx", "cubin"]
Release = tuple[int, int]
PTX = re.compile(r"^\s*\.version\s", re.MULTILINE)
REVISION = 2    # goes up when the renderer writes other text: programs are kept on disk
EARLY = 'asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");'
WIDER = {dtypes.int8: dtypes.int32, dtypes.uint8: dtypes.uint32, dtypes.int16: dtypes.int32,
         dtypes.uint16: dtypes.uint32}


@functools.cache
def _nvrtc() -> Any:
    """cuda-python's binding. Raises `ToolchainError` where it or the library is missing."""
    try:
        from cuda.bindings import nvrtc
        nvrtc.nvrtcVersion()  # the library is loaded by the first call
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ToolchainError(f"NVRTC cannot be loaded: {reason}", "cuda-python and libnvrtc",
                             "pip install cuda-python nvidia-cuda-nvrtc") from error
    return nvrtc


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value behind NVRTC's status, if that is success."""
    status, *values = result
    if int(status) != 0: raise CompileError(f"NVRTC: {what} fails with {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def version() -> Release:
    """NVRTC's release of CUDA. Raises `ToolchainError` where there is none."""
    major, minor = _check(_nvrtc().nvrtcVersion(), "nvrtcVersion")
    return major, minor


def headers() -> str | None:
    """The directory of cuda_fp16.h, cuda_bf16.h and cuda_fp8.h, None where there is none."""
    from cuda import pathfinder
    # before 1.3 it has no such function, or knows nothing of the toolkit's headers
    try: found = pathfinder.find_nvidia_header_directory("cudart")
    except (AttributeError, RuntimeError): found = None
    if found is not None: return str(found)
    beside = nvcc.resolve().parents[1] / "include" if (nvcc := find_program("nvcc")) is not None else None
    return str(beside) if beside is not None and (beside / "cuda_bf16.h").is_file() else None


def image_for(nvrtc: Release, driver: Release, native: bool = True) -> Image | None:
    """Returns what a driver of one release takes from NVRTC of another. `native`: the GPU is of the
    generation that is compiled for, so that it runs the machine code."""
    if driver >= nvrtc: return "ptx"
    return "cubin" if native and driver[0] == nvrtc[0] else None


def image(arch: str) -> Image:
    """Returns what NVRTC makes for the driver and the first GPU of this machine. Raises `ToolchainError`."""
    cu = cuda_api.bindings()
    driver = cuda_api.driver_version(cu)
    status, device = cu.cuDeviceGet(0)
    native = not status and cuda_api.capability(cu, device)[0] == int(arch.removeprefix("sm_")) // 10
    if (found := image_for(version(), driver, native)) is not None: return found
    raise ToolchainError(f"NVRTC {cuda_api.format_version(version())} makes nothing that a driver for CUDA "
                         f"{cuda_api.format_version(driver)} takes",
                         f"a driver for CUDA {version()[0]} or later",
                         "update the NVIDIA driver, or render PTX (DEV=CUDA:PTX)")


class NVRTC(Compiler):
    """CUDA C to PTX text or to machine code, for sm_XY; PTX text as it is."""

    def __init__(self, arch: str, image: Image = "ptx") -> None:
        nvrtc = _nvrtc()
        known = _check(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
        usable = [number for number in known if number <= int(arch.removeprefix("sm_"))]
        if not usable:
            raise ToolchainError(f"NVRTC {cuda_api.format_version(version())} does not compile for {arch}",
                                 f"one of {', '.join(f'sm_{number}' for number in known)}")
        if (include := headers()) is None:
            raise ToolchainError("cuda_bf16.h is not found", "the headers of the CUDA runtime",
                                 "pip install nvidia-cuda-runtime")
        self.image = image
        # PTX runs on later GPUs, machine code only on those of its major capability
        self.options = [f"--gpu-architecture=sm_{max(usable)}", f"-I{include}"]
        if version() >= (12, 4): self.options.append("--minimal")
        digest = hashlib.sha256("\0".join(self.options).encode()).hexdigest()[:8]
        super().__init__(f"compile_tinygrad_nv_nvrtc_{REVISION}_{cuda_api.format_version(version())}_{image}_{arch}_{digest}")

    def compile(self, src: str) -> bytes:
        if PTX.search(src): return src.encode()
        nvrtc = _nvrtc()
        program = _check(nvrtc.nvrtcCreateProgram(src.encode(), b"kernel.cu", 0, [], []),
                           "nvrtcCreateProgram")
        try:
            options = [option.encode() for option in self.options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            if int(status) != 0:
                log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
                raise CompileError(f"NVRTC: {status.name}\n{log.decode(errors='replace').strip()}")
            if self.image == "cubin": return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            return _read(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0")
        finally: nvrtc.nvrtcDestroyProgram(program)


def _read(program: Any, size: Callable[..., Any], fill: Callable[..., Any]) -> bytes:
    """Bytes that NVRTC copies to where it is told."""
    taken = bytearray(_check(size(program), size.__name__))
    _check(fill(program, taken), fill.__name__)
    return bytes(taken)


def _widen(x: UOp) -> UOp:
    """Returns a narrow integer's arithmetic in 32 bits, then cut to its own."""
    return UOp(x.op, src=tuple(s.cast(WIDER[x.dtype]) if s.dtype == x.dtype else s for s in x.src),
               arg=x.arg).cast(x.dtype)


_pm_narrow = PatternMatcher([(UPat(OVERFLOWING, dtype=tuple(WIDER), name="x"), _widen)])


class CUDARenderer(cstyle.CUDARenderer):
    """CUDA C for `target.arch`. Raises `ToolchainError` where NVRTC cannot be used with this driver."""
    extra_matcher = _pm_narrow + cstyle.CUDARenderer.extra_matcher

    def __init__(self, target: Target, kind: Image | None = None) -> None:
        # past tinygrad's CUDARenderer, which would load NVRTC from where it looks for it
        super(cstyle.CUDARenderer, self).__init__(target)
        self.image: Image = kind or image(target.arch)
        self.compiler = NVRTC(target.arch, self.image)
        cores = tc.get_cuda(target.arch)
        self.tensor_cores = [core for core in cores if ALLOW_TF32 or core.dtype_in != dtypes.float]

    def __reduce__(self) -> tuple[Callable[..., CUDARenderer], tuple[Target, Image]]:
        return type(self), (self.target, self.image)

    def render_kernel(self, name: str, kernel: list[str], *args: Any, **kwargs: Any) -> str:
        if int(self.target.arch[3:]) < 90: return super().render_kernel(name, kernel, *args, **kwargs)
        return super().render_kernel(name, [EARLY, *kernel], *args, **kwargs)
