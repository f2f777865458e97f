# mypy: disallow-untyped-defs=False
"""Predicts launches of kernels that Triton compiles here, without a GPU.

Protocol: `predict(fn, arguments, grid, constants)` compiles a `triton.jit` function for a GPU of the timing
model, specialised as Triton's launcher does, and launches it on the emulator with what that launcher adds:
descriptors with their shapes and strides, and pointers to scratch. Arguments are numbers and `Array`s, which
hold zeros where they do not say.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.lib.gemm_peers import ARCHS
from bench.timing.gate_cases import GPU_NAME
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing

BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1, "fp8e5": 1, "i64": 8, "i32": 4, "i8": 1,
         "u8": 1}
MAP_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32ftz", "f64", "bf16", "tf32",
             "tf32ftz")
SWIZZLES = ("none", "32B", "64B", "128B")


@dataclass(frozen=True)
class Array:
    """A dense array of a type of Triton's; with `block`, a tensor descriptor that the host makes. `values`:
    int32 that it holds, again and again."""
    dtype: str
    shape: tuple[int, ...]
    block: tuple[int, ...] = ()
    values: Sequence[int] | np.ndarray = ()

    @property
    def nbytes(self) -> int: return prod(self.shape) * BYTES[self.dtype]

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(prod(self.shape[i + 1:]) for i in range(len(self.shape)))

    @property
    def kind(self) -> str:
        """Kind of the parameter."""
        if self.block: return f"tensordesc<{self.dtype}[{', '.join(map(str, self.block))}]>"
        return f"*{self.dtype}"


Given = Array | int | float


def predict(fn: Any, arguments: Mapping[str, Given], grid: Sequence[int], constants: Mapping[str, Any],
            gpu: str = GPU_NAME, **options: Any) -> Timing:
    """A launch on a GPU. `arguments` by the function's names; `options` are Triton's (num_warps, …)."""
    arch = figures(gpu).arch
    given = [(name, arguments[name]) for name in fn.arg_names if name in arguments]
    signature = {name: _kind(arguments[name]) if name in arguments else "constexpr" for name in fn.arg_names}
    divisible = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name, one in given
                 if isinstance(one, Array) or (isinstance(one, int) and one % 16 == 0)}
    made = triton.compile(ASTSource(fn, signature, dict(constants), divisible),
                          target=GPUTarget("cuda", ARCHS[arch], 32), options=options)
    meta, text = made.metadata, made.asm["ptx"]
    required = re.search(r"\.reqntid\s+(\d+)", text)
    whole = tuple((*grid, 1, 1)[:3])
    emu = Emulator(arch, check=False)
    scratch = meta.global_scratch_size * prod(whole) * meta.num_ctas
    flat = [*_flat(emu, [one for _, one in given], meta.tensordesc_meta or ()),
            emu.zeros(scratch) if scratch else 0, 0]
    found = emu.launch(text, (whole[0] * meta.num_ctas, *whole[1:]),
                       int(required[1]) if required else 32 * meta.num_warps, flat, meta.name,
                       meta.num_ctas, meta.shared, timing=gpu, keep=False).timing
    assert found is not None
    return found


def _kind(one: Given) -> str:
    if isinstance(one, Array): return one.kind
    return "fp32" if isinstance(one, float) else "i32"


def _flat(emu: Emulator, given: Sequence[Given], maps: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Arguments as Triton's launcher passes them."""
    descriptors = iter(maps)
    for one in given:
        if not isinstance(one, Array):
            yield one
            continue
        buffer = emu.zeros(one.nbytes)
        if len(one.values):
            buffer.data[:] = np.resize(np.array(one.values, np.int32), prod(one.shape)).view(np.uint8)
        if not one.block:
            yield buffer
            continue
        meta = next(descriptors)
        yield TensorMap.of_tiles(buffer.ptr, tuple(meta["block_size"]), SWIZZLES[meta["swizzle"]], one.shape,
                                 tuple(s * BYTES[one.dtype] for s in one.strides[:-1]),
                                 MAP_TYPES[meta["elem_type"]])
        yield from (*one.shape, *one.strides)
