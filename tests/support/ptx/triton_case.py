"""Kernels compiled by Triton on a machine without a GPU, and launched on the emulator.

A `Case` is a kernel, an architecture and a `make(rng)` that gives a `Problem`: arguments, grid, and what the
kernel must have written. `run(emulator, case)` compiles the kernel with Triton for the case's architecture,
adds what Triton's own launcher adds (descriptors with their shapes and strides, two trailing scratch
pointers, dynamic shared memory), launches it, and gives the outputs beside what was wanted.

Arguments are torch tensors in host memory; the emulator sees their bytes.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
         torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.bool: "i1",
         torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8"}
MAP_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32ftz", "f64", "bf16", "tf32",
             "tf32ftz")
SWIZZLES = ("none", "32B", "64B", "128B")


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor made by the host: `tensor` in blocks of `block` elements."""
    tensor: torch.Tensor
    block: tuple[int, ...]


Argument = torch.Tensor | Descriptor | int | float


@dataclass(frozen=True)
class Wanted:
    """What an output must be: |got - values| <= bound elementwise, NaN where `values` is NaN. `bound` is a
    number or an array of the output's shape; 0 asks for the value exactly."""
    values: np.ndarray
    bound: float | np.ndarray = 0.0


@dataclass(frozen=True)
class Problem:
    """Arguments by the kernel's parameter names, compile-time constants, grid, and what outputs must be."""
    arguments: dict[str, Argument]
    wanted: dict[str, Wanted]
    grid: tuple[int, ...]
    constants: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A kernel for an architecture (80 or 90) with Triton's options, and the problem it is given."""
    name: str
    kernel: Any
    make: Callable[[np.random.Generator], Problem]
    arch: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What Triton made. `threads` a CTA; `maps` tells how each host descriptor is to be encoded."""
    ptx: str
    entry: str
    num_warps: int
    threads: int
    shared_bytes: int
    scratch_bytes: int
    num_ctas: int
    maps: Sequence[dict[str, Any]]


def cases(name: str, kernel: Any, make: Callable[[np.random.Generator], Problem],
          archs: Sequence[int] = (80, 90), **options: Any) -> list[Case]:
    """The same kernel and problem for each architecture."""
    return [Case(f"{name}-sm{arch}", kernel, make, arch, options) for arch in archs]


def values(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as numpy numbers: integers as int64, anything else as float64."""
    whole = not tensor.dtype.is_floating_point
    return tensor.to(torch.int64 if whole else torch.float64).numpy()


def exact(tensor: torch.Tensor) -> Wanted:
    """Every element as in `tensor`."""
    return Wanted(values(tensor))


def compile(fn: Any, signature: dict[str, str], constants: dict[str, Any], arch: int,
            divisible: Sequence[str] = (), **options: Any) -> Compiled:
    """Triton's PTX for `fn`. `signature` gives Triton's type of each parameter, `divisible` the parameters
    known to be multiples of 16; `options` are Triton's (num_warps, num_stages, …)."""
    attributes = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    made = triton.compile(ASTSource(fn, signature, constants, attributes),
                          target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    meta, ptx = made.metadata, made.asm["ptx"]
    required = re.search(r"\.reqntid\s+(\d+)", ptx)
    threads = int(required[1]) if required else 32 * meta.num_warps
    return Compiled(ptx, meta.name, meta.num_warps, threads, meta.shared, meta.global_scratch_size,
                    meta.num_ctas, meta.tensordesc_meta or ())


def _triton_type(value: Argument) -> str:
    if isinstance(value, Descriptor):
        return f"tensordesc<{TYPES[value.tensor.dtype]}[{', '.join(map(str, value.block))}]>"
    if isinstance(value, torch.Tensor): return "*" + TYPES[value.dtype]
    if isinstance(value, float): return "fp32"
    return "i32" if -2**31 <= value < 2**31 else "i64"


def compile_for(case: Case, problem: Problem) -> Compiled:
    """Triton's PTX for a problem's argument types, specialised for divisibility as Triton's launcher does."""
    names = case.kernel.arg_names
    signature = {name: _triton_type(problem.arguments[name]) if name in problem.arguments else "constexpr"
                 for name in names}
    divisible = [name for name, value in problem.arguments.items()
                 if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)]
    return _compile_once(case.kernel, tuple(signature.items()), tuple(problem.constants.items()), case.arch,
                         tuple(divisible), tuple(case.options.items()))


@cache
def _compile_once(fn: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...],
                  arch: int, divisible: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Compiled:
    return compile(fn, dict(signature), dict(constants), arch, divisible, **dict(options))


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A copy of a contiguous tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def _expand(emulator: Any, compiled: Compiled, descriptor: Descriptor, buffer: Any, index: int) -> list[Any]:
    """A host descriptor as Triton's launcher passes it: a tensor map, or without one (sm_80) base, shape,
    strides and two flags; then shape and strides again."""
    from tinygrad_nv.ptx.emulator import TensorMap
    tensor = descriptor.tensor
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if not compiled.maps: return [buffer, *sizes, *strides, 0, 0, *sizes, *strides]
    meta = compiled.maps[index]
    tensor_map = TensorMap.of_tiles(buffer, box=tuple(meta["block_size"]), swizzle=SWIZZLES[meta["swizzle"]],
                                 dtype=MAP_TYPES[meta["elem_type"]], dims=tuple(sizes),
                                 strides=tuple(s * tensor.element_size() for s in strides))
    return [tensor_map, *sizes, *strides]


def launch(emulator: Any, compiled: Compiled, grid: Sequence[int], args: Sequence[Any]) -> Any:
    """Launches with `args` (emulator buffers, numbers, `(Descriptor, buffer)` pairs) in the kernel's order,
    and adds Triton's scratch pointers. Returns the emulator's report."""
    whole = (*grid, 1, 1)[:3]
    flat: list[Any] = []
    descriptors = 0
    for value in args:
        if isinstance(value, tuple):
            flat += _expand(emulator, compiled, *value, index=descriptors)
            descriptors += 1
        else: flat.append(value)
    ctas = int(np.prod(whole)) * compiled.num_ctas
    scratch = emulator.alloc(compiled.scratch_bytes * ctas) if compiled.scratch_bytes else 0
    return emulator.launch(compiled.ptx, grid=(whole[0] * compiled.num_ctas, *whole[1:]),
                           block=(compiled.threads, 1, 1), args=[*flat, scratch, 0], entry=compiled.entry,
                           cluster=(compiled.num_ctas, 1, 1), dynamic_smem=compiled.shared_bytes)


@dataclass(frozen=True)
class Outcome:
    """A run: the outputs that the problem has wishes for, and the emulator's report."""
    outputs: dict[str, torch.Tensor]
    problem: Problem
    report: Any

    def wrong(self) -> list[str]:
        """A line for each output beyond its bound."""
        found = []
        for name, wanted in self.problem.wanted.items():
            got = values(self.outputs[name])
            same = (got == wanted.values) | (np.isnan(got) & np.isnan(wanted.values))
            with np.errstate(invalid="ignore"):
                bad = ~(same | (np.abs(got - wanted.values) <= wanted.bound))
            if not bad.any(): continue
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            found.append(f"{name}: {bad.sum()} of {bad.size} wrong, first at {at}: "
                         f"{got[at]!r}, wanted {wanted.values[at]!r}")
        return found


def run(emulator: Any, case: Case, seed: int = 0) -> Outcome:
    """Compiles and launches a case on `emulator` with the problem that `seed` gives."""
    return solve(emulator, case, case.make(np.random.default_rng(seed)))


def solve(emulator: Any, case: Case, problem: Problem, compiled: Compiled | None = None) -> Outcome:
    """Compiles a case's kernel for a problem (once in a process) and launches it on `emulator`."""
    compiled = compiled or compile_for(case, problem)
    buffers, args = {}, []
    for name in case.kernel.arg_names:
        value = problem.arguments.get(name)
        if value is None: continue
        if isinstance(value, int | float):
            args.append(value)
            continue
        tensor = value.tensor if isinstance(value, Descriptor) else value
        buffers[name] = emulator.alloc(as_bytes(tensor)), tensor
        args.append((value, buffers[name][0]) if isinstance(value, Descriptor) else buffers[name][0])
    report = launch(emulator, compiled, problem.grid, args)
    outputs = {name: torch.from_numpy(np.array(buffers[name][0].numpy()).view(np.uint8).reshape(-1))
               .view(buffers[name][1].dtype).view(buffers[name][1].shape) for name in problem.wanted}
    return Outcome(outputs, problem, report)
