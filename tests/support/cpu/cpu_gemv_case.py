"""Products of few rows on the CPU for tests of cpu/gemm/gemv/kernel.py: the storages and float64 answers of
gemm_case.py, the kernel run on arrays.

Protocol: `run` gives the result [*batch, m, n] in float64. Every storage ends where memory ends: a byte
read behind it kills the process. Rows beyond a launch's own are NaN, and everything beside the result must be
as it was.
"""
from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.support.tile.gemm_case import GUARD, arguments, places, reference, view
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.gemm.gemv import kernel as gemv
from tinygrad_nv.cpu.gemm.schedules import CPUGemv
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.gemm.spec import GemmSpec

Given = dict[str, torch.Tensor]
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512, isa.AVX512_BF16)
          if not isa.why_not(each.level) and (not each.bf16 or "avx512_bf16" in isa.flags())]
BEST = LEVELS[-1]


def at_end(data: np.ndarray) -> np.ndarray:
    """A copy of bytes behind which no page may be touched."""
    page = mmap.PAGESIZE
    size = -(-data.nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, size + page), np.uint8)
    failed = ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + size), ctypes.c_size_t(page), 0)
    assert not failed
    made = memory[size - data.nbytes:size]
    made[:] = data
    return made


def scheduled(spec: GemmSpec, level: isa.ISA = BEST, threads: int = 2, **changes: int) -> CPUGemv:
    """The default schedule of a level, with changes."""
    target = CPU(level, threads)
    made = gemv.default(spec, target)
    assert gemv.problems(spec, made) == []
    return replace(made, **changes)


def loaded(spec: GemmSpec, schedule: CPUGemv | None = None) -> LoadedKernel:
    return load(gemv.build(spec, schedule or scheduled(spec)))


def forget_rows(spec: GemmSpec, given: Given, rows: int) -> Given:
    """Copies in which rows of a from `rows` on are NaN (GUARD of integers)."""
    made = {name: x.clone() for name, x in given.items()}
    offset, extents, strides = places(spec)["a"][1][0]
    nothing = torch.nan if made["a"].is_floating_point() else GUARD
    view(made["a"], extents, strides, offset)[..., rows:, :] = nothing
    return made


def run(kernel: LoadedKernel, spec: GemmSpec, given: Given, order: Sequence[int] | None = None,
        m: int | None = None) -> torch.Tensor:
    """The result; of `m` rows where they are symbolic."""
    rows, out = spec.m if m is None else m, spec.out
    memory = {name: at_end(x.view(torch.uint8).numpy())
              for name, x in forget_rows(spec, given, rows).items()}
    kernel(*memory.values(), *([rows] if spec.symbolic else []), order=order)
    storage = torch.from_numpy(memory["out"].copy()).view(given["out"].dtype)
    lies = view(storage, (*spec.batch, rows, spec.n), (*out.batch, out.m, out.n), out.offset)
    got = lies.double()
    lies.fill_(GUARD)
    assert torch.equal(storage, given["out"]), "elements beside the result were written"
    return got


def exact(spec: GemmSpec, schedule: CPUGemv | None = None, seed: int = 0, m: int | None = None) -> None:
    """Integers come out exactly."""
    given = arguments(spec, seed)
    got = run(loaded(spec, schedule), spec, given, m=m)
    assert torch.equal(got, reference(spec, given)[..., :m or spec.m, :])
